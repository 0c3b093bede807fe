"""Makes a folder in PEFT's form of a checkpoint of adapters."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_rl.convert.source import Source
from megatron_rl.convert.stored import Maps
from megatron_rl.layout import slices
from megatron_rl.layout.peft import BASE, CONFIG, PREFIX, TENSORS, config_of, tensors_of


def write_adapters(source: Source, dtype: torch.dtype, folder: Path, base: str) -> int:
    """Write the adapters of a run's checkpoint as a new folder. Returns the bytes of the tensors.

    Args:
        base: the path of the base model, for PEFT; empty if it is not known.

    Raises:
        ValueError: a tensor has other bytes than the manifest says.
    """
    maps, tensors = Maps(source.checksums), {}
    for name, extents in tensors_of(source.shape).items():
        tensors[name] = whole = torch.empty(extents, dtype=dtype)
        for region in source.regions[name]:
            whole[slices(region.hf_box)] = maps.values(region.stored)(region.box)
    unfinished = folder.with_name(f"{folder.name}.partial")
    unfinished.mkdir(parents=True, exist_ok=True)
    assert source.manifest is not None, "a checkpoint of a run has one"
    metadata = {"format": "pt", BASE: source.manifest["training"]["base"]}
    save_file({PREFIX + name: t for name, t in tensors.items()}, unfinished / TENSORS, metadata=metadata)
    (unfinished / CONFIG).write_text(config_of(source.shape, base), encoding="utf-8")
    unfinished.rename(folder)
    return sum(tensor.nbytes for tensor in tensors.values())
