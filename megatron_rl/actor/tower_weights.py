"""The tensors of a vision tower in the files of a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_rl.models.hub import weight_files
from megatron_rl.models.vision import PREFIXES


@dataclass(frozen=True, slots=True)
class TowerFile:
    """A file's tensors that belong to a tower."""

    path: Path
    names: tuple[str, ...]

    def read(self) -> dict[str, Tensor]:
        with safe_open(self.path, "pt") as file:
            return {name: file.get_tensor(name) for name in self.names}

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each tensor."""
        return {name: tensor.nbytes for name, tensor in self.read().items()}


def tower_files(folder: Path) -> list[TowerFile]:
    """The files of a folder that hold a part of a tower."""
    found = []
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            names = tuple(name for name in file.keys() if name.startswith(PREFIXES))
        if names:
            found.append(TowerFile(path, names))
    return found


def tower_weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a tower, by the names in its module."""
    read = (item for file in tower_files(folder) for item in file.read().items())
    return {name.partition(PREFIXES[-1])[2]: tensor.to(dtype) for name, tensor in read}
