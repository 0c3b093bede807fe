"""Which GPU is in which node, and how fast its links are.

Trainer ranks fill the first nodes, with `gpus_per_node` ranks each. The engines' ranks come after them, engine by
engine, or share the trainer's GPUs from the first one on. A rate belongs to one direction; both directions work at
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Gpu = TypeVar("Gpu", int, np.ndarray)
"""One GPU, or an array of GPUs."""


@dataclass(frozen=True, slots=True)
class Links:
    gpus_per_node: int = 1
    nics_per_node: int | None = None
    """If a node has fewer NICs than GPUs, neighbouring GPUs share one. None: each GPU has its own NIC."""
    colocated: bool = False
    """Whether the engines run on the trainer's GPUs."""
    nvlink_gbps: float = 3600.0
    """The rate from a GPU to the others of its node in Gbit/s; 3600 is an H100's 450 GB/s."""
    nic_gbps: float = 400.0
    """The rate of a NIC in Gbit/s; 400 is 50 GB/s."""

    def __post_init__(self) -> None:
        nics = self.gpus_per_node if self.nics_per_node is None else self.nics_per_node
        if not 1 <= nics <= self.gpus_per_node or self.gpus_per_node % nics:
            raise ValueError(f"links: {nics} NICs per node do not divide {self.gpus_per_node} GPUs evenly")
        if min(self.nvlink_gbps, self.nic_gbps) <= 0:
            raise ValueError(f"links: {self}: both rates must be above 0")

    def gpu(self, destination: np.ndarray, num_sources: int) -> np.ndarray:
        """The GPU of each engine rank. Trainer rank r is on GPU r."""
        return destination if self.colocated else destination + num_sources

    def node(self, gpu: Gpu) -> Gpu:
        return gpu // self.gpus_per_node

    def nic(self, gpu: Gpu) -> Gpu:
        per_nic = self.gpus_per_node // (self.nics_per_node or self.gpus_per_node)
        return gpu // per_nic

    @property
    def nvlink_bytes_per_s(self) -> float:
        return self.nvlink_gbps * 1e9 / 8

    @property
    def nic_bytes_per_s(self) -> float:
        return self.nic_gbps * 1e9 / 8
