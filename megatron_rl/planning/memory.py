"""The memory of a trainer's GPU and of an engine's GPU by phase, computed from the model's sizes before anything runs.

These are sums of the tensors that must exist. The bytes of weights, gradients and optimizer state are exact
(parameters.py); those of activations are estimates (activations.py); those of NCCL and of vLLM's own work are the
constants below. CUDA's context and the gaps of the allocator are left out, because `cluster.gpu_memory_gb` leaves room
for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, get_args

import numpy as np

from megatron_rl.config.policy import IN_FLIGHT, PIECE_ELEMENTS, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig
from megatron_rl.layout import (
    FAMILIES,
    Engines,
    Links,
    TransferPlan,
    critic_shape,
    engine_layers,
    plan_weights,
    read_shape,
    volume,
)
from megatron_rl.recipes.activations import activations, has_fused_layers
from megatron_rl.recipes.parameters import BYTES, RankParameters, expert_data_ways, rank_parameters, state_width
from megatron_rl.types import Mesh, ModelShape, Phase

COMMUNICATOR_BYTES = 512 * 2**20
"""The memory of one NCCL communicator on each of its ranks. This is an estimate from users' reports (NVIDIA/nccl#964,
NVIDIA/nccl#2363); nobody has measured it here."""
PEER_BYTES = 16 * 2**20
"""What a communicator takes on a rank for each other rank with which it exchanges messages: a MiB for each of eight
channels, in both directions. This is an estimate from NCCL's defaults; nobody has measured it here."""
ENGINE_WORK_BYTES = 4e9
"""What an engine's rank needs for its activations, its CUDA graphs and its NCCL communicator. This is an estimate."""
INCOMPLETE = 0.5
"""The largest part of what a push brings that an engine's rank holds in layers that are not complete. It was 0.20 to
0.48 in the plans that were computed."""
PHASES: tuple[Phase, ...] = get_args(Phase)

TRAINER_LENDS = {"weights": (1, 1, 0), "gradients (fp32)": (1, 0, 0), "optimizer state": (1, 0, 0)}
CRITIC_LENDS = {**TRAINER_LENDS, "weights": (1, 0, 0)}
COPIED = ("weights", "optimizer state")
"""What trainers and critic have in the memory of the node while the engines have the GPU."""
ENGINE_LENDS = {"weights": (0, 1, 1), "KV cache": (0, 0, 1)}
"""The parts that trainers, critic and engines which share GPUs lend each other, and whether they are there in each of
PHASES (`actor.phases.HOLDS`, `rollout.engine.HOLDS`)."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of one GPU."""

    name: str
    """The rank or ranks that use the GPU."""
    parts: Mapping[str, tuple[float, float, float]]
    """The bytes of each part in each of PHASES."""
    host: Mapping[str, float] = field(default_factory=dict)
    """The bytes that the rank keeps in the memory of its node, by what they are."""

    @property
    def totals(self) -> tuple[float, ...]:
        """The bytes of each of PHASES."""
        return tuple(sum(values[phase] for values in self.parts.values()) for phase in range(len(PHASES)))

    def lending(self, there: Mapping[str, tuple[int, int, int]], *, copied: Sequence[str] = ()) -> GpuMemory:
        """The memory of a side that gives the parts in `there` up in the phases that have a 0.

        Args:
            copied: the parts that are meanwhile in the memory of the node.
        """
        held = {name: there.get(name, (1, 1, 1)) for name in self.parts}
        parts = {name: tuple(a * b for a, b in zip(size, held[name])) for name, size in self.parts.items()}
        lent = sum(self.parts[name][0] for name in copied if name in self.parts)
        return replace(self, parts=parts, host={**self.host, "lent to the engines": lent} if lent else self.host)

    @classmethod
    def together(cls, *sides: GpuMemory) -> GpuMemory:
        """All sides on one GPU."""
        names = [one.name for one in sides]
        parts = {
            f"{name.partition(',')[0]}: {part}": size
            for name, one in zip(names, sides, strict=True)
            for part, size in one.parts.items()
        }
        return cls(f"{'; '.join(names[:-1])}, and {names[-1]}", parts)


class BridgeBytes(NamedTuple):
    """The memory of the bridge's NCCL communicators on the fullest trainer rank, and on the fullest engine's rank."""

    trainer: float = 0.0
    engine: float = 0.0


def planned_transfer(config: GrpoRunConfig, shape: ModelShape, mesh: Mesh) -> TransferPlan:
    """The bridge's plan for this mesh of the trainer."""
    rollout = config.rollout
    engines = Engines(
        rollout.num_engines,
        rollout.tensor,
        rollout.pipeline,
        expert_parallel=rollout.expert_parallel,
        num_chains=config.bridge.chains,
    )
    colocated = config.cluster.colocate
    links = Links(config.cluster.gpus_per_node or 1, colocated=True) if colocated else Links()
    return plan_weights(shape, mesh, engines, dtype=config.model.dtype, links=links)


def bridge_communicators(plan: TransferPlan, colocated: bool = False) -> BridgeBytes:
    """All GPUs have one communicator together, and a second one if engines feed engines; it takes more memory for each
    GPU with which a rank exchanges messages. On shared GPUs each pair of ranks on different GPUs has a communicator of
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


def num_communicators(mesh: Mesh) -> int:
    """The number of NCCL communicators of a trainer rank: those of its groups of more than one rank that Megatron's
    collectives use, and the one of all ranks."""
    dense, expert = mesh.data * mesh.context, expert_data_ways(mesh)
    groups = [mesh.world_size, mesh.tensor, mesh.pipeline, dense, mesh.context, mesh.tensor * mesh.pipeline]
    if mesh.expert > 1:
        groups += [mesh.expert, mesh.expert_ways, expert]
    return sum(size > 1 for size in groups)


def trainer_memory(
    shape: ModelShape,
    model: ModelConfig,
    parallel: ParallelConfig,
    num_tokens: int,
    bucket_bytes: float = 0.0,
    bridge_bytes: float | None = None,
    optimizer: OptimizerConfig = OptimizerConfig(),
    num_mirrors: int = 0,
) -> GpuMemory:
    """The memory of a rank of the fullest stage.

    Args:
        num_tokens: the largest number of tokens of a micro-batch.
        bucket_bytes: the largest size of one of the bridge's messages.
        bridge_bytes: the memory of the bridge's NCCL communicators; None means that the trainers run on CPUs, with
            local layers and without NCCL.
        num_mirrors: the number of states that the nodes keep for each rank.
    """
    mesh, width = parallel.mesh, BYTES[model.dtype]
    fused = bridge_bytes is not None and has_fused_layers(shape, model)
    number = 0 if bridge_bytes is None else num_communicators(mesh)

    def of_stage(stage: int) -> GpuMemory:
        held = rank_parameters(shape, mesh, stage * mesh.stage_size)
        used = activations(shape, parallel, stage, num_tokens, width=width, recompute=model.recompute, fused=fused)
        computed = "output layer" if used.output > used.layer else "layer"
        parts = {
            "weights": _always(held.weight_bytes(model.dtype)),
            "gradients (fp32)": _always(held.gradient_bytes),
            **_state_parts(held, mesh, model.dtype, optimizer),
            "activations kept for the backward passes": (used.kept, 0.0, 0.0),
            f"the {computed} being computed": (used.computing, 0.0, 0.0),
            f"{number} NCCL communicators": _always(number * COMMUNICATOR_BYTES),
            "NCCL communicators of the bridge": _always(bridge_bytes or 0.0),
            "two buffers of the bridge": _always(2 * bucket_bytes),
        }
        state = held.state_bytes(mesh, model.dtype, optimizer)
        host = {"optimizer state": state} if optimizer.offload else {}
        host["a checkpoint's copy"] = held.state_elements(mesh) * width + state
        if num_mirrors:
            host[f"{num_mirrors} mirrors"] = num_mirrors * (held.weight_bytes(model.dtype) + state)
        return GpuMemory(
            f"trainer, stage {stage}", {name: values for name, values in parts.items() if max(values)}, host
        )

    return max((of_stage(stage) for stage in range(mesh.pipeline)), key=lambda memory: max(memory.totals))


def _state_parts(
    held: RankParameters, mesh: Mesh, dtype: str, optimizer: OptimizerConfig
) -> dict[str, tuple[float, float, float]]:
    """What of the optimizer's state is on the GPU. A state that rests passes through it in pieces of fp32."""
    resting = held.state_bytes(mesh, dtype, optimizer)
    if not optimizer.rests:
        return {"optimizer state": _always(resting)}
    width = state_width(dtype, OptimizerConfig())
    pieces = min(IN_FLIGHT * PIECE_ELEMENTS, held.state_elements(mesh)) * width
    return {
        "optimizer state": _always(0.0 if optimizer.offload else resting),
        "optimizer state in an update": (pieces, 0.0, 0.0),
    }


def _always(num_bytes: float) -> tuple[float, float, float]:
    return (num_bytes, num_bytes, num_bytes)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    stages: tuple[GpuMemory, ...]
    """The fullest rank of each pipeline stage."""
    longest: int
    """The number of sequences of the largest length that the KV cache of an engine holds."""
    half: int
    """The number of sequences of half the largest length that it holds."""

    @property
    def gpu(self) -> GpuMemory:
        """The fullest rank of the engine."""
        return max(self.stages, key=lambda stage: max(stage.totals))


def engine_memory(config: GrpoRunConfig, shape: ModelShape, plan: TransferPlan, bridge_bytes: float) -> EngineMemory:
    """The memory of the fullest rank of each pipeline stage of an engine.

    vLLM takes `rollout.gpu_memory_utilization` of the GPU for weights, work and KV cache, and the bridge's memory comes
    beside it. A sequence has as many blocks of the KV cache on each stage, so the stage that has room for the fewest
    sequences decides, and what the others have left stays empty. Experts are repacked by vLLM on GPUs, so a rank holds
    those of each layer until all ranks of the engine have the layer; `tools/plan_sync.py --repacked` computes how much
    this is. Each layer that is verified is made anew. Weights that vLLM quantises are counted as if they were not.
    """
    rollout, width = config.rollout, BYTES[config.model.dtype]
    longest, stages = rollout.max_model_tokens, range(rollout.pipeline)
    layers = [engine_layers(shape.num_layers, rollout.pipeline, stage) for stage in stages]
    weights = plan.engine_bytes.reshape(rollout.pipeline, rollout.tensor).max(1)
    caches = np.maximum(0.0, rollout.gpu_memory_utilization * gpu_bytes(config) - weights - ENGINE_WORK_BYTES)
    numbers = (
        min(int(caches[stage] // sequence_bytes(shape, rollout.tensor, n, width, layers[stage])) for stage in stages)
        for n in (longest, max(1, longest // 2))
    )
    gpus = [
        _stage_memory(config, shape, plan, stage, float(weights[stage]), float(caches[stage]), bridge_bytes)
        for stage in stages
    ]
    return EngineMemory(tuple(gpus), *numbers)


def _stage_memory(
    config: GrpoRunConfig,
    shape: ModelShape,
    plan: TransferPlan,
    stage: int,
    weights: float,
    cache: float,
    bridge_bytes: float,
) -> GpuMemory:
    rollout = config.rollout
    received = layer = engine_expert_bytes(shape, rollout, BYTES[config.model.dtype], stage)
    bucket_bytes, chained = config.bridge.bucket_mib * 2**20, plan.engines.are_chained
    layers = engine_layers(shape.num_layers, rollout.pipeline, stage)
    layer /= max(1, sum(map(shape.has_experts, layers)))
    parts = {
        "weights": _always(weights),
        "KV cache": _always(cache),
        "work of vLLM": _always(ENGINE_WORK_BYTES),
        "experts before vLLM repacks them": (0.0, max(layer, INCOMPLETE * received), 0.0),
        "a layer's experts, made anew to verify them": (0.0, layer, 0.0),
        "NCCL communicators of the bridge": _always(bridge_bytes),
        f"{'three' if chained else 'two'} buffers of the bridge": _always((2 + chained) * bucket_bytes),
    }
    name = f"engine, stage {stage}" if rollout.pipeline > 1 else "engine"
    return GpuMemory(name, {name: values for name, values in parts.items() if max(values)})


def engine_expert_bytes(shape: ModelShape, rollout: RolloutConfig, width: int, stage: int) -> float:
    """The bytes of the routed experts on the fullest rank of a pipeline stage of an engine."""
    first = stage * rollout.tensor
    placed = FAMILIES[shape.family].vllm_placed(shape, rollout.tensor, first, rollout.expert_parallel, rollout.pipeline)
    elements = sum(
        placement.num_experts * sum(volume(local) for _, _, local in placement.pieces)
        for placement, _, _ in placed
        if placement.experts is not None
    )
    return float(elements * width)


def sequence_bytes(shape: ModelShape, tensor: int, num_tokens: int, width: int, layers: range) -> float:
    """The bytes of the keys and values of one sequence in some layers on one rank of an engine. Ranks share the KV
    heads, but each has at least one; latent attention keeps its low-rank projection on every rank."""
    latent = shape.latent
    numbers = 2 * max(shape.num_kv_heads // tensor, 1) * shape.head_dim
    if latent:
        numbers = latent.kv_rank + latent.rope_dim
    windows = len(set(shape.sliding_layers) & set(layers))
    tokens = (len(layers) - windows) * num_tokens + windows * min(num_tokens, shape.sliding_window or num_tokens)
    return float(tokens * numbers * width)


@dataclass(frozen=True, slots=True)
class RunMemory:
    """The memory of a run's ranks."""

    trainer: GpuMemory
    training_bytes: Mapping[str, float]
    """The bytes of a trainer rank in training, for each value of `model.recompute`."""
    trainer_limit: float
    """The bytes of memory that a trainer rank has; infinite on a CPU."""
    gpu_bytes: float
    """The bytes of memory of a whole GPU."""
    engine: EngineMemory | None
    """None if the run has no engines on GPUs."""
    is_shared: bool
    """Whether each trainer rank shares its GPU with a rank of an engine, and with one of the critic if there is one."""
    fused: bool
    """Whether the trainer's layers are Transformer Engine's."""
    critic: GpuMemory | None = None
    """None if there is no critic. It has the memory that a trainer rank has."""

    @property
    def on_gpus(self) -> bool:
        return self.trainer_limit < math.inf

    @property
    def gpus(self) -> list[GpuMemory]:
        return [gpu for gpu, _ in self._limited]

    @property
    def _limited(self) -> list[tuple[GpuMemory, float]]:
        """The fullest GPU of each kind, and the memory that it has."""
        trainers = [(one, self.trainer_limit) for one in (self.trainer, self.critic) if one is not None]
        if self.engine is None:
            return trainers
        if self.is_shared:
            sides = [one for one, _ in trainers]
            return [(GpuMemory.together(*sides, self.engine.gpu), self.trainer_limit)]
        return [*trainers, *((stage, self.gpu_bytes) for stage in self.engine.stages)]

    @property
    def problems(self) -> list[str]:
        """What does not fit, one sentence each with what to change."""
        found = []
        for gpu, limit in self._limited:
            needed = max(gpu.totals)
            if needed > limit:
                phase = gpu.totals.index(needed)
                size, largest = max((values[phase], part) for part, values in gpu.parts.items())
                side = largest.partition(":")[0] if ": " in largest else gpu.name
                advice = _advice(largest.rpartition(": ")[2], side.startswith("engine"))
                if side.startswith("critic"):
                    advice = advice.replace("policy.", "critic.")
                found.append(
                    f"{PHASES[phase]} needs {needed / 1e9:.1f} GB on a GPU of {limit / 1e9:.0f} GB ({gpu.name}), of "
                    f"which {size / 1e9:.1f} GB are {largest}; {advice}"
                )
        if self.engine is not None and not self.engine.longest:
            cache = self.engine.gpu.parts.get("KV cache", _always(0.0))[PHASES.index("generating")]
            found.append(
                f"generating: an engine's KV cache of {cache / 1e9:.1f} GB a GPU holds no sequence of the largest "
                "length; raise rollout.tensor, rollout.pipeline or rollout.gpu_memory_utilization, or lower "
                "rollout.max_response_tokens"
            )
        return found


def _advice(part: str, of_engine: bool) -> str:
    """What makes the rank smaller whose largest part is this one."""
    if "communicators" in part:
        return "set bridge.chains, so that trainers send to fewer engines"
    if part.endswith("buffers of the bridge"):
        return "lower bridge.bucket_mib"
    if of_engine:
        return (
            "lower rollout.gpu_memory_utilization, which makes the KV cache smaller, or raise rollout.tensor or "
            "rollout.pipeline"
        )
    if part == "activations kept for the backward passes":
        return (
            "set model.recompute to full, lower balance.max_tokens_per_microbatch, or raise policy.parallel.tensor or "
            "policy.parallel.context"
        )
    if part.endswith("being computed"):
        return "lower balance.max_tokens_per_microbatch, or raise policy.parallel.tensor or policy.parallel.context"
    if part == "optimizer state":
        return (
            "set policy.optimizer.offload, or raise policy.parallel.data, policy.parallel.tensor or "
            "policy.parallel.pipeline"
        )
    return "raise policy.parallel.tensor or policy.parallel.pipeline, or for a mixture policy.parallel.expert"


def critic_memory(config: GrpoRunConfig, policy: ModelShape) -> GpuMemory:
    """The memory of a critic's rank of the fullest stage.

    Args:
        policy: the sizes of the policy, which are the critic's if it has no model of its own, or none that is here.
    """
    critic = config.critic
    assert critic is not None, "the configuration has a critic"
    model, num_tokens = critic.model or config.model, config.balance.max_tokens_per_microbatch
    shape = critic_shape(read_shape(model.path) if critic.model and model.path.exists() else policy)
    bridge_bytes = 0.0 if config.cluster.gpus_per_trainer else None
    memory = trainer_memory(
        shape,
        model,
        critic.parallel,
        num_tokens,
        bridge_bytes=bridge_bytes,
        optimizer=critic.optimizer,
        num_mirrors=count_mirrors(config, critic.parallel),
    )
    return replace(memory, name=memory.name.replace("trainer", "critic"))


def run_memory(config: BaseConfig, shape: ModelShape) -> RunMemory:
    """The memory of a run's GPUs. On CPUs the trainer's numbers are those of the memory of one rank's process, without
    NCCL, and there is no limit.

    Raises:
        ValueError: trainer or engine cannot split the model in the configured way.
    """
    cluster, parallel, model = config.cluster, config.policy.parallel, config.model
    on_gpus = cluster.gpus_per_trainer > 0
    communicators, engine, bucket_bytes, reference = BridgeBytes(), None, 0.0, 0.0
    critic = critic_memory(config, shape) if isinstance(config, GrpoRunConfig) and config.critic else None
    if critic is not None and cluster.colocate:
        critic = critic.lending(CRITIC_LENDS, copied=COPIED)
    if isinstance(config, GrpoRunConfig):
        bucket_bytes = config.bridge.bucket_mib * 2**20
        plan = planned_transfer(config, shape, parallel.mesh)
        if on_gpus:
            communicators = bridge_communicators(plan, cluster.colocate)
        if cluster.gpus_per_engine_rank > 0:
            engine = engine_memory(config, shape, plan, communicators.engine)
            if cluster.colocate:
                engine = replace(engine, stages=tuple(stage.lending(ENGINE_LENDS) for stage in engine.stages))
        if config.algorithm.kl is not None:
            stages = range(parallel.mesh.pipeline)
            held = [rank_parameters(shape, parallel.mesh, stage * parallel.mesh.stage_size) for stage in stages]
            reference = float(max(one.total for one in held) * BYTES[model.dtype])

    def of_trainer(recompute: str) -> GpuMemory:
        chosen = model.model_copy(update={"recompute": recompute})
        num_tokens = config.balance.max_tokens_per_microbatch
        bridge_bytes = communicators.trainer if on_gpus else None
        memory = trainer_memory(
            shape,
            chosen,
            parallel,
            num_tokens,
            bucket_bytes,
            bridge_bytes,
            config.policy.optimizer,
            count_mirrors(config, parallel),
        )
        if reference:
            memory = replace(memory, host={**memory.host, "reference policy": reference})
        return memory.lending(TRAINER_LENDS, copied=COPIED) if cluster.colocate else memory

    return RunMemory(
        trainer=of_trainer(model.recompute),
        training_bytes={mode: of_trainer(mode).totals[0] for mode in ("none", "full")},
        trainer_limit=trainer_limit(config),
        gpu_bytes=gpu_bytes(config),
        engine=engine,
        is_shared=cluster.colocate,
        fused=on_gpus and has_fused_layers(shape, model),
        critic=critic,
    )


def count_mirrors(config: BaseConfig, parallel: ParallelConfig) -> int:
    """The states that a node keeps for each of its ranks: those of two steps, of the rank and of one on another node
    (`cluster/mirror.py`)."""
    if not config.cluster.mirror:
        return 0
    return 4 if parallel.mesh.world_size > (config.cluster.gpus_per_node or math.inf) else 2


def trainer_limit(config: BaseConfig) -> float:
    """The bytes of memory that a trainer rank has; infinite on a CPU."""
    share = min(1.0, config.cluster.gpus_per_trainer)
    return gpu_bytes(config) * share if share else math.inf


def gpu_bytes(config: BaseConfig) -> float:
    return config.cluster.gpu_memory_gb * 1e9
