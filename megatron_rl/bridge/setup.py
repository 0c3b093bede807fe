"""What both sides of the bridge must agree on before a byte is sent: one value that JSON can hold.

Each rank computes the transfer plan from this value alone. The ranks compare `agreement` over the store, so two sides
with different models, meshes or formats refuse each other with an error and do not exchange wrong weights.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter

from megatron_rl.layout import Engines, Links, Recording, TransferPlan, plan_weights
from megatron_rl.models import Shard, megatron_shards, vllm_shards
from megatron_rl.models.adapters import trains
from megatron_rl.types import Mesh, ModelShape

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class BridgeSetup:
    shape: ModelShape
    mesh: Mesh
    """The trainer's mesh."""
    fused_norms: bool
    """Whether the trainer has Transformer Engine's fused layers."""
    engines: Engines
    dtype: str
    """The dtype of messages and of the engine's weights: `float32`, `bfloat16` or `float16`."""
    host: str = ""
    """The address at which `join.host_store` listens."""
    port: int = 0
    """The port of `join.host_store`."""
    secret: str = field(default="", repr=False)
    """A part of the names of all keys in the store, so that no process of another run reads or changes them."""
    epoch: int = 0
    """The number of joins over one store: after a failure the living ranks join again under the next number."""
    folder: str | None = None
    """If this is set, the weights pass as files in this folder, and no rank connects to another."""
    share_memory: bool = True
    """Whether ranks of one machine (of one GPU) read each other's memory. If not, all bytes pass over the network."""
    bucket_bytes: int = BUCKET_BYTES
    """The largest message. A rank holds two messages in addition to its weights. A longer row of a matrix is sent
    whole."""
    timeout_s: float = 300.0
    """A push or a joining that takes longer raises an error on both sides."""
    links: Links = Links()
    """The nodes and links of the ranks. Of several trainer ranks with the same weights, one in the engine's node sends
    them."""
    trainer: tuple[Recording, ...] = field(default=(), repr=False)
    """What each trainer rank holds, for a trainer that is not Megatron. If it is empty, the family's table says what
    Megatron's ranks hold. The mesh then only says how many ranks there are."""
    recorded: tuple[Recording, ...] = field(default=(), repr=False)
    """What each rank of an engine holds, as vLLM's loaders showed it (`vllm_loaders.py`). If it is empty, the family's
    table says so."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1 or self.timeout_s <= 0:
            raise ValueError(
                f"the bridge needs a bucket and a deadline above 0, not {self.bucket_bytes} bytes and "
                f"{self.timeout_s} s"
            )
        if self.folder is not None and self.engines.num > 1:
            raise ValueError("files are read by any number of engines: describe one, engines.num=1")
        assert len(self.recorded) in (0, self.engines.world_size), "one recording for each rank of an engine"
        if len(self.trainer) not in (0, self.mesh.world_size):
            raise ValueError(
                f"the bridge was told what {len(self.trainer)} trainer ranks hold, but the mesh has "
                f"{self.mesh.world_size} ranks; give each rank its table"
            )

    @cached_property
    def transfer_plan(self) -> TransferPlan:
        return plan_weights(
            self.shape,
            self.trainer or self.mesh,
            self.engines,
            fused_norms=self.fused_norms,
            dtype=self.dtype,
            links=self.links,
            recorded=self.recorded,
            repacked=any(rank.repacked for rank in self.recorded),
        )

    def trainer_shards(self, rank: int) -> list[Shard]:
        """All parameters of one trainer rank."""
        if self.trainer:
            return self.trainer[rank].shards
        shards = megatron_shards(self.shape, self.mesh, rank, self.fused_norms)
        return [shard for shard in shards if trains(self.shape, shard.local_name)]

    def engine_shards(self, rank: int) -> list[Shard]:
        """All parameters of one rank of an engine."""
        if self.recorded:
            return self.recorded[rank].shards
        engines = self.engines
        return vllm_shards(self.shape, engines.tensor, rank, engines.expert_parallel, engines.pipeline)

    @property
    def world_size(self) -> int:
        """How many ranks join: the trainer's ranks come first, then the engines' ranks, engine by engine."""
        return self.mesh.world_size + self.engines.num * self.engines.world_size

    def engine_rank(self, engine: int, rank: int) -> int:
        """The engine rank as the transfer plan counts. Among all who join, the trainer's ranks come before it."""
        return engine * self.engines.world_size + rank

    @property
    def agreement(self) -> str:
        return f"plan {self.transfer_plan.digest}, {self.dtype}, bucket {self.bucket_bytes}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> BridgeSetup:
        return TypeAdapter(cls).validate_python(values)
