"""What both sides of the bridge must agree on before a byte moves: one JSON-able value.

Each rank computes the transfer plan from it alone; `agreement` is compared over the store, so two sides that
speak of different models, meshes or formats refuse each other by name instead of exchanging wrong weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter

from megatron_rl.layout import Copy, TransferPlan, plan_policy_to_engines, volume
from megatron_rl.types import Mesh, ModelShape

BUCKET_BYTES = 256 * 2**20
"""Bound of one message: what a rank packs at once beside its weights (a larger single copy goes alone)."""


@dataclass(frozen=True)
class BridgeSetup:
    shape: ModelShape
    mesh: Mesh
    """The trainer's."""
    fused_norms: bool
    """The trainer has Transformer Engine's fused layers."""
    num_engines: int
    engine_tensor: int
    """Tensor parallelism of each engine."""
    dtype: str
    """On the wire and in the engine: `float32` or `bfloat16`."""
    host: str
    """Where `transport.host_store` listens, and its port."""
    port: int
    timeout_s: float = 300.0
    """A push, or the joining, that takes longer raises on both sides."""

    @cached_property
    def plan(self) -> TransferPlan:
        return plan_policy_to_engines(
            self.shape,
            self.mesh,
            fused_norms=self.fused_norms,
            num_engines=self.num_engines,
            engine_tensor=self.engine_tensor,
            dtype=self.dtype,
        )

    @property
    def world_size(self) -> int:
        """Trainer ranks first, then the engines' ranks, engine by engine."""
        return self.mesh.world_size + self.num_engines * self.engine_tensor

    def engine_rank(self, engine: int, tensor_rank: int) -> int:
        """Destination rank in the plan; the group's rank is this after the trainers' ranks."""
        return engine * self.engine_tensor + tensor_rank

    @property
    def agreement(self) -> str:
        return f"plan {self.plan.digest}, {self.dtype}, bucket {BUCKET_BYTES}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> BridgeSetup:
        return TypeAdapter(cls).validate_python(values)


def split_buckets(copies: Sequence[Copy], max_elements: int) -> list[list[Copy]]:
    """Cut a route into messages, in wire order; a copy is never cut."""
    buckets: list[list[Copy]] = []
    room = 0
    for copy in copies:
        size = volume(copy.source_box)
        if not buckets or size > room:
            buckets.append([])
            room = max_elements
        buckets[-1].append(copy)
        room -= size
    return buckets
