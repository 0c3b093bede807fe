"""Loads checkpoints into the live parameters and exports them as Hugging Face folders, in loops over the shards of
`layout`.

When loading, each rank reads only its own rectangles. The export gathers the tensors of one file at a time on rank 0.
Invariants (tests/ranks): export after load gives the same bits on every mesh; logits equal transformers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.actor import fp8_weights, platform, state
from megatron_rl.actor.folders import atomic_folder, write_safetensors, write_text
from megatron_rl.actor.optimizer.fill import Target, fill
from megatron_rl.actor.tower_weights import tower_files
from megatron_rl.convert.adapters import write_merged
from megatron_rl.convert.forms import split_into_files
from megatron_rl.convert.head import head_groups, open_head
from megatron_rl.convert.hub import MAX_FILE_BYTES, companions, file_name, index_text
from megatron_rl.convert.manifest import WEIGHTS
from megatron_rl.convert.source import open_checkpoint
from megatron_rl.convert.target import TargetTensor
from megatron_rl.convert.tensor_files import Maps, rectangle
from megatron_rl.convert.work import sync
from megatron_rl.models import FAMILIES, Box, Family, Shard, critic_shape, megatron_shards, scan, slices, volume
from megatron_rl.models.adapters import A, B, is_adapter, trains
from megatron_rl.models.hub import INDEX
from megatron_rl.models.view import View
from megatron_rl.types import Mesh, ModelShape

if TYPE_CHECKING:
    from megatron_rl.actor.trainer import MegatronTrainer


@torch.no_grad()
def load_weights(actor: MegatronTrainer, folder: Path) -> None:
    """Fill the parameters from a checkpoint of any form that the converter knows: a Hugging Face folder, a distributed
    checkpoint of Megatron-Core (also a run's), or files of ranks. A model for text has no value head; a critic then
    begins with zeros there, so all its values are 0. Collective: every rank must call it.

    Raises:
        ValueError: a rank finds a file missing, damaged or of another model; all ranks raise it.
    """
    shape = actor.spec.shape.base
    family = FAMILIES[shape.family]
    ends_alike = critic_shape if shape.value_head else lambda shape: shape
    shards: dict[str, list[Shard]] = {}
    for shard in actor.shards:
        shards.setdefault(shard.local_name, []).append(shard)
    with actor.agreement.on_errors():
        source = open_checkpoint(Path(folder), tower=bool(shape.tower))
        if source.shape.tower.keys() != shape.tower.keys():
            raise ValueError(
                f"{folder} {'has' if source.shape.tower else 'lacks'} a vision tower that is trained, and "
                f"policy.vision_tower says otherwise; change it, or take a Hugging Face folder of the whole model"
            )
        if shape.multi_token:
            source.take_head()
        found = replace(ends_alike(source.shape), multi_token=shape.multi_token)
        if (found.family, FAMILIES[found.family].hf_tensors(found)) != (shape.family, family.hf_tensors(shape)):
            raise ValueError(
                f"{folder} holds a {source.shape.family} of other sizes than {actor.spec.model.path}; take the weights "
                f"and the configuration of one model"
            )
        maps = Maps(source.checksums)
        for name, parameter in actor.parameters().items():
            if is_adapter(name):
                continue
            if shards[name][0].hf_name not in source.regions:  # the value head of a critic that begins
                parameter.zero_()
                continue
            if isinstance(parameter, fp8_weights.Fp8Weight):
                fp8_weights.load(parameter, shards[name], source, maps)
                continue
            target = Target(WEIGHTS, name, tuple(parameter.shape), 0, parameter.view(-1))
            fill(target, shards[name], source, maps)
            if not torch.isfinite(parameter).all():
                stored = " and ".join(sorted({shard.hf_name for shard in shards[name]}))
                limit = ""
                if parameter.dtype == torch.float16:
                    limit = " in float16, which holds at most 65,504; set model.dtype to bfloat16 or float32, or"
                raise ValueError(
                    f"{folder}: {stored} has numbers that are not finite{limit or ';'} take another copy of the model"
                )
    actor.weights_changed()


@torch.no_grad()
def export_hf(actor: MegatronTrainer, folder: Path) -> None:
    """Write a folder that transformers and vLLM load. It has the weights in the trainer's dtype (a router's bias in
    float32), with the adapters' products added to them, the configuration, tokenizer and chat template of model.path,
    and what `policy.multi_token` says of its multi-token head: nothing, the head as it was, or as it is now. The folder
    of a model that sees images has the tensors of model.path, with their names and extents. All ranks must call this
    together. The folder is complete or absent."""
    source, shape = Path(actor.spec.model.path), actor.spec.shape.base
    dtype = getattr(torch, actor.spec.model.dtype)
    family, named = FAMILIES[shape.family], {}
    with actor.agreement.on_errors():
        if shape.vision is not None:
            index = scan(source, shape)
            family, named = index.family, index.whole_names
    files = hub_files(shape, dtype, family)
    head: list[list[TargetTensor]] = []
    keeps = None
    with actor.agreement.on_errors():
        if actor.rank == 0 and (stored := open_head(source, shape)):
            keeps = actor.spec.multi_token != "drop"
            head = head_groups(stored, FAMILIES[shape.family], dtype) if actor.spec.multi_token == "keep" else []
    tower = tower_files(source) if shape.vision and not shape.tower else []
    num_files = len(files) + len(head) + len(tower)
    with atomic_folder(Path(folder), actor.agreement) as temporary:
        holders = find_holders(actor.spec.shape, actor.mesh, actor.fused_norms)
        for i, tensors in enumerate(files):
            gathered = gather(actor, actor.parameters(), tensors, holders)
            _merge_adapters(actor, gathered, tensors, holders)
            with actor.agreement.on_errors():
                if actor.rank == 0:
                    whole = {named.get(name, name): tensor for name, tensor in gathered.items()}
                    write_tensors(temporary / file_name("model", i, num_files), whole)
        with actor.agreement.on_errors():
            if actor.rank == 0:
                for i, kept in enumerate(head, len(files)):
                    write_safetensors(temporary / file_name("model", i, num_files), kept)
                for i, of_tower in enumerate(tower, len(files) + len(head)):
                    write_tensors(temporary / file_name("model", i, num_files), of_tower.read())
                name = str(dtype).removeprefix("torch.")
                write_companions(temporary, companions(source, name, shape.value_head, keeps, shape.vision is not None))
                if num_files > 1:
                    sized = [{named.get(n, n): tensor.num_bytes for n, tensor in of.items()} for of in files]
                    sized += [{tensor.name: tensor.num_bytes for tensor in kept} for kept in head]
                    sized += [of_tower.sizes for of_tower in tower]
                    total = sum(size for names in sized for size in names.values())
                    write_text(temporary / INDEX, index_text(sized, total))


def _merge_adapters(
    actor: MegatronTrainer,
    gathered: Mapping[str, Tensor],
    tensors: dict[str, HubTensor],
    holders: dict[str, list[tuple[int, Shard]]],
) -> None:
    """Add scale B A to the weights that `gather` has returned. Collective."""
    if (adapters := actor.spec.shape.adapters) is None:
        return
    extents = FAMILIES[actor.spec.shape.family].hf_tensors(actor.spec.shape)
    for name, tensor in tensors.items():
        for part in tensor.views or (name,):
            pair = [f"{part.removesuffix('weight')}{kind}.weight" for kind in (A, B)]
            if pair[0] not in holders:
                continue
            of_layer = {one: HubTensor(extents[one], tensor.dtype) for one in pair}
            if found := gather(actor, actor.parameters(), of_layer, holders):
                view, whole = tensor.views.get(part), gathered[name]
                box = tuple((0, length) for length in extents[part])
                here = rectangle(whole, view, box) if view else whole
                a, b = (found[one] for one in pair)
                write_merged(here, here, a, b, adapters.scale)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
    sync(path)


def write_companions(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
        sync(folder / name)


@dataclass(frozen=True, slots=True)
class HubTensor:
    extents: tuple[int, ...]
    dtype: torch.dtype
    views: Mapping[str, View] = field(default_factory=dict)
    """The HF tensors that it holds, by name; empty: it is the one of its own name."""

    @property
    def num_bytes(self) -> int:
        return prod(self.extents) * self.dtype.itemsize


def hub_files(shape: ModelShape, dtype: torch.dtype, family: Family) -> list[dict[str, HubTensor]]:
    """The tensors of each file by name, in order.

    Args:
        dtype: the model's.
        family: the table of the files: the family's, or the same with stacked experts.
    """
    tensors = {}
    for name, held in family.file_tensors(shape).items():
        is_float32 = family.is_float32(next(iter(held.views), name))
        tensors[name] = HubTensor(held.extents, torch.float32 if is_float32 else dtype, held.views)
    sized = ((named, named[1].num_bytes) for named in tensors.items())
    return [dict(file) for file in split_into_files(sized, MAX_FILE_BYTES)]


def find_holders(shape: ModelShape, mesh: Mesh, fused_norms: bool) -> dict[str, list[tuple[int, Shard]]]:
    """The shards that make up each HF tensor, as (rank, shard). Each rectangle comes from the first rank that holds
    it."""
    seen: set[tuple[str, Box]] = set()
    holders: dict[str, list[tuple[int, Shard]]] = {}
    for rank in range(mesh.world_size):
        for shard in megatron_shards(shape, mesh, rank, fused_norms):
            if volume(shard.hf_box) and (shard.hf_name, shard.hf_box) not in seen:
                seen.add((shard.hf_name, shard.hf_box))
                holders.setdefault(shard.hf_name, []).append((rank, shard))
    return holders


@torch.no_grad()
def gather_gradient(actor: MegatronTrainer) -> dict[str, Tensor]:
    """The whole gradient of the last update, float32, by HF names, on rank 0; an empty dictionary on the others. All
    ranks must call this together. The bias of a router has no gradient.

    The gradient is what the update used if `optimizer.clip_grad` is 0; clipping scales it in place.
    """
    family = FAMILIES[actor.spec.shape.family]
    tensors = {
        name: HubTensor(extents, torch.float32)
        for name, extents in family.hf_tensors(actor.spec.shape).items()
        if trains(actor.spec.shape, name) and not family.is_router_bias(name)
    }
    holders = find_holders(actor.spec.shape, actor.mesh, actor.fused_norms)
    return gather(actor, state.local_gradients(actor.chunks), tensors, holders)


def gather(
    actor: MegatronTrainer,
    local: Mapping[str, Tensor],
    tensors: dict[str, HubTensor],
    holders: dict[str, list[tuple[int, Shard]]],
) -> dict[str, Tensor]:
    """The whole tensors in CPU memory on rank 0; an empty dictionary on the others.

    Args:
        local: this rank's tensors, by the local names of the shards.
    """
    gathered = {}
    for name, tensor in tensors.items():
        whole = torch.empty(tensor.extents, dtype=tensor.dtype) if actor.rank == 0 else None
        for rank, shard in (held for part in tensor.views or (name,) for held in holders[part]):
            if rank == actor.rank:
                part = fp8_weights.dense(local[shard.local_name][slices(shard.local_box)]).contiguous()
                if rank:
                    dist.send(part, dst=0)
            elif actor.rank == 0:
                part = torch.empty(_extents(shard), dtype=tensor.dtype, device=platform.device())
                dist.recv(part, src=rank)
            if whole is not None:
                view = tensor.views.get(shard.hf_name)
                here = rectangle(whole, view, shard.hf_box) if view else whole[slices(shard.hf_box)]
                here.copy_(part)
        if whole is not None:
            gathered[name] = whole
    return gathered


def _extents(shard: Shard) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in shard.hf_box)
