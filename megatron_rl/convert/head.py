"""The multi-token head of a model that no run has trained: the layers that predict tokens after the next one
(`models.multi_token`).

It is left out, or carried as it is from a folder into a checkpoint and from there into a folder, so that an engine can
still draft tokens with it, or a run begin with it (`Source.take_head`). A Hugging Face folder has its tensors among the
others; a checkpoint has them in a file of their own, next to config.json. The tensors of a head that was trained are
tensors of the model.

Invariant (tests/unit/convert, tests/ranks): what is kept has the bits of the folder that it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_rl.convert import forms
from megatron_rl.convert.hub import MAX_FILE_BYTES
from megatron_rl.convert.target import StoredPart, TargetTensor
from megatron_rl.convert.tensor_files import Stored, read_safetensors
from megatron_rl.models.family import Family
from megatron_rl.models.hub import find_head
from megatron_rl.types import ModelShape


def open_head(folder: Path, shape: ModelShape) -> dict[str, Stored]:
    """The stored tensors that `models.hub.find_head` finds, by name.

    Raises:
        ValueError: a file is damaged.
    """
    found = find_head(folder, shape)
    files = {path: read_safetensors(path) for path in set(found.values())}
    return {name: files[path][name] for name, path in found.items()}


def head_tensors(head: Mapping[str, Stored], family: Family, dtype: torch.dtype | None) -> list[TargetTensor]:
    """The tensors of a head as they are written.

    Args:
        dtype: None keeps each tensor's. A router's bias keeps it anyway.
    """
    tensors = []
    for name, stored in head.items():
        box = tuple((0, length) for length in stored.extents)
        own = dtype is None or family.is_router_bias(name)
        wanted = stored.value_dtype if own or dtype is None else dtype
        tensors.append(TargetTensor(name, wanted, stored.extents, (StoredPart(stored, box, box),)))
    return tensors


def head_groups(head: Mapping[str, Stored], family: Family, dtype: torch.dtype | None) -> list[list[TargetTensor]]:
    """The tensors of each file of a Hugging Face folder that has the head in files of its own."""
    sized = ((tensor, tensor.num_bytes) for tensor in head_tensors(head, family, dtype))
    return forms.split_into_files(sized, MAX_FILE_BYTES) if head else []
