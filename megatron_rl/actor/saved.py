"""Exports a checkpoint of the trainer as a Hugging Face folder, in one process and without Megatron-Core.

Invariant (tests/e2e): the folder is, byte for byte, what the ranks themselves export from the same state.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from megatron_rl.actor.checkpoint import WEIGHTS, read_manifest, read_part
from megatron_rl.actor.weights import HubTensor, find_holders, hub_files, write_companions, write_tensors
from megatron_rl.convert.hub import file_name
from megatron_rl.layout import slices
from megatron_rl.types import Mesh, ModelShape


def export_saved(checkpoint: Path, target: Path, source: Path) -> int:
    """Write a folder that transformers and vLLM load. The folder is complete or absent.

    Only the weights are read, not the optimizer's state, and one file of the result (4 GiB) is in memory at a time.

    Args:
        checkpoint: a folder `step_...` of a run.
        source: a Hugging Face folder of the same model, which gives configuration and tokenizer.

    Returns:
        The bytes of all tensors.

    Raises:
        ValueError: the checkpoint is damaged, or the target exists.
    """
    manifest = read_manifest(checkpoint)
    shape = TypeAdapter(ModelShape).validate_python(manifest["shape"])
    mesh = TypeAdapter(Mesh).validate_python(manifest["mesh"])
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[manifest["dtype"]]
    if target.exists():
        raise ValueError(f"{target} exists; remove it or choose another name")
    holders = find_holders(shape, mesh, fused_norms=manifest["layers"] == "Transformer Engine")
    files, ranks = hub_files(shape, dtype), {rank for parts in holders.values() for rank, _ in parts}
    weights = {rank: read_part(checkpoint, manifest, WEIGHTS.format(rank), mapped=True) for rank in sorted(ranks)}
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for i, tensors in enumerate(files):
            joined = {name: _join(name, tensor, holders, weights) for name, tensor in tensors.items()}
            write_tensors(partial / file_name("model", i, len(files)), joined)
        write_companions(partial, source, files, dtype)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sum(path.stat().st_size for path in target.glob("*.safetensors"))


def _join(name: str, tensor: HubTensor, holders: Any, weights: Any) -> Tensor:
    whole = torch.empty(tensor.extents, dtype=tensor.dtype)
    for rank, shard in holders[name]:
        whole[slices(shard.hf_box)] = weights[rank][shard.local_name][slices(shard.local_box)]
    return whole
