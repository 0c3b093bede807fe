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
from megatron_rl.loop.passages import describe_passages
from megatron_rl.loop.rollouts import scores_of
from megatron_rl.loop.shares import deal
from megatron_rl.loop.source import Rollouts
from megatron_rl.ports import Policy
from megatron_rl.types import Batch, Credit, ModelShape


def with_utilities(config: GrpoRunConfig, shape: ModelShape, policy: Policy, rollouts: Rollouts, step: int) -> Rollouts:
    """The rollouts of a step, whose passages have the rewards that the policy's log-probs give them."""
    values, groups = config.rollout.prefix_values, rollouts.groups
    assert values is not None
    batch = Batch.of_groups([replace(group, samples=[*group.samples, *group.probes]) for group in groups], step)
    is_probe = np.concatenate([np.repeat([False, True], [len(g.samples), len(g.probes)]) for g in groups])
    if not is_probe.any():
        return rollouts
    parallel, recompute = config.policy.parallel, config.model.recompute
    plan = plan_microbatches(batch, is_probe, shape, parallel, config.balance, 1, recompute=recompute)
    nothing = np.zeros(len(is_probe))
    logp_of = policy.score(deal(batch, plan, Credit(nothing, is_probe), nothing, parallel.data))
    probes = iter(np.flatnonzero(is_probe).tolist())
    for group in groups:
        settle_probes(group, [logp_of[next(probes)] for _ in group.probes], values)
    scores = scores_of(config, groups, rollouts.scores.greedy_rewards)
    return Rollouts(groups, scores, {**rollouts.metrics, **describe_passages(groups)})
