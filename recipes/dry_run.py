"""What a run will be, in numbers, before anything starts: sizes, memory, micro-batches, the bridge's plan.

Stdlib and numpy only: it answers in a second, on a laptop, for a model that is not there.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.balance import plan_microbatches
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig, SftRunConfig
from megatron_rl.config.shipped import find_shipped
from megatron_rl.layout import FAMILIES, Engines, megatron_shards, plan_weights, read_shape, volume
from megatron_rl.types import Batch, Group, ModelShape, Prompt, Sample

BYTES = {"float32": 4, "bfloat16": 2}


def planned_shape(config: BaseConfig) -> ModelShape:
    """The model's sizes; where its folder is not at hand, those in configs/model/<folder's name>.json."""
    stand_in = find_shipped(Path("configs", "model", f"{config.model.path.name}.json"))
    if not config.model.path.exists() and stand_in.is_file():
        return read_shape(stand_in)
    return read_shape(config.model.path)


def describe_policy(config: BaseConfig, console: Console) -> ModelShape:
    """Print the trainer's side; returns the shape."""
    shape = planned_shape(config)
    mesh, cap = config.policy.parallel.mesh, config.balance.max_tokens_per_microbatch
    total = sum(prod(extent) for extent in FAMILIES[shape.family].hf_tensors(shape).values())
    stages = range(0, mesh.world_size, mesh.tensor * mesh.data)
    largest = max(sum(volume(s.local_box) for s in megatron_shards(shape, mesh, rank)) for rank in stages)
    width = BYTES[config.model.dtype]
    master = 4 if width == 2 else 0
    state = largest * (8 + master) / mesh.data

    table = Table(
        title=f"{config.run.name}: {shape.family}, {total:,} parameters", show_header=False, title_justify="left"
    )
    table.add_row(
        "trainer",
        f"TP{mesh.tensor} x PP{mesh.pipeline} x DP{mesh.data} = {mesh.world_size} ranks, {config.model.dtype}",
    )
    table.add_row("parameters of the largest rank", f"{largest:,}")
    table.add_row("  weights", gigabytes(largest * width))
    table.add_row("  gradients (fp32)", gigabytes(largest * 4))
    table.add_row("  optimizer state, split over DP", gigabytes(state))
    table.add_row(
        "tokens of a micro-batch",
        f"at most {cap:,}, sequences padded to multiples of {config.policy.parallel.alignment}",
    )
    if isinstance(config, SftRunConfig):
        table.add_row("rows of a step", f"{config.sft.rows_per_step}, of at most {config.sft.max_tokens} tokens")
    console.print(table)
    return shape


def describe_rollout(config: GrpoRunConfig, shape: ModelShape, console: Console) -> None:
    """Print the step's arithmetic and the bridge's plan."""
    rollout, parallel = config.rollout, config.policy.parallel
    num_samples = rollout.prompts_per_step * rollout.samples_per_prompt
    longest = rollout.max_model_tokens
    sample = Sample(longest, rollout.max_prompt_tokens, rollout.max_response_tokens, 0, "length")
    groups = [
        Group(Prompt(str(i), (), ""), [sample] * rollout.samples_per_prompt, None, 0)
        for i in range(rollout.prompts_per_step)
    ]
    plan = plan_microbatches(
        Batch.from_groups(groups, version=0),
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
    whole = width * sum(prod(e) for e in FAMILIES[shape.family].hf_tensors(shape).values())

    table = Table(title="a step", show_header=False, title_justify="left")
    layout = f"TP{rollout.tensor}" + (", expert-parallel" if rollout.expert_parallel else "")
    table.add_row("engines", f"{rollout.num_engines} x {layout}")
    table.add_row("samples", f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} = {num_samples:,}")
    table.add_row("tokens", f"at most {num_samples} x {longest:,} = {num_samples * longest:,}")
    table.add_row("optimizer steps", f"{len(counts)}, of at most {max(counts)} micro-batches a rank")
    table.add_row("bridge", f"{transfer.num_routes} routes, plan {transfer.digest}")
    table.add_row(
        "  bytes into the fullest engine rank",
        f"{gigabytes(received.max())} ({received.max() / whole:.2f} of the model)",
    )
    table.add_row("  bytes out of the busiest trainer rank", gigabytes(sent.max()))
    console.print(table)


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"
