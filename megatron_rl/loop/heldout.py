"""The loss of held-out rows of supervised training.

Invariant (tests/unit/loop): it is the mean over all trained tokens, in every layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rl.balance import plan_microbatches
from megatron_rl.config.schema import SftRunConfig
from megatron_rl.loop.shares import deal
from megatron_rl.ports import Policy
from megatron_rl.types import Metrics, ModelShape, StepBatch, Tokens


def heldout_loss(
    config: SftRunConfig, shape: ModelShape, policy: Policy, rows: Sequence[tuple[str, Tokens]], step: int
) -> Metrics:
    """The mean loss of a trained token, in nats, and the number of these tokens. No gradient is computed.

    Args:
        step: the number of steps that are done.
    """
    batch = StepBatch.of_rows(rows, version=step)
    active = np.ones(len(rows), bool)
    parallel = config.policy.parallel
    plan = plan_microbatches(batch, active, shape, parallel, config.balance, recompute=config.model.recompute)
    logp_of = policy.score(deal(batch, plan, parallel.data))
    num_tokens = float(batch.num_actions.sum())
    return {"eval/loss": -sum(logp_of[i] for i in range(len(rows))) / num_tokens, "eval/tokens": num_tokens}
