"""The supervised training loop, for rows with completions. It uses the same policy and the same micro-batch plans as
reinforcement learning, with another objective."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rl.algorithms import loss_weights
from megatron_rl.balance import plan_microbatches
from megatron_rl.config.schema import SftRunConfig
from megatron_rl.data import ShuffledStream
from megatron_rl.loop.checkpoints import Checkpoints, WholeState, due
from megatron_rl.loop.recovery import run_and_recover
from megatron_rl.loop.stopping import NEVER, Stopping
from megatron_rl.loop.stragglers import Stragglers
from megatron_rl.ports import Policy, Sink
from megatron_rl.types import Batch, Group, ModelShape, Prompt, Sample, Tokens


def train_supervised(
    config: SftRunConfig,
    shape: ModelShape,
    policy: Policy,
    rows: ShuffledStream[Tokens],
    records: tuple[Sink, Checkpoints],
    stopping: Stopping = NEVER,
) -> int:
    """Train up to step config.run.steps, or until `stopping` asks for a stop; returns the number of steps that are
    done. A policy that is lost is started anew and continues with the newest state that is left."""
    sink, checkpoints = records
    parts, stragglers = {"stream": rows}, Stragglers()

    def train_from(step: int) -> None:
        while step < config.run.steps:
            policy.mirror(step)
            with sink.phase("plan"):
                batch = as_batch(rows.next(), step)
                plan = plan_microbatches(
                    batch, shape, config.policy.parallel, config.balance, updates=1, recompute=config.model.recompute
                )
                batch.weights = loss_weights(batch, plan, "token-mean")
            with sink.phase("update"):
                metrics = {**plan.metrics, **policy.begin(batch, plan)}
                updated = policy.update(0, {})
            stragglers.count([updated], sink)
            metrics |= updated
            step += 1
            whole.mark(step)
            sink.log(step - 1, metrics)
            stop = stopping()
            if stop or step == config.run.steps or due(step, config.checkpoint.every):
                with sink.phase("checkpoint"):
                    whole.save()
            if step < config.run.steps and due(step, config.checkpoint.export_every):
                with sink.phase("checkpoint"):
                    policy.export_hf(config.run_folder / "exports" / f"step_{step:06d}")
            if stop:
                return

    step = checkpoints.restore(policy, parts)
    with WholeState(checkpoints, policy, parts) as whole:
        whole.mark(step)
        run_and_recover(train_from, step, policy, whole, sink)
    return whole.step


def as_batch(rows: Sequence[Tokens], step: int) -> Batch:
    """The rows as a batch. Each row is a group of one sample, whose actions are the tokens of its completion."""
    groups = []
    for position, row in enumerate(rows):
        sample = Sample(
            length=len(row.ids),
            num_prompt_tokens=int(np.argmax(row.action_mask)),
            num_actions=int(row.action_mask.sum()),
            num_thought_tokens=0,
            finish="stop",
        )
        groups.append(Group(Prompt(f"row {position} of the step", (), ""), [sample], [row], version=0))
    return Batch.from_groups(groups, version=step)
