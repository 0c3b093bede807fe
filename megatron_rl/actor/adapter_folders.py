"""Reads adapters from folders in PEFT's form, and writes them, in loops over the shards of `layout`.

Invariant (tests/ranks): on every mesh what is written is what was read, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_rl.actor.folders import atomic_folder, write_text
from megatron_rl.actor.weights import HubTensor, find_holders, gather, write_tensors
from megatron_rl.convert.adapters import finite
from megatron_rl.convert.tensor_files import Maps, read_safetensors
from megatron_rl.models import slices
from megatron_rl.models.adapters import is_adapter
from megatron_rl.models.peft import (
    CONFIG,
    TENSORS,
    base_digest,
    config_of,
    in_file,
    metadata_for,
    require_fitting,
    tensors_of,
)

if TYPE_CHECKING:
    from megatron_rl.actor.trainer import MegatronTrainer


@torch.no_grad()
def load_adapters(actor: MegatronTrainer, folder: Path) -> None:
    """Fill the adapters from a folder in PEFT's form. Collective: every rank must call it.

    Raises:
        ValueError: the folder is damaged, or has adapters of another rank, scale, base model or other layers; all ranks
            raise it.
    """
    shape, parameters = actor.spec.shape, actor.parameters()
    with actor.agreement.on_errors():
        require_fitting(folder, shape, actor.spec.model.path)
        stored, maps = read_safetensors(folder / TENSORS), Maps({})
        named = {name: stored[theirs] for theirs, name in in_file(shape, {n: n for n in tensors_of(shape)}).items()}
        for shard in actor.shards:
            if is_adapter(shard.local_name):
                held = named[shard.hf_name]
                parameters[shard.local_name][slices(shard.local_box)] = finite(maps.values(held)(shard.hf_box), held)
    actor.weights_changed()


@torch.no_grad()
def export_adapters(actor: MegatronTrainer, folder: Path) -> None:
    """Write a folder that PEFT, transformers and vLLM load together with the base model. All ranks must call this. The
    folder is complete or absent."""
    shape = actor.spec.shape
    dtype = getattr(torch, actor.spec.model.dtype)
    tensors = {name: HubTensor(extents, dtype) for name, extents in tensors_of(shape).items()}
    holders = find_holders(shape, actor.mesh, actor.fused_norms)
    with atomic_folder(Path(folder), actor.agreement) as temporary:
        gathered = gather(actor, actor.parameters(), tensors, holders)
        with actor.agreement.on_errors():
            if actor.rank == 0:
                model = actor.spec.model
                digest = base_digest(model.weights or model.path)
                write_tensors(temporary / TENSORS, in_file(shape, gathered), metadata_for(shape, digest))
                write_text(temporary / CONFIG, config_of(shape, str(actor.spec.model.path)))
