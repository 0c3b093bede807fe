"""What the passages of a thought are worth, from the values of its beginnings (`rollout.prefix_values`).

Invariants: the utilities of a thought, not clipped, add up to its last value minus the first; samples that went on from
a passage leave their group, and nothing is trained on them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from megatron_rl.config.prefix_values import PrefixValues
from megatron_rl.types import UTILITY, Branch, Group, Sample, TokenReward


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
    group.samples = [_settled(i, sample, own, rewards, cfg) for i, sample in enumerate(answers)]


def _settled(
    number: int, sample: Sample, own: Sequence[float], rewards: dict[Branch, list[float]], cfg: PrefixValues
) -> Sample:
    places = [given.position for given in sample.token_rewards if given.kind == UTILITY]
    others = [given for given in sample.token_rewards if given.kind != UTILITY]
    if not own:  # the group's value is not known, and nothing is trained on it
        return replace(sample, token_rewards=tuple(others))
    values = [fmean(own)]
    for passage in range(len(places)):
        found = rewards.get(Branch(number, passage))
        values.append(fmean(found) if found else values[-1])
    lengths = [end - start for start, end in pairwise([sample.num_prompt_tokens - 1, *places])]
    given = [TokenReward(place, UTILITY, u) for place, u in zip(places, utilities(values, lengths, cfg), strict=True)]
    return replace(sample, token_rewards=tuple(sorted((*others, *given))))
