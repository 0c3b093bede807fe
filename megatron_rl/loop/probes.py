"""The values of prefixes by the trainer (`rollout.prefix_values.by`).

The right answers that the engine has put after each passage are a batch of their own, planned and packed like a step's.
Invariant (tests/unit/loop): each passage gets the log-probs of its own right answers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_rl.algorithms.utilities import settle_probes
from megatron_rl.balance import plan_microbatches
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.loop.rollouts import describe_passages
from megatron_rl.loop.shares import deal
from megatron_rl.ports import Policy
from megatron_rl.types import Group, ModelShape, Rollouts, StepBatch


def with_utilities(config: GrpoRunConfig, shape: ModelShape, policy: Policy, rollouts: Rollouts, step: int) -> Rollouts:
    """The rollouts of a step, whose passages have the rewards that the policy's log-probs give them."""
    values, parallel = config.rollout.prefix_values, config.policy.parallel
    assert values is not None
    probes = [group.continuations for group in rollouts.groups if group.continuations is not None]
    if not probes:
        return rollouts
    batch = StepBatch.of_groups(probes, step)
    active = np.ones(len(batch.lengths), bool)
    plan = plan_microbatches(batch, active, shape, parallel, config.balance, recompute=config.model.recompute)
    logp_of = policy.score(deal(batch, plan, parallel.data))
    logps = iter([logp_of[i] for i in range(len(active))])

    def settled(group: Group) -> Group:
        if group.continuations is None:
            return group
        return settle_probes(group, [next(logps) for _ in group.continuations.rollouts], values)

    groups = [settled(group) for group in rollouts.groups]
    return replace(rollouts, groups=groups, metrics={**rollouts.metrics, **describe_passages(groups)})
