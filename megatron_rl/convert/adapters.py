"""What a run's adapters become: merged weights, and a folder in PEFT's form that is made of a checkpoint. Adapters that
come from a folder are checked here.

Invariant (tests/unit/convert): every rectangle of a merged weight has the bits that it has in the whole one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from megatron_rl.convert.source import Source
from megatron_rl.convert.target import naming
from megatron_rl.convert.tensor_files import Maps, Stored
from megatron_rl.models import slices
from megatron_rl.models.peft import CONFIG, TENSORS, config_of, in_file, metadata_for, tensors_of

MERGED_ELEMENTS = {"cpu": 2**16, "cuda": 2**22}
"""The numbers of a weight that are merged at once, by the type of the device: two float32 numbers for each, in a
processor's cache."""


def finite(part: Tensor, stored: Stored) -> Tensor:
    """The part of a stored tensor that is given.

    Raises:
        ValueError: it has a number that is not finite in float32.
    """
    if not torch.isfinite(part.float()).all():
        raise ValueError(
            f"{stored.path}: {stored.name} has numbers that are not finite; give the adapters of an earlier step"
        )
    return part


@torch.no_grad()
def write_merged(out_OH: Tensor, weight_OH: Tensor, a_RH: Tensor, b_OR: Tensor, scale: float) -> None:
    """Write W + scale B A (LoRA, arXiv:2106.09685), computed in float32 and rounded once to the weight's dtype.

    The terms of each element are added in the order of the rank, and no operation is a matrix product, whose order of
    addition depends on the extents. So a rectangle of a weight has the bits that it has in the whole one: an export,
    and pushes by ranks that hold or send different parts, are equal. Each operation is rounded by itself, so a GPU
    should have the same bits (not run).

    Shape letters: O outputs, H inputs, R the rank.

    Args:
        out_OH: may be the weight, and of another dtype.
    """
    scaled_OR, a_RH = b_OR.float() * scale, a_RH.float()
    num_rows = max(1, MERGED_ELEMENTS[weight_OH.device.type] // max(1, weight_OH.shape[1]))
    for start in range(0, len(weight_OH), num_rows):
        out, weight, scaled = (one[start : start + num_rows] for one in (out_OH, weight_OH, scaled_OR))
        product = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        term = torch.empty_like(product)
        for column, row in zip(scaled.unbind(1), a_RH, strict=True):
            product += torch.mul(column[:, None], row, out=term)
        out.copy_((weight.float() + product).to(weight.dtype))


def write_adapters(source: Source, dtype: torch.dtype, folder: Path, base: str) -> int:
    """Write the adapters of a run's checkpoint as a new folder. Returns the bytes of the tensors.

    Args:
        base: the path of the base model, for PEFT; empty if it is not known.

    Raises:
        ValueError: a tensor has other bytes than the manifest says.
        OSError: the disk has too little space; the error names the file.
    """
    maps, tensors = Maps(source.checksums), {}
    for name, extents in tensors_of(source.shape).items():
        tensors[name] = whole = torch.empty(extents, dtype=dtype)
        for region in source.regions[name]:
            whole[slices(region.hf_box)] = maps.values(region.stored)(region.box)
    assert source.manifest is not None, "a checkpoint of a run has one"
    metadata = metadata_for(source.shape, source.manifest["training"]["base"])
    files = {
        TENSORS: save(in_file(source.shape, tensors), metadata),
        CONFIG: config_of(source.shape, base).encode(),
    }
    unfinished = folder.with_name(f"{folder.name}.partial")
    unfinished.mkdir(parents=True, exist_ok=True)
    try:
        for name, content in files.items():
            with naming(unfinished / name):
                (unfinished / name).write_bytes(content)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return sum(tensor.nbytes for tensor in tensors.values())
