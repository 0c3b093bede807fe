"""Folders of adapters that a run begins with, and the base model that they have in fp8."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config.policy import LoraConfig
from megatron_rl.models import linear_layers, read_shape
from megatron_rl.models.peft import CONFIG, TENSORS, config_of, in_file, tensors_of


def write_adapters(folder: Path, model: Path, lora: LoraConfig) -> Path:
    """Random ones."""
    shape = replace(read_shape(model), adapters=lora.adapters)
    generator = torch.Generator().manual_seed(0)
    folder.mkdir(parents=True)
    tensors = {name: 0.1 * torch.randn(extents, generator=generator) for name, extents in tensors_of(shape).items()}
    save_file(in_file(shape, tensors), folder / TENSORS)
    (folder / CONFIG).write_text(config_of(shape, str(model)))
    return folder


def in_fp8(model: Path, folder: Path) -> Path:
    """The model with the weights of its layers' linear layers rounded to float8 in blocks of 128 x 128."""
    shutil.copytree(model, folder)
    weights, names = load_file(model / "model.safetensors"), linear_layers(read_shape(model))
    for name, weight in weights.items():
        if weight.dim() == 2 and name.split(".")[-2] in names:
            for block in (part for rows in weight.split(128) for part in rows.split(128, 1)):
                scale = block.abs().max() / 448
                block.copy_((block / scale).to(torch.float8_e4m3fn).float() * scale)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
