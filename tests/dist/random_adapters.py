"""Folders of adapters that a run begins with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_rl.config.policy import LoraConfig
from megatron_rl.layout import read_shape
from megatron_rl.layout.peft import CONFIG, PREFIX, TENSORS, config_of, tensors_of


def write_adapters(folder: Path, model: Path, lora: LoraConfig) -> Path:
    """Random ones."""
    shape = replace(read_shape(model), adapters=lora.adapters)
    generator = torch.Generator().manual_seed(0)
    folder.mkdir(parents=True)
    tensors = {name: 0.1 * torch.randn(extents, generator=generator) for name, extents in tensors_of(shape).items()}
    save_file({PREFIX + name: tensor for name, tensor in tensors.items()}, folder / TENSORS)
    (folder / CONFIG).write_text(config_of(shape, str(model)))
    return folder
