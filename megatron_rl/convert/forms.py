"""The three forms of a checkpoint. A form is a list of tensors, each with the rectangles of Hugging Face (HF) tensors
that it holds.

    hub    a Hugging Face folder: the HF tensors, or where the family's table says so, tensors that hold several
    open   Megatron-Core's distributed checkpoint, which loads on any mesh; it holds the parameters of a one-rank mesh
    ranks  the parameters of each rank of a given mesh, without repeating data-parallel replicas

Every form is made from the family's table, so a conversion between any two forms is an intersection of rectangles.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import TypeVar

from megatron_rl.models import FAMILIES, Family, Shard, megatron_shards, padded_vocabulary, volume
from megatron_rl.models.shards import is_vocabulary, local_extents
from megatron_rl.models.view import View
from megatron_rl.types import Mesh, ModelShape

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*mlp\.experts\.)(linear_fc\d\.(?:weight|bias|lora_[AB]))(\d+)")


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor of a form, with the rectangles of HF tensors that it holds."""

    name: str
    extents: tuple[int, ...]
    shards: tuple[Shard, ...]
    """The rectangles; the `local_name` of each is this tensor's name."""
    views: Mapping[str, View] = field(default_factory=dict)
    """If a file holds the tensors in another form, where in this tensor each HF tensor lies, by name. The `local_box`
    of its shard is then a rectangle of the view."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A tensor of a distributed checkpoint. It is one rectangle of the larger tensor that is stored under its key."""

    tensor: Described
    key: str
    index: tuple[int, ...]
    """The chunk's position on the leading dims that stacking adds: the layer, if all layers are alike, and the
    expert."""
    axes: tuple[int, ...]
    """The lengths of those leading dims."""


def hf_tensors(shape: ModelShape) -> list[Described]:
    """The HF tensors as the family's table has them."""
    return [
        Described(name, extents, (_whole(name, extents, name),))
        for name, extents in FAMILIES[shape.family].hf_tensors(shape).items()
    ]


def hub_tensors(shape: ModelShape, table: Family | None = None) -> list[Described]:
    """The HF tensors as files hold them.

    Args:
        table: of the files; None means the family's own, which this package writes.
    """
    family = table or FAMILIES[shape.family]
    extents, tensors = family.hf_tensors(shape), []
    for name, held in family.file_tensors(shape).items():
        shards = tuple(_whole(part, extents[part], name) for part in held.views or (name,))
        tensors.append(Described(name, held.extents, shards, held.views))
    return tensors


def _whole(hf_name: str, extents: tuple[int, ...], name: str) -> Shard:
    box = tuple((0, length) for length in extents)
    return Shard(hf_name, box, name, box)


def are_layers_alike(shape: ModelShape) -> bool:
    """Megatron-Core stacks layers that are all alike under one key; otherwise each layer has its own keys."""
    kinds = {tuple(FAMILIES[shape.family].layer_rules(layer)) for layer in shape.layers}
    return len(kinds) == 1


def open_chunks(shape: ModelShape) -> list[Chunk]:
    """The tensors of the open form, under the keys of `GPTModel.sharded_state_dict` with Transformer Engine's
    layers."""
    stacked = are_layers_alike(shape)
    chunks = []
    index: tuple[int, ...]
    axes: tuple[int, ...]
    for tensor in _parameters(megatron_shards(shape, Mesh(), 0, fused_norms=True)):
        key, index, axes = tensor.name, (), ()
        if (layer := _LAYER.fullmatch(key)) and stacked:
            key, index, axes = f"decoder.layers.{layer[2]}", (int(layer[1]),), (shape.num_layers,)
        if expert := _EXPERT.fullmatch(key):
            key = f"{expert[1]}experts.{expert[2]}"
            index, axes = (*index, int(expert[3])), (*axes, shape.num_experts)
        chunks.append(Chunk(tensor, key, index, axes))
    return chunks


def rank_tensors(shape: ModelShape, mesh: Mesh, fused_norms: bool) -> dict[str, list[Described]]:
    """The tensors of each file of the ranks form, by file name. Each pipeline stage has one file for each
    tensor-parallel rank, which holds everything but the experts, and one for each expert rank, which holds the experts
    alone."""
    files = {}
    for stage in range(mesh.pipeline):
        first = stage * mesh.stage_size
        for tensor in range(mesh.tensor):
            shards = megatron_shards(shape, mesh, first + tensor, fused_norms)
            rows = padded_vocabulary(shape, mesh.tensor) // mesh.tensor
            dense = [shard for shard in shards if not is_expert(shard.local_name)]
            files[f"tensor{tensor}_pipeline{stage}"] = list(_parameters(dense, rows))
        for rank in range(mesh.expert * mesh.expert_ways if shape.mixture else 0):
            shards = megatron_shards(shape, mesh, first + rank, fused_norms)
            routed = [shard for shard in shards if is_expert(shard.local_name)]
            name = f"expert{rank // mesh.expert_ways}_tensor{rank % mesh.expert_ways}_pipeline{stage}"
            files[name] = list(_parameters(routed))
    return files


def smallest_mesh(
    tensor: int,
    expert: int,
    expert_tensor: int | None,
    *,
    pipeline: int = 1,
    virtual: int = 1,
    layers: tuple[int, ...] | None = None,
) -> Mesh:
    """The mesh with the fewest data-parallel ranks that fit the expert ranks. What a rank holds does not depend on the
    number of data-parallel ranks."""
    wanted = expert * (expert_tensor or tensor)
    return Mesh(
        tensor=tensor,
        pipeline=pipeline,
        data=wanted // gcd(wanted, tensor),
        expert=expert,
        expert_tensor=expert_tensor,
        virtual=virtual,
        layers=layers,
    )


def is_expert(local_name: str) -> bool:
    return ".mlp.experts." in local_name


def _parameters(shards: Iterable[Shard], vocabulary_rows: int | None = None) -> Iterator[Described]:
    """The tensors that the shards are parts of.

    Args:
        vocabulary_rows: the rows of a rank's embedding, padding included; None keeps HF's number of rows.
    """
    shards = list(shards)
    by_name: dict[str, list[Shard]] = {}
    for shard in shards:
        by_name.setdefault(shard.local_name, []).append(shard)
    for name, extents in local_extents(shards).items():
        if vocabulary_rows is not None and is_vocabulary(name):
            extents = (vocabulary_rows, *extents[1:])
        yield Described(name, extents, tuple(shard for shard in by_name[name] if volume(shard.hf_box)))


T = TypeVar("T")


def split_into_files(tensors: Iterable[tuple[T, int]], max_file_bytes: int) -> list[list[T]]:
    """Split the list of (tensor, bytes), in order, into files of at most `max_file_bytes`. A tensor that is larger gets
    a file of its own."""
    files: list[list[T]] = [[]]
    size = 0
    for tensor, num_bytes in tensors:
        if files[-1] and size + num_bytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += num_bytes
    return files
