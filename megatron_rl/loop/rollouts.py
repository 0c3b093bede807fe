"""The metrics of a step's answers and of their verdicts: lengths, cuts, rewards, abstentions."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

import numpy as np

from megatron_rl.algorithms.equality import all_equal
from megatron_rl.config.reward import datasets_of
from megatron_rl.config.rewards import RewardConfig
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.loop.beams import describe_beams
from megatron_rl.types import UTILITY, Group, Metrics, Verdict
from megatron_rl.types.rollouts import TOOL_ERRORS
from megatron_rl.types.step import numbers

MAX_DATASETS = 16
"""The number of data sets that have metrics of their own in a step."""
DUPLICATE_TOKENS = 64
"""Shorter answers may be equal by chance."""


def describe_verified(config: GrpoRunConfig, groups: Sequence[Group]) -> Metrics:
    """The metrics of a step's answers and of their verdicts."""
    thinks = bool(config.rollout.delimiter)
    metrics = describe(groups, thinks) | describe_rewards(config.rewards, groups) | describe_datasets(groups)
    metrics |= describe_thoughts(groups) | describe_episodes(groups) | describe_duplicates(groups)
    if config.rollout.beams is not None:
        metrics |= describe_beams(groups, config.rollout.beams.width)
    if config.rollout.prefix_values is not None:
        metrics |= describe_passages(groups)
    scores = [verdict.score for verdict in verdicts_of(groups) if verdict.score is not None]
    if config.algorithm.shaping and scores:  # reward/mean is the mean of the shaped rewards
        metrics["score/mean"] = fmean(scores)
    return metrics


def describe_rewards(rewards: Sequence[RewardConfig], groups: Sequence[Group]) -> Metrics:
    """The metrics of each reward, by its name: mean and deviation of its scores, not weighted, the share of the answers
    where it abstained, among the answers to rows that it scores, and, if there are several rewards, the share of the
    differences between the answers to a prompt that it makes."""
    metrics: Metrics = describe_signal(rewards, groups) if len(rewards) > 1 else {}
    for i, reward in enumerate(rewards):
        column = [v.parts[i] for v in verdicts_of([group for group in groups if reward.scores(group.prompt.columns)])]
        scores = [part for part in column if part is not None]
        if column:
            metrics[f"reward/{reward.label}/abstained"] = 1 - len(scores) / len(column)
        if scores:
            metrics[f"reward/{reward.label}/mean"] = fmean(scores)
            metrics[f"reward/{reward.label}/std"] = stdev(scores) if len(scores) > 1 else 0.0
    return metrics


def describe_signal(rewards: Sequence[RewardConfig], groups: Sequence[Group]) -> Metrics:
    """The share of each reward in the standard deviations of weighted scores within groups, added up over the groups.

    Example: two answers get 1 and 0 from the first reward, and .5 and .3 from the second, whose weight is .5: their
    standard deviations are .5 and .05, and the shares 91 % and 9 %.
    """
    spread = np.zeros(len(rewards))
    for group in groups:
        parts = numbers_of([rollout.verdict.parts for rollout in group.answers])
        known = ~np.isnan(parts).any(1)
        if known.any():
            spread += parts[known].std(0) * np.abs([reward.weight for reward in rewards])
    if not spread.sum():
        return {}
    shares = spread / spread.sum()
    return {f"reward/{one.label}/signal": float(share) for one, share in zip(rewards, shares, strict=True)}


def numbers_of(rows: Sequence[Sequence[float | None]]) -> np.ndarray:
    """float64 [N, K]: rows of K numbers, NaN for None."""
    return np.array([[np.nan if value is None else value for value in row] for row in rows], np.float64)


def describe_duplicates(groups: Sequence[Group]) -> Metrics:
    """`length/duplicates`: among the answers of DUPLICATE_TOKENS or more, the share of the ones that an earlier answer
    to the same prompt equals; none if there are no such answers. Short answers, such as `42`, are often equal."""
    long = [[r.digest for r in g.answers if r.num_response_tokens >= DUPLICATE_TOKENS and not r.beam] for g in groups]
    total = sum(map(len, long))
    return {"length/duplicates": 1 - sum(len(set(own)) for own in long) / total} if total else {}


def describe_thoughts(groups: Sequence[Group]) -> Metrics:
    """The metrics of the thinking budget, over the answers that had one; none if no answer had. The mean rewards are
    given separately for answers whose thought the budget ended, and for the others. `thought/over_budget` is the number
    of answers whose thought has more sampled tokens than its budget; it should be 0."""
    samples = [s for group in groups for s in group.answers if s.thought_budget is not None]
    if not samples:
        return {}
    metrics = {
        "thought/budget_mean": fmean(s.thought_budget or 0 for s in samples),
        "thought/over_budget": float(sum(s.num_thought_tokens > (s.thought_budget or 0) for s in samples)),
    }
    for name, cut in (("cut", True), ("whole", False)):
        own = [s.verdict.reward for s in samples if s.thought_cut == cut]
        rewards = [reward for reward in own if reward is not None]
        if rewards:
            metrics[f"thought/{name}_reward_mean"] = fmean(rewards)
    return metrics


def describe_passages(groups: Sequence[Group]) -> Metrics:
    """`passages/mean` is the number of rewarded passages of an answer, `passages/single` the share of answers with at
    most one, which adds no information to the reward of the whole answer. `passages/utility_mean` is the mean reward of
    a passage, and `passages/helpful` the share of passages with a reward above 0."""
    rewards = [[r.value for r in s.token_rewards if r.kind == UTILITY] for group in groups for s in group.rollouts]
    metrics = {
        "passages/mean": fmean(map(len, rewards)),
        "passages/single": fmean(len(own) <= 1 for own in rewards),
    }
    flat = [value for own in rewards for value in own]
    if flat:
        metrics |= {"passages/utility_mean": fmean(flat), "passages/helpful": fmean(value > 0 for value in flat)}
    return metrics


def describe_episodes(groups: Sequence[Group]) -> Metrics:
    """The metrics of answers with several turns; empty if there are none. They are the mean and largest number of the
    model's turns, tool calls and tool errors per answer, also by the kind of the error, abandoned and repeated calls of
    agents, conversations per answer, the share of answers whose environment failed, and the seconds that a turn waited
    for its environment."""
    episodes = [s.episode for group in groups for s in group.answers if s.episode is not None]
    if not episodes:
        return {}
    num_turns = [episode.num_turns for episode in episodes]
    return {
        "environment/turns_mean": fmean(num_turns),
        "environment/turns_max": float(max(num_turns)),
        "environment/tool_calls": fmean(episode.num_tool_calls for episode in episodes),
        "environment/abandoned": float(sum(episode.num_abandoned for episode in episodes)),
        "environment/retried": float(sum(episode.num_retried for episode in episodes)),
        "environment/conversations": sum(len(group.rollouts) for group in groups) / len(episodes),
        "environment/tool_errors": fmean(len(episode.tool_errors) for episode in episodes),
        **{
            f"environment/tool_errors/{kind}": fmean(e.tool_errors.count(kind) for e in episodes)
            for kind in TOOL_ERRORS
        },
        "environment/failed": fmean(bool(episode.fault) for episode in episodes),
        "environment/began_again": float(sum(episode.num_failed for episode in episodes)),
        "environment/step_s": sum(episode.step_s for episode in episodes) / max(sum(num_turns), 1),
    }


def describe_datasets(groups: Sequence[Group]) -> Metrics:
    """The metrics of each data set, by its name in the rows' column `dataset`: the number of groups, the share of
    groups with all scores equal, the mean score, and the mean length of the answers in tokens. A row of several data
    sets counts in each. The metrics of all but the first MAX_DATASETS names of the step have the name `other`."""
    by_name: dict[str, list[Group]] = {}
    for group in groups:
        for name in datasets_of(group.prompt.columns):
            known = name in by_name or len(by_name) < MAX_DATASETS
            by_name.setdefault(name if known else "other", []).append(group)
    metrics: Metrics = {}
    for name, own in by_name.items():
        scores = [[sample.verdict.score for sample in group.answers] for group in own]
        flat = [score for given in scores for score in given if score is not None]
        lengths = [sample.num_response_tokens for group in own for sample in group.answers]
        metrics |= {
            f"dataset/{name}/groups": float(len(own)),
            f"dataset/{name}/zero_signal": sum(all_equal(s for s in given if s is not None) for given in scores)
            / len(own),
            f"dataset/{name}/response_mean": fmean(lengths),
        }
        if flat:
            metrics[f"dataset/{name}/score_mean"] = fmean(flat)
    return metrics


def verdicts_of(groups: Sequence[Group]) -> list[Verdict]:
    """The verdicts of groups, one for each answer."""
    return [rollout.verdict for group in groups for rollout in group.answers]


def rewards_of(groups: Sequence[Group]) -> np.ndarray:
    """float64: the reward of each rollout, NaN where every reward abstained."""
    return numbers(verdict.reward for verdict in verdicts_of(groups))


def describe(groups: Sequence[Group], thinks: bool = True) -> Metrics:
    """The lengths of the answers in tokens, and the shares of answers that a budget cut. `length/answer_mean` counts
    the sampled tokens after the thought; a delimiter that the model sampled is one of them. The beams of a thought are
    separate answers with a common thought. A model that does not think has no metrics of thoughts."""
    samples = [sample for group in groups for sample in group.answers]
    thoughts = [sample for sample in samples if sample.beam == 0]
    responses = np.array([sample.num_response_tokens for sample in samples])
    of_thoughts = {
        "length/thought_mean": float(np.mean([sample.num_thought_tokens for sample in thoughts])),
        "length/thought_cut": float(np.mean([sample.thought_cut for sample in thoughts])),
    }
    return (of_thoughts if thinks else {}) | {
        "length/response_mean": float(responses.mean()),
        "length/response_max": float(responses.max()),
        "length/answer_mean": float(np.mean([sample.num_actions - sample.num_thought_tokens for sample in samples])),
        "length/response_cut": float(np.mean([sample.finish == "length" for sample in samples])),
        "rollout/num_samples": float(len(samples)),
        "rollout/num_tokens": float(responses.sum()),
    }
