"""The files of a Megatron-Core distributed checkpoint (`torch_dist`, version 1), without Megatron and without a process
group.

Each tensor is a torch.save archive inside a `.distcp` file, and `.metadata` says which key and rectangle it is. An
archive has a few bytes before the tensor's own bytes and a few after them; torch.save itself makes these.
Invariant (tests/ranks): Megatron-Core's dist_checkpointing.load reads the files on any mesh.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterable
from functools import cache
from typing import IO, Any, NamedTuple, cast

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
from megatron_rl.models import Box
from megatron_rl.models.shards import extents

BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""The content of metadata.json."""


class _Frame(io.RawIOBase):
    """A stream that keeps what torch.save writes before and after a tensor's bytes. It recognises the tensor's bytes by
    their memory address."""

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


@cache
def archive_frame(dtype: torch.dtype, extents: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What torch.save writes before and after the bytes of a tensor. The archive's own crc32 is switched off, because
    the manifest has checksums; torch does not read it."""
    tensor = torch.empty(extents, dtype=dtype)  # its pages are never touched
    frame = _Frame(tensor.data_ptr())
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, cast(IO[bytes], frame))  # it asks a stream for `write` alone
    finally:
        torch.serialization.set_crc32_options(before)
    assert len(frame.parts) == 2, "torch.save wrote the tensor in more than one piece"
    return bytes(frame.parts[0]), bytes(frame.parts[1])


def archive(value: Any) -> bytes:
    """The bytes that torch.save writes for a value."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class Entry(NamedTuple):
    """A rectangle of a key's tensor, and where its archive is."""

    key: str
    size: tuple[int, ...]
    """The extents of the key's whole tensor."""
    box: Box
    dtype: torch.dtype
    place: tuple[str, int, int]
    """(file, offset of the first byte, number of bytes) of the archive."""


def place_of(chunk: Chunk, box: Box | None = None) -> tuple[tuple[int, ...], Box]:
    """The extents of the tensor of a chunk's key, and a rectangle in it.

    Args:
        box: the rectangle in the chunk's tensor; None means the whole chunk.
    """
    own = tuple((0, length) for length in chunk.tensor.extents) if box is None else box
    return (*chunk.axes, *chunk.tensor.extents), (*((i, i + 1) for i in chunk.index), *own)


def empty_states(chunks: Iterable[Chunk]) -> list[str]:
    """The keys of the extra state that Megatron's and Transformer Engine's linear layers have in addition to weights.
    It is empty without fp8, but loading asks for it."""
    keys: dict[str, None] = {}
    for chunk in chunks:
        module = chunk.key.rpartition(".")[0]
        if module.rpartition(".")[2].startswith("linear_"):
            index, axes = chunk.index or (0,), chunk.axes or (1,)
            keys[f"{module}._extra_state/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, axes))}"] = None
    return list(keys)


EMPTY_STATE = archive([None])


def metadata(entries: Iterable[Entry], states: dict[str, tuple[str, int, int]]) -> bytes:
    """The content of the file `.metadata`.

    Args:
        states: the place of each empty state, by key.
    """
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for key, size, box, dtype, place in entries:
        offset = torch.Size(start for start, _ in box)
        if key not in tensors:
            tensors[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), [])
        tensors[key].chunks.append(ChunkStorageMetadata(offset, torch.Size(extents(box))))
        storage[MetadataIndex(key, offset)] = _StorageInfo(*place)
    for key, place in states.items():
        tensors[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = _StorageInfo(*place)
    return pickle.dumps(Metadata(tensors, planner_data={}, storage_data=storage, version=CURRENT_DCP_VERSION))


def small_files(are_layers_alike: bool) -> dict[str, bytes]:
    """The contents of metadata.json and common.pt, by file name. common.pt says how `sharded_state_dict` must be called
    to get the same keys."""
    content = {"non_homogeneous_layers": not are_layers_alike, "singleton_local_shards": False}
    return {
        "metadata.json": json.dumps(BACKEND).encode(),
        "common.pt": archive({"content_metadata": content}),
    }
