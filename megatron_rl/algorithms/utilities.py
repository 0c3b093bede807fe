"""What the passages of a thought are worth, from the values of its beginnings (`rollout.prefix_values`).

Invariants: a value is never below the floor; the utilities of a thought, not clipped, add up to its last value minus
the first; samples that went on from a passage leave their group, and nothing is trained on them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from megatron_rl.config.prefix_values import PrefixValues
from megatron_rl.types import FROM_PROMPT, UTILITY, Branch, Group, Sample, TokenReward


def prefix_value(logps: Sequence[float], lengths: Sequence[int], cfg: PrefixValues) -> float:
    """The value of a beginning of a thought.

    Args:
        logps: the log-prob of each right answer after it, in nats.
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


def settle(groups: Iterable[Group], cfg: PrefixValues | None) -> None:
    """`settle_branches` of verified groups, if the passages have Monte Carlo values."""
    if cfg is not None and cfg.rollouts is not None:
        for group in groups:
            settle_branches(group, cfg)


def settle_branches(group: Group, cfg: PrefixValues) -> None:
    """Give the passages of verified answers their utilities, and remove the samples that went on from them.

    V_0 is the mean reward of the group's answers, and the value after a passage the mean reward of the samples that
    went on from it (VinePPO, arXiv:2410.01679). Samples on which all rewards abstained do not count. A
    passage of which all samples were left without a reward has the value of the one before it.

    Example: answers with the rewards 1 and 0, and after the only passage of the first one samples with the rewards 1, 1
    and 0: the utility of this passage is 2/3 - 1/2.
    """
    rewards: defaultdict[Branch, list[float]] = defaultdict(list)
    answers: list[Sample] = []
    own: list[float] = []
    for sample in group.samples:
        assert sample.verdict is not None, "the group has been verified"
        reward = sample.verdict.reward
        if sample.branch is None:
            answers.append(sample)
        if reward is not None:
            (own if sample.branch is None else rewards[sample.branch]).append(reward)
    values = {branch: fmean(given) for branch, given in rewards.items()}
    if own:
        values[FROM_PROMPT] = fmean(own)
    group.samples = [_settled(i, sample, values, cfg) for i, sample in enumerate(answers)]


def settle_probes(group: Group, logps: Sequence[float], cfg: PrefixValues) -> None:
    """Give the passages of answers their utilities, from the log-probs of the right answers after them.

    Args:
        logps: the log-prob of each of `group.probes`, in nats.
    """
    found: defaultdict[Branch, list[tuple[float, int]]] = defaultdict(list)
    for probe, logp in zip(group.probes, logps, strict=True):
        assert probe.branch is not None, "a probe has a branch"
        found[probe.branch].append((logp, probe.num_actions))
    values = {
        branch: prefix_value([logp for logp, _ in given], [length for _, length in given], cfg)
        for branch, given in found.items()
    }
    group.samples = [_settled(i, sample, values, cfg) for i, sample in enumerate(group.samples)]


def _settled(number: int, sample: Sample, value_of: Mapping[Branch, float], cfg: PrefixValues) -> Sample:
    """An answer whose passages have their utilities.

    Args:
        value_of: the values of the group's beginnings. One that is missing is that of the passage before it.
    """
    places = [given.position for given in sample.token_rewards if given.kind == UTILITY]
    others = [given for given in sample.token_rewards if given.kind != UTILITY]
    if FROM_PROMPT not in value_of:  # the group's value is not known, and nothing is trained on it
        return replace(sample, token_rewards=tuple(others))
    values = [value_of[FROM_PROMPT]]
    for passage in range(len(places)):
        values.append(value_of.get(Branch(number, passage), values[-1]))
    lengths = [end - start for start, end in pairwise([sample.num_prompt_tokens - 1, *places])]
    given = [TokenReward(place, UTILITY, u) for place, u in zip(places, utilities(values, lengths, cfg), strict=True)]
    return replace(sample, token_rewards=tuple(sorted((*others, *given))))
