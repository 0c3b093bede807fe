"""The files of a Megatron-Core distributed checkpoint (`torch_dist`, version 1), without Megatron and without a process
group.

Each tensor is an archive of torch.save in a `.distcp` file, and `.metadata` says which rectangle of which key it is.
An archive is a few bytes before the tensor's own and a few after; those are taken from torch.save itself.
Invariant (tests/dist): Megatron-Core's dist_checkpointing.load reads it on any mesh.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_rl.convert.forms import Chunk

BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""metadata.json"""


class _Frame(io.RawIOBase):
    """Keeps what torch.save writes before and after a tensor's bytes, which are recognised by their address."""

    def __init__(self, address: int):
        self.parts = [bytearray()]
        self._address = address

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if len(view) and np.frombuffer(view, np.uint8).ctypes.data == self._address:
            self.parts.append(bytearray())
        else:
            self.parts[-1] += view
        return len(view)


@lru_cache(maxsize=None)
def archive_frame(dtype: torch.dtype, extents: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What torch.save writes before and after the bytes of a tensor. The archive's own crc32 is left out, as torch
    allows and does not read: the manifest has one."""
    tensor = torch.empty(extents, dtype=dtype)  # its pages are never touched
    frame = _Frame(tensor.data_ptr())
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, frame)
    finally:
        torch.serialization.set_crc32_options(before)
    assert len(frame.parts) == 2, "torch.save wrote the tensor in more than one piece"
    return bytes(frame.parts[0]), bytes(frame.parts[1])


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def stored_extents(chunk: Chunk) -> tuple[int, ...]:
    return (1,) * len(chunk.index) + chunk.tensor.extents


def empty_states(chunks: Iterable[Chunk]) -> list[str]:
    """Keys of the state that Megatron's and Transformer Engine's linear layers have beside their weights; it is
    empty but for fp8, and loading asks for it."""
    keys = {}
    for chunk in chunks:
        module = chunk.key.rpartition(".")[0]
        if module.rpartition(".")[2].startswith("linear_"):
            index, axes = chunk.index or (0,), chunk.axes or (1,)
            keys[f"{module}._extra_state/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, axes))}"] = None
    return list(keys)


EMPTY_STATE = saved([None])


def metadata(places: dict[int, tuple[str, int, int]], chunks: list[tuple[Chunk, torch.dtype]], states: dict) -> bytes:
    """`.metadata`.

    Args:
        places: of chunk i: file, first byte and number of bytes of its archive.
        states: the same of each empty state, by key.
    """
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for i, (chunk, dtype) in enumerate(chunks):
        offset = torch.Size((*chunk.index, *(0 for _ in chunk.tensor.extents)))
        if chunk.key not in tensors:
            size = torch.Size((*chunk.axes, *chunk.tensor.extents))
            tensors[chunk.key] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, [])
        tensors[chunk.key].chunks.append(ChunkStorageMetadata(offset, torch.Size(stored_extents(chunk))))
        storage[MetadataIndex(chunk.key, offset)] = _StorageInfo(*places[i])
    for key, place in states.items():
        tensors[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = _StorageInfo(*place)
    return pickle.dumps(Metadata(tensors, planner_data={}, storage_data=storage, version=CURRENT_DCP_VERSION))


def small_files(are_layers_alike: bool) -> dict[str, bytes]:
    """metadata.json and common.pt. The content says how `sharded_state_dict` must be called to get the same keys."""
    content = {"non_homogeneous_layers": not are_layers_alike, "singleton_local_shards": False}
    return {
        "metadata.json": json.dumps(BACKEND).encode(),
        "common.pt": saved({"content_metadata": content}),
    }
