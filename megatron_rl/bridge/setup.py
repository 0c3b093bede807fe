"""What both sides of the bridge must agree on before a byte moves: one JSON-able value.

Each rank computes the transfer plan from it alone; `agreement` is compared over the store, so two sides that
speak of different models, meshes or formats refuse each other by name instead of exchanging wrong weights.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter

from megatron_rl.layout import Engines, TransferPlan, plan_weights
from megatron_rl.types import Mesh, ModelShape

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class BridgeSetup:
    shape: ModelShape
    mesh: Mesh
    """The trainer's."""
    fused_norms: bool
    """The trainer has Transformer Engine's fused layers."""
    engines: Engines
    dtype: str
    """On the wire and in the engine: `float32` or `bfloat16`."""
    host: str = ""
    """Where `join.host_store` listens, and its port."""
    port: int = 0
    epoch: int = 0
    """Counts the joinings over one store: after a failure, those who live join anew under the next number."""
    folder: str | None = None
    """The engines cannot be reached: the weights pass as files in this folder, and nobody joins anybody."""
    share_memory: bool = True
    """Ranks of one machine (one GPU) read each other's memory. False: all bytes go over the network."""
    bucket_bytes: int = BUCKET_BYTES
    """Bound of one message. A rank holds two beside its weights; a matrix row that is longer goes whole."""
    timeout_s: float = 300.0
    """A push, or the joining, that takes longer raises on both sides."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1 or self.timeout_s <= 0:
            raise ValueError(
                f"the bridge needs a bucket and a deadline above 0, not {self.bucket_bytes} bytes and "
                f"{self.timeout_s} s"
            )
        if self.folder is not None and self.engines.num > 1:
            raise ValueError("files are read by any number of engines: describe one, engines.num=1")

    @cached_property
    def plan(self) -> TransferPlan:
        return plan_weights(self.shape, self.mesh, self.engines, fused_norms=self.fused_norms, dtype=self.dtype)

    @property
    def world_size(self) -> int:
        """Trainer ranks first, then the engines' ranks, engine by engine."""
        return self.mesh.world_size + self.engines.num * self.engines.world_size

    def engine_rank(self, engine: int, rank: int) -> int:
        """Of the plan. The rank among all who join is this after the trainers' ranks."""
        return engine * self.engines.world_size + rank

    @property
    def agreement(self) -> str:
        return f"plan {self.plan.digest}, {self.dtype}, bucket {self.bucket_bytes}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> BridgeSetup:
        return TypeAdapter(cls).validate_python(values)
