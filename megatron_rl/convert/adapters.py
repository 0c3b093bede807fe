"""What a run's adapters need of files: the digest of their base model, and a folder made of a checkpoint."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_rl.convert import manifest
from megatron_rl.convert.source import Source
from megatron_rl.convert.stored import Maps, read_safetensors
from megatron_rl.layout import slices
from megatron_rl.layout.peft import CONFIG, PREFIX, TENSORS, config_of, tensors_of

SAMPLE = 64
"""The bytes of each tensor that a digest of a base model reads."""


def write_adapters(source: Source, dtype: torch.dtype, folder: Path) -> int:
    """Write the adapters of a run's checkpoint as a new folder. Returns the bytes of the tensors.

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
    save_file({PREFIX + name: t for name, t in tensors.items()}, unfinished / TENSORS, metadata={"format": "pt"})
    (unfinished / CONFIG).write_text(config_of(source.shape, ""), encoding="utf-8")
    unfinished.rename(folder)
    return sum(tensor.nbytes for tensor in tensors.values())


def base_digest(folder: Path) -> str:
    """A digest of a model's weights that reads little of them: of the names, dtypes and extents of all tensors, and of
    the first SAMPLE bytes of each; or of the manifest, which has a checksum of every tensor.

    Raises:
        ValueError: the folder has no weights, or a file is damaged.
    """
    digest = hashlib.sha256()
    if (folder / manifest.NAME).is_file():
        digest.update((folder / manifest.NAME).read_bytes())
        return digest.hexdigest()[:16]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has neither safetensors files nor a {manifest.NAME}")
    stored = {name: tensor for path in files for name, tensor in read_safetensors(path).items()}
    for name, tensor in sorted(stored.items()):
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            sample = file.read(min(SAMPLE, tensor.num_bytes))
        digest.update(repr((name, tensor.dtype, tensor.extents, sample)).encode())
    return digest.hexdigest()[:16]
