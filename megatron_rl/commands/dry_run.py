"""The numbers of a run before anything starts: sizes, memory, micro-batches, the bridge's transfer plan, and the nodes.

It needs neither torch nor a GPU nor the model's weights, and it takes a second on a laptop. Invariant
(tests/unit/commands): a run that does not fit into its GPUs is refused with the phase, the bytes, and what to change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from megatron_rl.cluster.demands import demands_of
from megatron_rl.cluster.placement import Placement, smallest_cluster
from megatron_rl.config.machine import num_cores, threads_of_ranks
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig, OfflineRunConfig, SftRunConfig
from megatron_rl.config.teachers import TeacherConfig, teacher_on_ranks
from megatron_rl.models import FAMILIES
from megatron_rl.planning.activations import has_fused_layers, kernels_of, trains_fused
from megatron_rl.planning.engine import step_tokens
from megatron_rl.planning.estimates import largest_work, most_microbatches, planned_microbatches
from megatron_rl.planning.gpu import PHASES
from megatron_rl.planning.memory import RunMemory, run_memory
from megatron_rl.planning.parameters import BYTES, count_parameters, expert_data_ways, gigabytes, largest_stage
from megatron_rl.planning.rates import Rates
from megatron_rl.planning.shapes import planned_critic_shape, planned_shape, planned_teacher_shape
from megatron_rl.planning.step import StepSeconds, expected_tokens, push_seconds, step_seconds
from megatron_rl.planning.teachers import teacher_gpus
from megatron_rl.planning.transfer import planned_transfer
from megatron_rl.types import ModelShape

COLUMNS = {"trainer": "trainer ranks", "critic": "critic ranks", "engine": "engines", "verifier": "verifier"}
COLUMNS["reward_model"] = "reward models"
"""The title of each role's column in the table of nodes."""


def describe_policy(config: BaseConfig, console: Console) -> ModelShape:
    """Print the numbers of the trainer, and return the model's sizes."""
    shape = planned_shape(config)
    mesh, cap = config.policy.parallel.mesh, config.balance.max_tokens_per_microbatch
    dtype = config.model.dtype
    optimizer = config.policy.optimizer
    largest = largest_stage(shape, mesh, dtype, optimizer, trains_fused(config, shape, mesh.context))
    split = "dense over DP, experts over expert-DP" if largest.expert else "split over DP"
    split += ", in the node's memory" if optimizer.is_offloaded else ""
    context = f"CP{mesh.context} x " if mesh.context > 1 else ""
    trainer = f"TP{mesh.tensor} x {context}PP{mesh.pipeline} x DP{mesh.data} = {mesh.world_size} ranks, {dtype}"
    if mesh.expert > 1 or mesh.expert_tensor is not None:
        trainer += f"; experts: EP{mesh.expert} x ETP{mesh.expert_ways} x expert-DP{expert_data_ways(mesh)}"

    count = count_parameters(shape)
    title = f"{config.run.name}: {shape.family}, {sum(count):,} parameters"
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_row("trainer", trainer)
    if shape.adapters:
        table.add_row("trained, in adapters", f"{count.trained:,}, of rank {shape.adapters.rank}")
        table.add_row("frozen", f"{count.frozen:,}")
    if shape.vision is not None:
        tower = shape.vision.num_parameters
        how = "trained, counted below" if shape.tower else f"frozen, another {gigabytes(tower * BYTES[dtype])}"
        table.add_row("vision tower", f"{tower:,} parameters on each rank of the first stage, {how}")
    if not config.cluster.gpus_per_trainer:
        table.add_row("threads of each rank", _threads(config))
    frozen = f", {largest.frozen:,} of them frozen" if largest.frozen else ""
    frozen += f" ({largest.fp8:,} in fp8)" if largest.fp8 else ""
    table.add_row("parameters of the largest rank", f"{largest.total:,}{frozen}")
    table.add_row("  weights", gigabytes(largest.weight_bytes(dtype)))
    table.add_row(f"  gradients, {optimizer.gradients}", gigabytes(largest.gradient_bytes(optimizer)))
    table.add_row(f"  optimizer state, {split}", gigabytes(largest.state_bytes(mesh, dtype, optimizer)))
    table.add_row(
        "tokens of a micro-batch",
        f"at most {cap:,}, sequences padded to multiples of {config.policy.parallel.alignment}",
    )
    if isinstance(config, GrpoRunConfig) and config.critic is not None:
        _describe_critic(config, table)
    if isinstance(config, OfflineRunConfig):
        offline = config.offline
        table.add_row("rows of a step", f"{offline.rows_per_step}, of at most {offline.max_tokens} tokens")
        if loss := config.preferences:
            reference = "with the model at the start as reference" if loss.has_reference else "no reference model"
            table.add_row("loss", f"{loss.kind}, {reference}")
    if isinstance(config, SftRunConfig):
        turns = {"all": "all turns of the assistant", "last": "the last turn", "whole": "all turns, prompts too"}
        table.add_row("trained in chats", f"{turns[config.sft.turns]}, with the stop token (sft.turns)")
    console.print(table)
    if not config.cluster.gpus_per_trainer and config.cluster.device == "auto":
        told = "this plan gives trainers no GPU; cluster.device=gpu plans for GPUs"
        console.print(told, style="yellow", soft_wrap=True)
    return shape


def _describe_critic(config: GrpoRunConfig, table: Table) -> None:
    """Add the critic's numbers to the table of the trainer's."""
    critic = config.critic
    assert critic is not None, "the configuration has a critic"
    model = critic.model or config.model
    mesh = critic.parallel.mesh
    shape = planned_critic_shape(config)
    fused = config.cluster.gpus_per_trainer > 0 and has_fused_layers(shape, model, mesh.context)
    held = largest_stage(shape, mesh, model.dtype, critic.optimizer, fused)
    context = f"CP{mesh.context} x " if mesh.context > 1 else ""
    layout = f"TP{mesh.tensor} x {context}PP{mesh.pipeline} x DP{mesh.data} = {mesh.world_size} ranks, {model.dtype}"
    table.add_row("critic", f"{shape.family}, {layout}")
    if held.frozen:
        count = count_parameters(shape)
        table.add_row("  trained, frozen", f"{count.trained:,}, {count.frozen:,}")
    needed = held.bytes(mesh, model.dtype, critic.optimizer)
    table.add_row("  weights, gradients and optimizer state of its largest rank", gigabytes(needed))


def describe_rollout(config: GrpoRunConfig, shape: ModelShape, console: Console) -> None:
    """Print the numbers of a step, and the bridge's transfer plan."""
    rollout, parallel = config.rollout, config.policy.parallel
    FAMILIES[shape.family].check_engine(
        shape, rollout.parallel.tensor, rollout.parallel.expert_parallel, rollout.parallel.pipeline
    )
    num_samples = rollout.prompts_per_step * rollout.samples_per_group
    longest = rollout.max_model_tokens
    plan = planned_microbatches(config, shape, parallel, largest_work(config))
    transfer = planned_transfer(config, shape, parallel.mesh)
    received, sent = transfer.engine_bytes, transfer.sent_bytes
    share = received.max() / (BYTES[config.model.dtype] * FAMILIES[shape.family].num_parameters(shape.base.served))
    of_model = f"{share:.2%}" if config.pushed(shape).adapters else f"{share:.2f}"

    table = Table(title="a step", show_header=False, title_justify="left")
    stages = f" x PP{rollout.parallel.pipeline}" if rollout.parallel.pipeline > 1 else ""
    layout = f"TP{rollout.parallel.tensor}{stages}" + (", expert-parallel" if rollout.parallel.expert_parallel else "")
    table.add_row("engines", f"{rollout.num_engines} x {layout}")
    if rollout.vllm:
        table.add_row("  vLLM's arguments", json.dumps(rollout.vllm))
    beams = f" reasoning traces x {rollout.beams.width} beams" if rollout.beams else ""
    each = f"{rollout.samples_per_prompt}{beams}"
    for number, teacher in enumerate(config.teachers):
        table.add_row(f"teacher {number}", _described(config, number, teacher))
    table.add_row("samples", f"{rollout.prompts_per_step} prompts x {each} = {num_samples:,}")
    if rollout.max_lag:
        asked = (rollout.max_lag + 1) * num_samples
        table.add_row("answers under way or ready", f"{rollout.max_lag + 1} batches = {asked:,}")
    if config.cluster.gpus_per_engine_rank:
        table.add_row("tokens of an engine's step", f"at most {step_tokens(config):,}")
    table.add_row("tokens", f"at most {num_samples} x {longest:,} = {num_samples * longest:,}")
    num_updates = len(plan.minibatches) * config.algorithm.epochs
    steps = f"{num_updates}, of at most {most_microbatches(plan)} micro-batches a rank"
    table.add_row("optimizer steps", steps)
    table.add_row("bridge", f"{transfer.num_routes} routes, plan {transfer.digest}")
    table.add_row(
        "  bytes into the fullest engine rank",
        f"{gigabytes(received.max())} ({of_model} of the model)",
    )
    table.add_row("  bytes out of the busiest trainer rank", gigabytes(sent.max()))
    console.print(table)


def _described(config: GrpoRunConfig, number: int, teacher: TeacherConfig) -> str:
    """What a teacher is and who computes it."""
    if teacher.path is None:
        who = f"the server {teacher.server}" if teacher.server else "the policy's engines"
    else:
        shape = planned_teacher_shape(config, number)
        who = f"{shape.family}, {FAMILIES[shape.family].num_parameters(shape):,} parameters, "
        if teacher_on_ranks(config):
            who += "on the trainer's ranks"
        else:
            parallel = teacher.parallel
            stages = f" x PP{parallel.pipeline}" if parallel.pipeline > 1 else ""
            turns = ", in turn on the trainer's GPUs" if config.cluster.colocate else ""
            who += f"{teacher.num_engines} x TP{parallel.tensor}{stages}{turns}"
    return who if teacher.datasets is None else f"{who}, for {', '.join(teacher.datasets)}"


def _threads(config: BaseConfig) -> str:
    name = "OMP_NUM_THREADS"
    for place, chosen in (("cluster.environment", config.cluster.environment), ("the shell", os.environ)):
        if name in chosen:
            return f"{chosen[name]}, by {name} of {place}"
    cores = num_cores()
    return f"{threads_of_ranks(config, cores)}, of this machine's {cores} cores"


def describe_memory(config: BaseConfig, shape: ModelShape, console: Console) -> RunMemory:
    """Print the memory of the fullest GPU of trainer and engines by phase."""
    memory = run_memory(config, shape)
    size = f", of {memory.gpu_bytes / 1e9:.0f} GB each" if memory.on_gpus else ""
    table = Table(title=f"memory of the fullest ranks{size}, in GB: estimates, not measured", title_justify="left")
    table.add_column("")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    for gpu in memory.gpus:
        table.add_row(gpu.name, *(f"{total / 1e9:.2f}" for total in gpu.totals), style="bold")
        for part, values in gpu.parts.items():
            table.add_row(f"  {part}", *(f"{value / 1e9:.2f}" if value else "" for value in values))
    console.print(table)

    more = Table(show_header=False)
    more.add_row("layers", "Transformer Engine's" if memory.fused else "Megatron's local layers")
    kinds = {"fused": memory.fused, "on_gpus": memory.on_gpus}
    for kind, computed_by in kernels_of(shape, config.model.dtype, **kinds).items():
        more.add_row(kind, computed_by)
    modes = [f"{total / 1e9:.2f} GB with {mode}" for mode, total in memory.training_bytes.items()]
    more.add_row("trainer in training, by model.recompute", ", ".join(modes))
    if isinstance(config, GrpoRunConfig) and memory.engine is not None:
        longest = config.rollout.max_model_tokens
        held = f"{memory.engine.longest:,} sequences of {longest:,} tokens, {memory.engine.half:,} of {longest // 2:,}"
        more.add_row("KV cache of an engine", held)
    console.print(more)
    if memory.on_gpus:
        console.print(_table_of_nodes(memory))
    return memory


def _table_of_nodes(memory: RunMemory) -> Table:
    """What the ranks keep in the memory of their nodes."""
    table = Table(title="in the nodes' memory, in GB", title_justify="left")
    for column in ("", "one rank", "all ranks of a node"):
        table.add_column(column, justify="right" if column else "left")
    for side in memory.nodes.sides:
        title = f"{side.name}, {side.ranks} on a node"
        for row, size in [(title, side.rank_bytes), *((f"  {part}", size) for part, size in side.host.items())]:
            style = "bold" if row == title else ""
            table.add_row(row, f"{size / 1e9:.2f}", f"{side.ranks * size / 1e9:.2f}", style=style)
    return table


def check_memory(memory: RunMemory) -> None:
    """
    Raises:
        ValueError: the run does not fit into the memory of its GPUs or nodes.
    """
    if problems := memory.problems:
        raise ValueError(
            "by the estimates the run does not fit into its GPUs or nodes:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
            + "\n`megatron-rl size-run` with the same arguments prints the trainer's layouts that fit"
        )


def describe_hours(config: GrpoRunConfig, shape: ModelShape, memory: RunMemory, console: Console) -> None:
    """Print the estimated seconds of a step, who waits in it, and the hours of the run's GPUs."""
    rollout, trainers = config.rollout, config.num_trainer_ranks
    engines = 0 if config.cluster.colocate else rollout.num_engines * rollout.engine_ranks
    teachers, scorers = teacher_gpus(config), len(config.scored_by_model) * config.cluster.reward_model_gpus
    steps = {"longest": step_seconds(config, shape, memory.engine)}
    title = ["estimates for H100 GPUs, not measured; longest: every answer has the longest length"]
    if expected := expected_tokens(config):
        steps = {"expected": step_seconds(config, shape, memory.engine, expected), **steps}
        learnt = "" if rollout.expected_tokens else f" (as in {config.run_folder})"
        title.append(f"expected: {expected.mean:,.0f} tokens an answer, 1 of 100 above {expected.tail:,.0f}{learnt}")
    if config.cluster.calibration:
        title.append(f"with the rates of {config.cluster.calibration}")
    if config.critic:
        title.append("the critic's work is not counted")
    if config.teachers:
        shared = ", as a part of generation" if config.cluster.colocate else ""
        title.append(f"every teacher is counted as if it taught all rows{shared}, and servers are not counted")
    if config.scored_by_model:
        title.append("the reward models' work is not counted")
    table = Table(title="; ".join(title), title_justify="left")
    for column in ("", *steps):
        table.add_column(column, justify="right" if column else "left")

    def row(name: str, value: Callable[[StepSeconds], str]) -> None:
        table.add_row(name, *map(value, steps.values()))

    push = push_seconds(config, shape, Rates.of(config))
    row("generation", lambda step: f"{step.generation:,.0f} s")
    if teachers:
        row("teachers' engines, meanwhile", lambda step: f"{step.teaching:,.0f} s")
    row("passes and updates" + ", meanwhile" * bool(rollout.max_lag), lambda step: f"{step.training:,.0f} s")
    row("weight sync: the fullest link alone", lambda _: f"{push.least:,.1f} s")
    row("weight sync: as other systems over NCCL, counted", lambda _: f"{push.most:,.1f} s")
    if any(step.other for step in steps.values()):
        row("data, rewards and the change of turns", lambda step: f"{step.other:,.0f} s")
    row("a step", lambda step: f"{step.total:,.0f} s")
    if engines:
        row(f"  {trainers} trainer GPUs wait", lambda step: _waits(step.trainers_wait, step))
        row(f"  {engines} engine GPUs wait", lambda step: _waits(step.engines_wait, step))
    if teachers:
        row(f"  {teachers} teacher GPUs wait", lambda step: _waits(step.teachers_wait, step))
    if engines or teachers:
        row("  idle GPU-hours", lambda step: f"{step.idle_share(trainers, engines, teachers):.0%}")
    gpus = trainers + engines + teachers + scorers
    row("GPU-hours of a step", lambda step: _hours(step.total * gpus))
    steps_gpus = gpus * config.run.steps
    row(f"GPU-hours of {config.run.steps:,} steps", lambda step: _hours(step.total * steps_gpus))
    console.print(table)


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}" if hours >= 1 else f"{hours:.2g}"


def _waits(seconds: float, step: StepSeconds) -> str:
    return f"{seconds:,.0f} s, {seconds / step.total:.0%}"


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
    for column in ("", *(COLUMNS.get(role, f"{role}s") for role in plan.groups), "GPUs in use"):
        table.add_column(column)
    for node in plan.nodes:
        gpus = sum(rank.gpus for groups in plan.groups.values() for g in groups for rank in g if rank.node == node)
        name = f"{node.name} ({node.pool})" if node.pool else node.name
        table.add_row(name, *(_on_node(plan, role, node.id) for role in plan.groups), f"{gpus:g} of {node.gpus:g}")
    console.print(table)
    _compare_with_job(config, config.cluster.gpus_per_node, console)


def _compare_with_job(config: BaseConfig, gpus_per_node: int, console: Console) -> None:
    """Tell if the job requests more nodes than the plan needs.

    Raises:
        ValueError: it requests fewer.
    """
    if config.slurm is None:
        return
    asked = {"nodes": config.slurm.nodes, "rollout_nodes": config.slurm.rollout_nodes}
    if asked["rollout_nodes"]:  # slurm/train.sbatch sets these pools
        pools = config.cluster.pools | {"trainer": "train", "critic": "train", "engine": "rollout"}
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"pools": pools})})
    plan = smallest_cluster(demands_of(config), gpus_per_node)
    of_rollout = sum(node.pool == "rollout" for node in plan.nodes) if asked["rollout_nodes"] else 0
    needed = {"nodes": len(plan.nodes) - of_rollout, "rollout_nodes": of_rollout}
    for key, number in asked.items():
        if number < needed[key]:
            raise ValueError(f"slurm.{key} is {number}, and the plan needs {needed[key]}; raise it")
        if number != needed[key]:
            told = f"slurm.{key} is {number}, and the plan needs {needed[key]}: the other nodes stay empty"
            console.print(told, style="yellow", soft_wrap=True)


def _on_node(plan: Placement, role: str, node: str) -> str:
    """The ranks of trainer or critic, or the numbers of the engines or verifiers on a node. If only a part of an engine
    is there, also the engine's ranks. For a single verifier whether it is there."""
    groups = [[i for i, rank in enumerate(group) if rank.node.id == node] for group in plan.groups[role]]
    if role in ("trainer", "critic"):
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
