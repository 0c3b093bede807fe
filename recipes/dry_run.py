"""The numbers of a run before anything starts: sizes, memory, micro-batches, the bridge's transfer plan, and the nodes.

It needs neither torch nor a GPU nor the model's weights, and it takes a second on a laptop. Invariant
(tests/unit/recipes): the parameters of all ranks add up to the whole model, counted once for each replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_rl.balance import plan_microbatches
from megatron_rl.cluster.placement import Placement, demands_of, smallest_cluster
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig, SftRunConfig
from megatron_rl.config.shipped import find_shipped
from megatron_rl.layout import FAMILIES, Engines, plan_weights, read_shape, volume
from megatron_rl.recipes.estimates import (
    DECODING_SHARE,
    TRAINING_SHARE,
    StageMemory,
    generation_seconds,
    training_seconds,
    update_memory,
)
from megatron_rl.types import Batch, Mesh, ModelShape

BYTES = {"float32": 4, "bfloat16": 2}
COLUMNS = {"trainer": "trainer ranks", "engine": "engines", "verifier": "verifier"}
"""The title of each role's column in the table of nodes."""


@dataclass(frozen=True, slots=True)
class RankParameters:
    """The numbers of parameters that one trainer rank holds, without the padding of the vocabulary."""

    dense: int
    """The parameters outside the routed experts: attention, norms, router, shared experts, embedding and output."""
    expert: int
    """The parameters of the rank's routed experts."""

    @property
    def total(self) -> int:
        return self.dense + self.expert

    def state_bytes(self, mesh: Mesh, dtype: str) -> float:
        """The bytes of the optimizer's state on this rank: two fp32 moments, and an fp32 copy of bf16 weights."""
        dense_ways, expert_ways = optimizer_ways(mesh)
        return (self.dense / dense_ways + self.expert / expert_ways) * (8 if dtype == "float32" else 12)


def rank_parameters(shape: ModelShape, mesh: Mesh, rank: int) -> RankParameters:
    """The parameters of a rank, counted from the rows of the family's table."""
    counts = {False: 0, True: 0}
    for placement, _, _ in FAMILIES[shape.family].megatron_placed(shape, mesh, rank):
        elements = sum(volume(local_box) for _, _, local_box in placement.pieces)
        of_experts = placement.experts is not None
        counts[of_experts] += elements * (len(placement.experts) if of_experts else 1)
    return RankParameters(dense=counts[False], expert=counts[True])


def optimizer_ways(mesh: Mesh) -> tuple[int, int]:
    """The number of ranks over which Megatron's distributed optimizer splits the state of a parameter, as (dense,
    expert).

    These are the ranks that hold the same parameter: the data x context ranks for a dense parameter, and the
    expert-data-parallel ranks for a parameter of an expert. Without data and context parallelism the actor uses the
    plain optimizer, which splits nothing.
    """
    dense = mesh.data * mesh.context
    return (dense, expert_data_ways(mesh)) if dense > 1 else (1, 1)


def expert_data_ways(mesh: Mesh) -> int:
    """Expert data parallelism: the number of ranks of a stage that hold the same part of the same experts."""
    return mesh.stage_size // (mesh.expert * mesh.expert_ways)


def checkpoint_bytes(shape: ModelShape, mesh: Mesh, dtype: str) -> float:
    """The bytes of one checkpoint. Every rank writes its weights, even if it is a replica of another rank, and its part
    of the optimizer's state."""
    stages = [rank_parameters(shape, mesh, stage * mesh.stage_size) for stage in range(mesh.pipeline)]
    ranks = [held.total * BYTES[dtype] + held.state_bytes(mesh, dtype) for held in stages]
    return sum(ranks) * mesh.stage_size


def planned_shape(config: BaseConfig) -> ModelShape:
    """The model's sizes. If its folder does not exist, they come from configs/model/<folder's name>.json."""
    stand_in = find_shipped(Path("configs", "model", f"{config.model.path.name}.json"))
    if not config.model.path.exists() and stand_in.is_file():
        return read_shape(stand_in)
    return read_shape(config.model.path)


def describe_policy(config: BaseConfig, console: Console) -> ModelShape:
    """Print the numbers of the trainer, and return the model's sizes."""
    shape = planned_shape(config)
    mesh, cap = config.policy.parallel.mesh, config.balance.max_tokens_per_microbatch
    dtype = config.model.dtype
    width = BYTES[dtype]
    # All ranks of a stage hold the same number of parameters, so the first one stands for all of them.
    stages = [rank_parameters(shape, mesh, stage * mesh.stage_size) for stage in range(mesh.pipeline)]
    largest = max(stages, key=lambda held: held.total * (width + 4) + held.state_bytes(mesh, dtype))
    split = "dense over DP, experts over expert-DP" if largest.expert else "split over DP"
    context = f"CP{mesh.context} x " if mesh.context > 1 else ""
    trainer = f"TP{mesh.tensor} x {context}PP{mesh.pipeline} x DP{mesh.data} = {mesh.world_size} ranks, {dtype}"
    if shape.experts and (mesh.expert > 1 or mesh.expert_tensor is not None):
        trainer += f"; experts: EP{mesh.expert} x ETP{mesh.expert_ways} x expert-DP{expert_data_ways(mesh)}"

    num_parameters = FAMILIES[shape.family].num_parameters(shape)
    title = f"{config.run.name}: {shape.family}, {num_parameters:,} parameters"
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_row("trainer", trainer)
    table.add_row("parameters of the largest rank", f"{largest.total:,}")
    table.add_row("  weights", gigabytes(largest.total * width))
    table.add_row("  gradients (fp32)", gigabytes(largest.total * 4))
    table.add_row(f"  optimizer state, {split}", gigabytes(largest.state_bytes(mesh, dtype)))
    table.add_row(
        "tokens of a micro-batch",
        f"at most {cap:,}, sequences padded to multiples of {config.policy.parallel.alignment}",
    )
    if isinstance(config, SftRunConfig):
        table.add_row("rows of a step", f"{config.sft.rows_per_step}, of at most {config.sft.max_tokens} tokens")
    console.print(table)
    return shape


def describe_rollout(config: GrpoRunConfig, shape: ModelShape, console: Console) -> None:
    """Print the numbers of a step, and the bridge's transfer plan."""
    rollout, parallel = config.rollout, config.policy.parallel
    num_samples = rollout.prompts_per_step * rollout.samples_per_prompt
    longest = rollout.max_model_tokens
    longest_answers = Batch(
        names=[f"answer {i}" for i in range(num_samples)],
        group_of=np.repeat(np.arange(rollout.prompts_per_step), rollout.samples_per_prompt),
        index_in_group=np.tile(np.arange(rollout.samples_per_prompt), rollout.prompts_per_step),
        lengths=np.full(num_samples, longest),
        num_actions=np.full(num_samples, rollout.max_response_tokens),
        payloads=[None] * rollout.prompts_per_step,
        version=0,
    )
    plan = plan_microbatches(
        longest_answers,
        np.ones(num_samples, bool),
        shape,
        parallel,
        config.balance,
        config.algorithm.updates_per_step,
        recompute=config.model.recompute,
    )
    counts = [len(minibatch[0]) for minibatch in plan.minibatches]
    width = BYTES[config.model.dtype]
    engines = Engines(
        rollout.num_engines,
        rollout.tensor,
        expert_parallel=rollout.expert_parallel,
        num_chains=config.bridge.chains,
    )
    transfer = plan_weights(shape, parallel.mesh, engines, dtype=config.model.dtype)
    received, sent = transfer.engine_bytes, transfer.sent_bytes
    whole = width * FAMILIES[shape.family].num_parameters(shape)

    table = Table(title="a step", show_header=False, title_justify="left")
    layout = f"TP{rollout.tensor}" + (", expert-parallel" if rollout.expert_parallel else "")
    table.add_row("engines", f"{rollout.num_engines} x {layout}")
    table.add_row("samples", f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} = {num_samples:,}")
    if rollout.max_lag:
        asked = (rollout.max_lag + 1) * num_samples
        table.add_row("answers under way or ready", f"{rollout.max_lag + 1} batches = {asked:,}")
    table.add_row("tokens", f"at most {num_samples} x {longest:,} = {num_samples * longest:,}")
    table.add_row("optimizer steps", f"{len(counts)}, of at most {max(counts)} micro-batches a rank")
    table.add_row("bridge", f"{transfer.num_routes} routes, plan {transfer.digest}")
    table.add_row(
        "  bytes into the fullest engine rank",
        f"{gigabytes(received.max())} ({received.max() / whole:.2f} of the model)",
    )
    table.add_row("  bytes out of the busiest trainer rank", gigabytes(sent.max()))
    console.print(table)


def describe_gpu_needs(config: GrpoRunConfig, shape: ModelShape, console: Console) -> None:
    """Print the estimated memory of the fullest trainer rank by phase, and the hours of the run's GPUs."""
    mesh, dtype, cap = config.policy.parallel.mesh, config.model.dtype, config.balance.max_tokens_per_microbatch
    width, full = BYTES[dtype], config.model.recompute == "full"

    def stage_bytes(stage: int) -> tuple[float, StageMemory]:
        held = rank_parameters(shape, mesh, stage * mesh.stage_size)
        fixed = held.total * (width + 4) + held.state_bytes(mesh, dtype)
        return fixed, update_memory(shape, mesh, stage, cap, width=width, full=full)

    stages = [stage_bytes(stage) for stage in range(mesh.pipeline)]
    number = max(range(mesh.pipeline), key=lambda stage: stages[stage][0] + stages[stage][1].total)
    fixed, update = stages[number]
    table = Table(title="estimates for H100 GPUs, not measured", show_header=False, title_justify="left")
    table.add_row("memory of a trainer rank, fullest stage", f"stage {number}")
    table.add_row("  always: weights, gradients, optimizer", gigabytes(fixed))
    table.add_row("  update: kept for the backward passes", gigabytes(update.kept))
    table.add_row("  update: the layer being computed", gigabytes(update.working))
    table.add_row("  push: two buffers", gigabytes(2 * config.bridge.bucket_mib * 2**20))
    table.add_row("  most at once", f"{gigabytes(fixed + update.total)}, and what CUDA and NCCL take")
    rollout = config.rollout
    num_parameters = FAMILIES[shape.family].num_parameters(shape)
    lengths = np.full(rollout.prompts_per_step * rollout.samples_per_prompt, rollout.max_model_tokens)
    training_s = training_seconds(config, shape, lengths)
    generation_s = generation_seconds(config, shape, num_parameters, width)
    num_gpus = mesh.world_size + rollout.num_engines * rollout.tensor
    hours = (training_s + generation_s) * num_gpus / 3600
    table.add_row("a step in which every answer has the longest length", "")
    table.add_row(f"  generation, at {DECODING_SHARE:.0%} of the memory bandwidth", f"{generation_s:,.0f} s")
    table.add_row(f"  passes and update, at {TRAINING_SHARE:.0%} of the peak", f"{training_s:,.0f} s")
    table.add_row("  GPU-hours", f"{hours:,.1f}")
    table.add_row(f"GPU-hours of {config.run.steps:,} such steps, at most", f"{hours * config.run.steps:,.0f}")
    console.print(table)


def describe_placement(config: BaseConfig, console: Console) -> None:
    """Print what runs on which node, on as few nodes of `cluster.gpus_per_node` GPUs as the run needs.

    Raises:
        ValueError: a tensor-parallel group of the trainer is wider than a node.
    """
    if config.cluster.gpus_per_node is None:
        return
    plan = smallest_cluster(demands_of(config), config.cluster.gpus_per_node)
    num_nodes = f"{len(plan.nodes)} node{'s' if len(plan.nodes) > 1 else ''}"
    table = Table(title=f"placement on {num_nodes} of {config.cluster.gpus_per_node} GPUs", title_justify="left")
    for column in ("", *(COLUMNS[role] for role in plan.groups), "GPUs in use"):
        table.add_column(column)
    for node in plan.nodes:
        gpus = sum(rank.gpus for groups in plan.groups.values() for g in groups for rank in g if rank.node == node)
        name = f"{node.name} ({node.pool})" if node.pool else node.name
        table.add_row(name, *(_on_node(plan, role, node.id) for role in plan.groups), f"{gpus:g} of {node.gpus:g}")
    console.print(table)


def _on_node(plan: Placement, role: str, node: str) -> str:
    """The trainer's ranks or the numbers of the engines or verifiers on a node, with the ranks of an engine of which
    only a part is there; for a single verifier whether it is there."""
    groups = [[i for i, rank in enumerate(group) if rank.node.id == node] for group in plan.groups[role]]
    if role == "trainer":
        return _ranges(groups[0])
    if role == "verifier" and len(groups) == 1:
        return "here" if groups[0] else ""
    whole = [i for i, ranks in enumerate(groups) if len(ranks) == len(plan.groups[role][i])]
    parts = [f"{i} (ranks {_ranges(ranks)})" for i, ranks in enumerate(groups) if ranks and i not in whole]
    return ", ".join(([_ranges(whole)] if whole else []) + parts)


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text, such as `0-3, 7`."""
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [n for i, n in enumerate(numbers) if i == len(numbers) - 1 or numbers[i + 1] != n + 1]
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in zip(starts, ends, strict=True))


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"
