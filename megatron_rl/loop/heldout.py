"""The loss of held-out rows of training without engines, and the log-probs of rows under the reference model.

Invariant (tests/unit/loop): a loss is the mean over all trained tokens, or over all rows of preferences, in every
layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from megatron_rl.balance import plan_microbatches
from megatron_rl.config.schema import OfflineRunConfig
from megatron_rl.loop.evaluation import accuracy
from megatron_rl.loop.shares import deal
from megatron_rl.ports import Policy
from megatron_rl.types import Metrics, ModelShape, StepBatch, TrainingRow


def score_rows(config: OfflineRunConfig, shape: ModelShape, policy: Policy, batch: StepBatch) -> np.ndarray:
    """float64 [S]: the log-prob of all actions of each sample together under the present weights, in nats; of a reward
    model its score."""
    active = np.ones(len(batch.names), bool)
    parallel = config.policy.parallel
    plan = plan_microbatches(batch, active, shape, parallel, config.balance, recompute=config.model.recompute)
    logp_of = policy.score(deal(batch, plan, parallel.data))
    return np.array([logp_of[i] for i in range(len(batch.names))], np.float64)


def evaluate_rows(
    config: OfflineRunConfig, shape: ModelShape, policy: Policy, rows: Sequence[TrainingRow], step: int
) -> Metrics:
    """`eval/loss` of held-out rows. For supervised rows it is the mean loss of a trained token, in nats, and
    `eval/tokens` is the number of these tokens; for preferences it is the mean loss of a row, and there is
    `eval/accuracy`, too. No gradient is computed.

    Args:
        step: the number of steps that are done.
    """
    batch = StepBatch.of_rows(rows, version=step)
    logp = score_rows(config, shape, policy, batch)
    if config.preferences:
        from megatron_rl.algorithms.preference_objective import judge_rows  # torch takes a second

        losses, is_right = judge_rows(config.preferences, rows, logp)
        right = is_right.astype(float).tolist()
        return {"eval/loss": float(losses.mean()), **accuracy("eval/accuracy", fmean(right), right, len(right))}
    num_tokens = float(batch.num_actions.sum())
    return {"eval/loss": -float(logp.sum()) / num_tokens, "eval/tokens": num_tokens}
