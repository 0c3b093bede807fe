"""What the passages of a thought are worth, from the values of its beginnings (`rollout.prefix_values`).

Invariants: a value is never below the floor; the utilities of a thought, not clipped, add up to its last value minus
the first; nothing is trained on the answers that went on from a passage.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from megatron_rl.config.prefix_values import PrefixValues
from megatron_rl.types import FROM_PROMPT, UTILITY, Branch, Group, Rollout, TokenReward


def prefix_value(logps: Sequence[float], lengths: Sequence[int], cfg: PrefixValues) -> float:
    """The value of a thought's prefix: how probable the right answers are after it.

    Args:
        logps: the log-prob of each right answer after the prefix, in nats.
        lengths: the number of tokens of each.

    Example: the log-probs -2 of one token and -2 of two give -1, and with the scale `probability` exp(-2) = 0.135.
    """
    if cfg.scale == "probability":
        return math.exp(together(logps, cfg.several))
    means = [logp / length for logp, length in zip(logps, lengths, strict=True)]
    return max(together(means, cfg.several), cfg.floor)


def together(logps: Sequence[float], several: str) -> float:
    """The log-prob of several right answers.

    Example: -1 and -2 give -1 with `max`, and -0.687 with `logsumexp`.
    """
    largest = max(logps)
    if several == "max" or largest == -math.inf:
        return largest
    return largest + math.log(math.fsum(math.exp(logp - largest) for logp in logps))


def utilities(values: Sequence[float], lengths: Sequence[int], cfg: PrefixValues) -> list[float]:
    """The reward of each passage.

    Args:
        values: V_0 to V_n.
        lengths: the number of tokens of each of the n passages.

    Example: the values -3, -1, -1.5 give the rewards 2 and -0.5; with positive_only 2 and 0.
    """
    rewards = []
    for (before, after), length in zip(pairwise(values), lengths, strict=True):
        change = after - before
        reward = max(change, 0.0) if cfg.positive_only else change
        if cfg.clip is not None:
            reward = min(max(reward, -cfg.clip), cfg.clip)
        if abs(change) < cfg.idle_below:
            reward -= cfg.idle_cost * length / cfg.max_tokens
        rewards.append(reward)
    return rewards


def settle_branches(group: Group, cfg: PrefixValues) -> Group:
    """A judged group whose passages have their utilities, without the answers that went on from them.

    V_0 is the mean reward of the group's answers, and the value after a passage the mean reward of the answers that
    went on from it (VinePPO, arXiv:2410.01679). Answers on which all rewards abstained do not count. A passage after
    which no answer has a reward has the value of the one before it.

    Example: answers with the rewards 1 and 0, and after the only passage of the first one answers with the rewards 1, 1
    and 0: the utility of this passage is 2/3 - 1/2.
    """
    rewards: defaultdict[Branch, list[float]] = defaultdict(list)
    others = group.continuations.rollouts if group.continuations is not None else ()
    for rollout in (*group.rollouts, *others):
        if rollout.verdict.reward is not None:
            rewards[rollout.branch or FROM_PROMPT].append(rollout.verdict.reward)
    return _with_utilities(group, {branch: fmean(given) for branch, given in rewards.items()}, cfg)


def settle_probes(group: Group, logps: Sequence[float], cfg: PrefixValues) -> Group:
    """A group whose passages have their utilities, from the log-probs of the right answers after them.

    Args:
        logps: the log-prob of each rollout of `group.continuations`, in nats.
    """
    assert group.continuations is not None, "the right answers are there"
    found: defaultdict[Branch, list[tuple[float, int]]] = defaultdict(list)
    for probe, logp in zip(group.continuations.rollouts, logps, strict=True):
        assert probe.branch is not None, "a right answer comes after a passage"
        found[probe.branch].append((logp, probe.num_actions))
    values = {
        branch: prefix_value([logp for logp, _ in given], [length for _, length in given], cfg)
        for branch, given in found.items()
    }
    return _with_utilities(group, values, cfg)


def _with_utilities(group: Group, value_of: Mapping[Branch, float], cfg: PrefixValues) -> Group:
    rollouts = [_settled(i, rollout, value_of, cfg) for i, rollout in enumerate(group.rollouts)]
    return replace(group, rollouts=rollouts, continuations=None)


def _settled(number: int, rollout: Rollout, value_of: Mapping[Branch, float], cfg: PrefixValues) -> Rollout:
    """An answer whose passages have their utilities.

    Args:
        value_of: the values of the group's beginnings. For a missing one the value of the passage before it is used.
    """
    places = [given.position for given in rollout.token_rewards if given.kind == UTILITY]
    others = [given for given in rollout.token_rewards if given.kind != UTILITY]
    if FROM_PROMPT not in value_of:  # the group's value is not known, and nothing is trained on it
        return replace(rollout, token_rewards=tuple(others))
    values = [value_of[FROM_PROMPT]]
    for passage in range(len(places)):
        values.append(value_of.get(Branch(number, passage), values[-1]))
    lengths = [end - start for start, end in pairwise([rollout.num_prompt_tokens - 1, *places])]
    given = [TokenReward(place, UTILITY, u) for place, u in zip(places, utilities(values, lengths, cfg), strict=True)]
    return replace(rollout, token_rewards=tuple(sorted((*others, *given))))
