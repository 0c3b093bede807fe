"""The training loop for rows with answers, which no engine samples: supervised training, and training on preferences.
It uses the same policy and the same micro-batch plans as reinforcement learning, with another objective."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from megatron_rl.algorithms import loss_weights
from megatron_rl.balance import plan_microbatches
from megatron_rl.config.schema import OfflineRunConfig
from megatron_rl.data import ShuffledStream
from megatron_rl.loop.checkpoints import Checkpoints, WholeState, due
from megatron_rl.loop.health.rules import Health
from megatron_rl.loop.health.stragglers import Stragglers
from megatron_rl.loop.heldout import evaluate_rows
from megatron_rl.loop.performance import performance
from megatron_rl.loop.recovery import run_and_recover
from megatron_rl.loop.shares import deal
from megatron_rl.loop.stopping import NEVER, Stopping
from megatron_rl.ports import Policy, Sink
from megatron_rl.types import Credit, Metrics, ModelShape, Shares, StepBatch, TrainingRow


def train_supervised(
    config: OfflineRunConfig,
    shape: ModelShape,
    policy: Policy,
    rows: ShuffledStream[TrainingRow],
    heldout: Sequence[TrainingRow],
    records: tuple[Sink, Checkpoints],
    stopping: Stopping = NEVER,
) -> int:
    """Train up to step config.run.steps, or until `stopping` asks for a stop; returns the number of steps that are
    done. The loss of the held-out rows, if there are any, is in the record of the step before which it is computed, and
    the last one in a record of its own. A lost policy is restarted and continues with the newest state that is left."""
    sink, checkpoints = records
    parts, stragglers, health = {"stream": rows}, Stragglers(), Health(sink, config)

    def evaluated(step: int) -> Metrics:
        with sink.phase("evaluate"):
            losses = evaluate_rows(config, shape, policy, heldout, step)
        checkpoints.judge(step, losses)
        return losses

    def train_from(step: int) -> None:
        while step < config.run.steps:
            policy.mirror(step)
            losses = evaluated(step) if heldout and (step == 0 or due(step, config.offline.eval_every)) else {}
            with sink.phase("plan"):
                taken = rows.next()
                batch = StepBatch.of_rows(taken, version=step)
                plan = plan_microbatches(
                    batch,
                    np.ones(len(batch.names), bool),
                    shape,
                    config.policy.parallel,
                    config.balance,
                    recompute=config.model.recompute,
                )
                weights = loss_weights(batch, plan, "token-mean")
                labels = Credit(batch.rewards, np.ones(len(batch.names), bool))
                of_reference = np.array([logp for row in taken for logp in row.logp_reference], np.float64)
                references = of_reference if len(of_reference) else None
                shares = deal(batch, plan, policy.mesh.data, weights, labels, logp_reference=references)
            start = time.perf_counter()
            with sink.phase("update"):
                metrics = {**losses, **plan.metrics, **policy.begin(Shares([shares]), {})}
                [updated], _ = policy.update({})
            metrics |= performance(config, metrics, time.perf_counter() - start)
            stragglers.count([updated], sink)
            metrics |= updated
            step += 1
            whole.mark(step)
            health.look(step - 1, sink.log(step - 1, metrics))
            stop = stopping()
            whole.save_if_due(sink, is_last=step == config.run.steps, stops=stop)
            if stop:
                return
        if heldout:
            sink.log(step, evaluated(step))

    step = checkpoints.restore(policy, parts)
    with WholeState(checkpoints, policy, parts) as whole:
        whole.mark(step)
        run_and_recover(train_from, step, policy, whole, sink)
    return whole.step
