"""The bridge's transfer plan of a run, and the memory of its NCCL communicators."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_rl.config.schema import BaseConfig, GrpoRunConfig
from megatron_rl.layout import Engines, Links, TransferPlan, plan_weights
from megatron_rl.planning.activations import trains_fused
from megatron_rl.planning.adapters import served_adapters
from megatron_rl.types import Mesh, ModelShape

COMMUNICATOR_BYTES = 0.41e9
"""The memory of one NCCL communicator on each of its ranks: what each one after the first took on an H100 (NCCL 2.28),
with one rank. Users report about as much for several ranks (NVIDIA/nccl#964, NVIDIA/nccl#2363)."""
BRIDGE = "NCCL communicators of the bridge"
"""Their row in the memory of a trainer rank, and of an engine's."""
PEER_BYTES = 16 * 2**20
"""What a communicator takes on a rank for each other rank that it exchanges messages with: a MiB for each of eight
channels, in both directions. This is an estimate from NCCL's defaults; nobody has measured it here."""


class TrainersPush(NamedTuple):
    """What the memory of a trainer rank in a push follows from."""

    bucket_bytes: float = 0.0
    """The largest size of one of the bridge's messages."""
    communicator_bytes: float = 0.0
    """The memory of the bridge's NCCL communicators."""
    merges: bool = False
    """Whether it merges adapters into the weights that it sends (`rollout.lora`)."""
    copies: bool = False
    """Whether it sends copies of adapters."""

    @classmethod
    def of(cls, config: BaseConfig, communicator_bytes: float) -> TrainersPush:
        if not isinstance(config, GrpoRunConfig):
            return cls()
        merges, copies = config.rollout.lora == "merged", config.served_adapters is not None
        return cls(config.bridge.bucket_mib * 2**20, communicator_bytes, merges, copies)


NO_PUSH = TrainersPush()


class BridgeBytes(NamedTuple):
    """The memory of the bridge's NCCL communicators on the fullest trainer rank, and on the fullest engine's rank."""

    trainer: float = 0.0
    engine: float = 0.0


def planned_transfer(config: GrpoRunConfig, shape: ModelShape, mesh: Mesh) -> TransferPlan:
    """The bridge's plan for this mesh of the trainer, of what a push brings (`GrpoRunConfig.pushed`)."""
    engines, pushed = planned_engines(config), config.pushed(shape)
    colocated = config.cluster.colocate
    links = Links(config.cluster.gpus_per_node or 1, colocated=True) if colocated else Links()
    recorded = served_adapters(pushed, engines) if pushed.adapters else ()
    fused = trains_fused(config, shape, mesh.context)
    return plan_weights(
        pushed, mesh, engines, fused_norms=fused, dtype=config.model.dtype, links=links, recorded=recorded
    )


def planned_engines(config: GrpoRunConfig) -> Engines:
    rollout = config.rollout
    return Engines(
        rollout.num_engines,
        rollout.parallel.tensor,
        rollout.parallel.pipeline,
        expert_parallel=rollout.parallel.expert_parallel,
        num_chains=config.bridge.chains,
    )


def bridge_communicators(plan: TransferPlan, colocated: bool = False) -> BridgeBytes:
    """All GPUs have one communicator together, and a second one if engines feed engines; it takes more memory for each
    GPU that a rank exchanges messages with. On shared GPUs each pair of ranks on different GPUs has a communicator of
    its own (`bridge/join.py`)."""
    links, engines = Links(colocated=colocated), plan.engines
    pairs = np.unique(plan.source.astype(np.int64) * plan.num_destinations + plan.destination)
    source, destination = np.divmod(pairs, plan.num_destinations)
    far = source != links.gpu(destination, plan.num_sources)
    sent = int(np.bincount(source[far], minlength=1).max())
    # An engine in a chain also has a line to the one before it, or after it.
    fed = int(np.bincount(destination[far], minlength=1).max()) + engines.are_chained
    if colocated:
        return BridgeBytes(sent * COMMUNICATOR_BYTES, fed * COMMUNICATOR_BYTES)
    shared = (1 + engines.are_chained) * COMMUNICATOR_BYTES
    return BridgeBytes(shared + sent * PEER_BYTES, shared + fed * PEER_BYTES)
