"""The memory of all GPUs of a run by phase, computed from the models' sizes before anything runs.

These are sums of the tensors that must exist (trainer.py, engine.py, transfer.py). CUDA's context and the gaps of the
allocator are left out, because `cluster.gpu_memory_gb` leaves room for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_rl.config.policy import ParallelConfig
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig
from megatron_rl.config.teachers import teacher_on_ranks
from megatron_rl.planning.activations import trains_fused
from megatron_rl.planning.engine import EngineMemory, engine_memory, gpu_bytes
from megatron_rl.planning.gpu import PHASES, GpuMemory, always
from megatron_rl.planning.nodes import NodeMemory, node_memory
from megatron_rl.planning.parameters import BYTES, stage_parameters
from megatron_rl.planning.reward_models import reward_model_memory
from megatron_rl.planning.shapes import planned_critic_shape, planned_teacher_shape
from megatron_rl.planning.teachers import sleeping, teacher_memory
from megatron_rl.planning.trainer import sharing, trainer_memory
from megatron_rl.planning.transfer import BridgeBytes, TrainersPush, bridge_communicators, planned_transfer
from megatron_rl.types import ModelShape

TEACHER = "teacher"
"""The weights of a teacher that the trainer ranks compute."""


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
    nodes: NodeMemory
    """What the ranks keep in the memory of their nodes."""
    critic: GpuMemory | None = None
    """None if there is no critic. It has the memory that a trainer rank has."""
    scoring: Sequence[tuple[GpuMemory, float]] = ()
    """The GPUs of teachers' engines and of reward models, and the bytes of memory that each has."""

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
            return [*trainers, *self.scoring]
        if self.is_shared:
            sides = [one for one, _ in trainers]
            return [(GpuMemory.together(*sides, self.engine.gpu), self.trainer_limit), *self.scoring]
        return [*trainers, *((stage, self.gpu_bytes) for stage in self.engine.stages), *self.scoring]

    @property
    def problems(self) -> list[str]:
        """What does not fit, one sentence each with what to change."""
        found = []
        for gpu, limit in self._limited:
            needed = max(gpu.totals)
            if needed > limit:
                phase = gpu.totals.index(needed)
                size, largest = max((sizes[phase], part) for part, sizes in gpu.parts.items())
                found.append(
                    f"{PHASES[phase]} needs {needed / 1e9:.1f} GB on a GPU of {limit / 1e9:.0f} GB ({gpu.name}), of "
                    f"which {size / 1e9:.1f} GB are {largest}; {gpu.remedies[largest]}"
                )
        if self.engine is not None and not self.engine.longest:
            cache = self.engine.gpu.parts.get("KV cache", always(0.0))[PHASES.index("generating")]
            found.append(
                f"generating: an engine's KV cache of {cache / 1e9:.1f} GB a GPU holds no sequence of the largest "
                "length; raise rollout.parallel.tensor, rollout.parallel.pipeline or "
                "rollout.gpu_memory_utilization, or lower rollout.max_response_tokens"
            )
        if self.on_gpus and (problem := self.nodes.problem):
            found.append(problem)
        return found


def run_memory(config: BaseConfig, shape: ModelShape) -> RunMemory:
    """The memory of a run's GPUs. On CPUs the trainer's numbers are the memory of one rank's process, without NCCL, and
    there is no limit.

    Args:
        shape: the sizes of the policy's model.

    Raises:
        ValueError: trainer or engine cannot split the model in the configured way, or the critic's sizes are unknown.
    """
    cluster, parallel, model = config.cluster, config.policy.parallel, config.model
    on_gpus = cluster.gpus_per_trainer > 0
    communicators, engine, critic, reference, teacher = BridgeBytes(), None, None, 0.0, 0.0
    scoring: list[tuple[GpuMemory, float]] = []
    if isinstance(config, GrpoRunConfig):
        plan = planned_transfer(config, shape, parallel.mesh)
        if on_gpus:
            communicators = bridge_communicators(plan, cluster.colocate)
        if cluster.gpus_per_engine_rank > 0:
            engine = engine_memory(config, shape, plan, communicators.engine)
            engine = engine.sharing(*sleeping(config)) if cluster.colocate else engine
        compares = config.algorithm.kl is not None or config.algorithm.loss.needs_reference
        if compares and shape.adapters is None:  # with adapters the base is the reference
            held = stage_parameters(shape.served, parallel.mesh, trains_fused(config, shape, parallel.context))
            reference = float(max(one.total for one in held) * BYTES[model.dtype])
        if teacher_on_ranks(config) is not None:
            held = stage_parameters(planned_teacher_shape(config, 0), parallel.mesh)
            teacher = float(max(one.total for one in held) * BYTES[model.dtype])
        if config.critic is not None:
            critic = _critic_memory(config)
            critic = sharing(critic, "critic") if cluster.colocate else critic

    def of_trainer(recompute: str) -> GpuMemory:
        memory = trainer_memory(
            shape,
            model.model_copy(update={"recompute": recompute}),
            config.policy,
            config.balance.max_tokens_per_microbatch,
            on_gpus=on_gpus,
            push=TrainersPush.of(config, communicators.trainer),
            num_mirrors=count_mirrors(config, parallel),
        )
        if reference:
            memory = replace(memory, host={**memory.host, "reference policy": reference})
        if teacher:  # on the device during its pass, which ends before there are activations: an upper bound
            part, remedy = {TEACHER: (teacher, 0.0, 0.0)}, {TEACHER: "set algorithm.distillation.by to engine"}
            memory = replace(memory, host={**memory.host, TEACHER: teacher})
            memory = replace(memory, parts={**memory.parts, **part}, remedies={**memory.remedies, **remedy})
        return sharing(memory, "trainer") if cluster.colocate else memory

    trainer = of_trainer(model.recompute)
    if isinstance(config, GrpoRunConfig):
        sides = [(trainer, "generating"), (critic, "generating"), (engine and engine.gpu, "training")]
        lent = sum(one.totals[PHASES.index(phase)] for one, phase in sides if one) if cluster.colocate else 0.0
        limit = gpu_bytes(config) * cluster.reward_model_gpus
        scoring = [*teacher_memory(config, lent), *((one, limit) for one in reward_model_memory(config))]
    gpus = {"trainer": trainer, "critic": critic, "engine": engine.gpu if engine else None}
    return RunMemory(
        trainer=trainer,
        training_bytes={mode: of_trainer(mode).totals[0] for mode in ("none", "full")},
        trainer_limit=trainer_limit(config),
        gpu_bytes=gpu_bytes(config),
        engine=engine,
        is_shared=cluster.colocate,
        fused=trains_fused(config, shape, parallel.context),
        nodes=node_memory(config, {role: gpu.host for role, gpu in gpus.items() if gpu}),
        critic=critic,
        scoring=scoring,
    )


def _critic_memory(config: GrpoRunConfig) -> GpuMemory:
    critic = config.critic
    assert critic is not None, "the configuration has a critic"
    return trainer_memory(
        planned_critic_shape(config),
        critic.model or config.model,
        critic.trainer,
        config.balance.max_tokens_per_microbatch,
        on_gpus=config.cluster.gpus_per_trainer > 0,
        num_mirrors=count_mirrors(config, critic.parallel),
        section="critic",
    )


def count_mirrors(config: BaseConfig, parallel: ParallelConfig) -> int:
    """The number of training states that a node keeps for each of its ranks (`cluster/mirror.py`): two steps of the
    rank itself and, if the ranks span nodes, two steps of a rank on another node."""
    if not config.cluster.mirror:
        return 0
    return 4 if parallel.mesh.world_size > (config.cluster.gpus_per_node or math.inf) else 2


def trainer_limit(config: BaseConfig) -> float:
    """The bytes of memory that a trainer rank has; infinite on a CPU."""
    share = min(1.0, config.cluster.gpus_per_trainer)
    return gpu_bytes(config) * share if share else math.inf
