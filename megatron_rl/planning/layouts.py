"""The layouts of a trainer that fit into the memory of its GPUs, in order of the estimated time of a step.

Invariants (tests/unit/planning): every layout has the GPUs of the configuration, divides the model, and fits; the
configured layout is among the candidates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron_rl.config.optimizer import AdamConfig, OptimizerConfig
from megatron_rl.config.policy import ParallelConfig
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig
from megatron_rl.models import FAMILIES
from megatron_rl.models.splits import padded
from megatron_rl.planning.activations import has_fused_layers
from megatron_rl.planning.estimates import largest_work, most_microbatches, planned_microbatches, training_seconds
from megatron_rl.planning.gpu import Bytes, GpuMemory, always
from megatron_rl.planning.memory import RunMemory, count_mirrors, run_memory, trainer_limit
from megatron_rl.planning.nodes import node_memory
from megatron_rl.planning.rates import Rates
from megatron_rl.planning.stages import with_layers
from megatron_rl.planning.teachers import pass_seconds
from megatron_rl.planning.trainer import sharing, trainer_memory
from megatron_rl.planning.transfer import BRIDGE, BridgeBytes, TrainersPush, bridge_communicators, planned_transfer
from megatron_rl.types import ModelShape

MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Layout:
    parallel: ParallelConfig
    recompute: str
    offload: bool | None
    """Whether the optimizer's state is in the memory of the nodes; None if its kind cannot do so."""
    seconds: float
    """The trainer's time of a step if every sample has the largest length."""
    memory: GpuMemory

    @property
    def label(self) -> str:
        mesh = self.parallel.mesh
        sizes = {"TP": mesh.tensor, "CP": mesh.context, "PP": mesh.pipeline, "DP": mesh.data}
        text = " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank"
        experts = f", EP{mesh.expert} x ETP{mesh.expert_ways}" if mesh.expert > 1 else ""
        runs = [(count, len([*equal])) for count, equal in groupby(self.parallel.layers or ())]
        counts = "+".join(f"{count}x{times}" if times > 1 else f"{count}" for count, times in runs)
        stages = f" of {counts} layers" if counts else ""
        parts = f" x VPP{mesh.virtual}" if mesh.virtual > 1 else ""
        return f"{text}{parts}{experts}{stages}, recompute {self.recompute}{', offload' if self.offload else ''}"

    @property
    def overrides(self) -> list[str]:
        """What makes the layout of any configuration of the same model, as arguments of a command: every size, and not
        the sizes alone that differ from the defaults, because the configuration may have others."""
        chosen = self.parallel.model_dump() | {"layers": self.parallel.layers and list(self.parallel.layers)}
        keys = [f"policy.parallel.{name}={json.dumps(value).replace(' ', '')}" for name, value in chosen.items()]
        keys.append(f"model.recompute={self.recompute}")
        if self.offload is not None:
            keys.append(f"policy.optimizer.offload={str(self.offload).lower()}")
        return keys


@dataclass(frozen=True, slots=True)
class Others:
    """What engines, and a critic, hold next to a trainer rank."""

    totals: Bytes
    """The bytes on the trainer rank's GPU in each phase; 0 if nobody shares it. The communicators of the engine's
    bridge are left out, because they depend on the layout."""
    hosts: Mapping[str, Mapping[str, float]]
    """One rank of each in the memory of its node, by role."""

    @classmethod
    def of(cls, memory: RunMemory) -> Others:
        sides = {"engine": memory.engine.gpu if memory.engine else None, "critic": memory.critic}
        known = {role: gpu for role, gpu in sides.items() if gpu is not None}
        rows = [gpu.parts for gpu in known.values()] if memory.is_shared else []
        parts = [sizes for row in rows for part, sizes in row.items() if part != BRIDGE]
        training, pushing, generating = (sum(phases) for phases in zip(always(0.0), *parts, strict=True))
        return cls((training, pushing, generating), {role: gpu.host for role, gpu in known.items()})


def fitting_layouts(config: BaseConfig, shape: ModelShape) -> list[Layout]:
    """The fastest layouts of the trainer that fit, at most MAX_SHOWN, and the configured one if it fits but is slower;
    the fastest first. All have as many GPUs as the configuration; the engines stay as configured. If the number of
    stages does not divide the number of layers, the layers are distributed as with `layers: auto`. A layout that fits
    only with `policy.optimizer.offload` is returned with it.

    The bridge's communicators depend on the layout, and planning a transfer takes longer than everything else. So the
    layouts are ordered without them, and only the fastest ones are planned.
    """
    gpus_per_node = config.cluster.gpus_per_node or 8
    work, others = largest_work(config), Others.of(run_memory(config, shape))
    num_tokens, rates = config.balance.max_tokens_per_microbatch, Rates.of(config)
    planned: dict[tuple[int, ...], int] = {}
    """The number of micro-batches by what it depends on: data-parallel ranks, alignment, and what divides it."""

    def fitting(parallel: ParallelConfig, recompute: str, bridge: BridgeBytes) -> Layout | None:
        found = _fitting(config, shape, parallel, recompute, others, bridge)
        if found is None:
            return None
        key = (parallel.data, parallel.alignment, parallel.microbatch_multiple)
        if key not in planned:
            planned[key] = most_microbatches(planned_microbatches(config, shape, parallel, work))
        optimizer, memory = found
        seconds = training_seconds(
            work,
            shape,
            parallel,
            planned[key],
            dtype=config.model.dtype,
            recompute=recompute,
            optimizer=optimizer,
            rates=rates,
        )
        seconds += pass_seconds(config, work, parallel, planned[key], rates)
        offload = optimizer.offload if isinstance(optimizer, AdamConfig) else None
        return Layout(parallel, recompute, offload, seconds, memory)

    longest = min(int(work.lengths.max()), num_tokens)  # a layout whose alignment lifts it above the cap is no layout
    known = parallel_sizes(config, shape, gpus_per_node)
    sizes = [one for one in known if padded(longest, one.alignment) <= num_tokens]
    without = [fitting(parallel, recompute, BridgeBytes()) for parallel in sizes for recompute in ("none", "full")]
    candidates = sorted((layout for layout in without if layout), key=lambda layout: layout.seconds)
    found: list[Layout] = []
    configured = config.policy.parallel, config.model.recompute
    for layout in candidates:
        if len(found) >= MAX_SHOWN and (layout.parallel, layout.recompute) != configured:
            continue
        whole: Layout | None = layout
        if isinstance(config, GrpoRunConfig):
            plan = planned_transfer(config, shape, layout.parallel.mesh)
            bridge = bridge_communicators(plan, config.cluster.colocate)
            whole = fitting(layout.parallel, layout.recompute, bridge)
        if whole is not None:
            found.append(whole)
    # With the bridge's memory a layout may fit only with `offload`, and is slower then.
    return sorted(found, key=lambda layout: layout.seconds)


def _fitting(
    config: BaseConfig,
    shape: ModelShape,
    parallel: ParallelConfig,
    recompute: str,
    others: Others,
    bridge: BridgeBytes,
) -> tuple[OptimizerConfig, GpuMemory] | None:
    """The trainer's memory in a layout, if it fits, with an offloaded optimizer state where it must be."""
    model = config.model.model_copy(update={"recompute": recompute})
    configured = config.policy.optimizer
    optimizers: list[OptimizerConfig] = [configured]
    if isinstance(configured, AdamConfig) and not configured.offload:
        optimizers.append(configured.model_copy(update={"offload": True}))
    for optimizer in optimizers:
        memory = trainer_memory(
            shape,
            model,
            config.policy.model_copy(update={"parallel": parallel, "optimizer": optimizer}),
            config.balance.max_tokens_per_microbatch,
            on_gpus=True,
            push=TrainersPush.of(config, bridge.trainer),
            num_mirrors=count_mirrors(config, parallel),
        )
        if config.cluster.colocate:
            memory = sharing(memory, "trainer")
        of_engine = bridge.engine if config.cluster.colocate else 0.0
        fullest = max(own + other for own, other in zip(memory.totals, others.totals, strict=True)) + of_engine
        in_nodes = node_memory(config, {**others.hosts, "trainer": memory.host})
        if fullest <= trainer_limit(config) and in_nodes.problem is None:
            return optimizer, memory
    return None


def parallel_sizes(config: BaseConfig, shape: ModelShape, gpus_per_node: int) -> Iterator[ParallelConfig]:
    """The configured layout, and all ways to split the model over as many ranks without virtual stages, with tensor
    parallelism inside a node. Experts are split like the other matrices, or not at all."""
    present = config.policy.parallel
    yield present
    world_size = present.mesh.world_size
    for tensor in _divisors(world_size):
        if tensor > gpus_per_node:
            break
        for pipeline in _divisors(world_size // tensor):
            for context in _divisors(world_size // tensor // pipeline):
                data = world_size // tensor // pipeline // context
                sizes: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "context": context, "data": data}
                if shape.num_layers % pipeline:
                    sizes["layers"] = "auto"
                for experts in _expert_sizes(shape, tensor, tensor * context * data):
                    parallel = ParallelConfig(**sizes, **experts, sequence=present.sequence)
                    try:
                        policy = config.policy.model_copy(update={"parallel": parallel})
                        parallel = with_layers(config.model_copy(update={"policy": policy})).policy.parallel
                        FAMILIES[shape.family].check_mesh(shape, parallel.mesh)
                    except ValueError:  # the mesh does not divide the model
                        continue
                    # On GPUs context.py needs Transformer Engine's kernels (preflight/checks.py).
                    if context > 1 and not has_fused_layers(shape, config.model, context):
                        continue
                    if parallel != present:
                        yield parallel


def _expert_sizes(shape: ModelShape, tensor: int, stage_size: int) -> Iterator[dict[str, int]]:
    """The ways to split the experts over the ranks of a stage; a model without experts has one."""
    yield {}
    for expert in _divisors(shape.num_experts)[1:]:
        for split in sorted({1, tensor}):
            if stage_size % (expert * split) == 0:
                yield {"expert": expert, "expert_tensor": split}


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
