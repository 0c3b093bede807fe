"""The three forms of a checkpoint, as lists of tensors that say which rectangles of Hugging Face tensors they hold.

    hub    a Hugging Face folder: each HF tensor alone
    open   Megatron-Core's distributed checkpoint, which loads on any mesh: the parameters of a mesh of one
    ranks  the parameters of each rank of a given mesh, data-parallel replicas not repeated

Every form is made from the family's table, so conversion between any two is an intersection of rectangles.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import TypeVar

from megatron_rl.layout import FAMILIES, Shard, megatron_shards, padded_vocabulary, volume
from megatron_rl.layout.shards import is_vocabulary, local_extents
from megatron_rl.types import Mesh, ModelShape

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*mlp\.experts\.)(linear_fc\d\.weight)(\d+)")


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor of a form: each of its shards names it as `local_name`."""

    name: str
    extents: tuple[int, ...]
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A tensor of a distributed checkpoint: a rectangle of what is stored under one key."""

    tensor: Described
    key: str
    index: tuple[int, ...]
    """Its place on the axes in front: layer, where all layers are alike, and expert."""
    axes: tuple[int, ...]
    """The lengths of those axes."""


def hub_tensors(shape: ModelShape) -> list[Described]:
    tensors = []
    for name, extents in FAMILIES[shape.family].hf_tensors(shape).items():
        box = tuple((0, length) for length in extents)
        tensors.append(Described(name, extents, (Shard(name, box, name, box),)))
    return tensors


def are_layers_alike(shape: ModelShape) -> bool:
    """Megatron-Core then stacks them under one key; otherwise each layer has keys of its own."""
    return len({shape.has_experts(layer) for layer in range(shape.num_layers)}) == 1


def open_chunks(shape: ModelShape) -> list[Chunk]:
    """The keys are those of `GPTModel.sharded_state_dict` with Transformer Engine's layers."""
    stacked = are_layers_alike(shape)
    chunks = []
    for tensor in _parameters(megatron_shards(shape, Mesh(), 0, fused_norms=True)):
        key, index, axes = tensor.name, (), ()
        if (layer := _LAYER.fullmatch(key)) and stacked:
            key, index, axes = f"decoder.layers.{layer[2]}", (int(layer[1]),), (shape.num_layers,)
        if expert := _EXPERT.fullmatch(key):
            key = f"{expert[1]}experts.{expert[2]}"
            index, axes = (*index, int(expert[3])), (*axes, shape.experts.num_experts)
        chunks.append(Chunk(tensor, key, index, axes))
    return chunks


def rank_tensors(shape: ModelShape, mesh: Mesh, fused_norms: bool) -> dict[str, list[Described]]:
    """The files of a mesh: for each stage those of its tensor-parallel ranks, without the experts, and those of its
    expert ranks, with nothing else."""
    files = {}
    for stage in range(mesh.pipeline):
        first = stage * mesh.stage_size
        for tensor in range(mesh.tensor):
            shards = megatron_shards(shape, mesh, first + tensor, fused_norms)
            rows = padded_vocabulary(shape, mesh.tensor) // mesh.tensor
            dense = [shard for shard in shards if not _is_expert(shard.local_name)]
            files[f"tensor{tensor}_pipeline{stage}"] = list(_parameters(dense, rows))
        if shape.experts is None:
            continue
        for rank in range(mesh.expert * mesh.expert_ways):
            shards = megatron_shards(shape, mesh, first + rank, fused_norms)
            routed = [shard for shard in shards if _is_expert(shard.local_name)]
            name = f"expert{rank // mesh.expert_ways}_tensor{rank % mesh.expert_ways}_pipeline{stage}"
            files[name] = list(_parameters(routed))
    return files


def smallest_mesh(tensor: int, expert: int, expert_tensor: int | None, **sizes) -> Mesh:
    """With as many data-parallel ranks as the experts ask for; what a rank holds does not depend on them."""
    wanted = expert * (expert_tensor or tensor)
    return Mesh(tensor=tensor, expert=expert, expert_tensor=expert_tensor, data=wanted // gcd(wanted, tensor), **sizes)


def _is_expert(local_name: str) -> bool:
    return ".mlp.experts." in local_name


def _parameters(shards: Iterable[Shard], vocabulary_rows: int | None = None) -> Iterator[Described]:
    """`vocabulary_rows`: of a rank's embedding, padding counted; None keeps HF's rows."""
    shards = list(shards)
    by_name: dict[str, list[Shard]] = {}
    for shard in shards:
        by_name.setdefault(shard.local_name, []).append(shard)
    for name, extents in local_extents(shards).items():
        if vocabulary_rows is not None and is_vocabulary(name):
            extents = (vocabulary_rows, *extents[1:])
        yield Described(name, extents, tuple(shard for shard in by_name[name] if volume(shard.hf_box)))


T = TypeVar("T")


def split(tensors: Iterable[tuple[T, int]], max_file_bytes: int) -> list[list[T]]:
    """(tensor, bytes), in order, in files of at most so many bytes; a larger tensor has a file of its own."""
    files: list[list[T]] = [[]]
    size = 0
    for tensor, num_bytes in tensors:
        if files[-1] and size + num_bytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += num_bytes
    return files
