"""Computes the verdicts on answers from the results of each reward, which may come in several pieces.

Invariant (tests/unit/cluster): verdicts and metrics, except for times, do not depend on the pieces; they are bitwise
equal to the results of one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import compress, islice
from typing import TypeVar

from megatron_rl.cluster.waiting import TICK_S, tick
from megatron_rl.config.rewards import RewardConfig
from megatron_rl.types import Group, Metrics, Verdict
from megatron_rl.verifiers import Scored, weighted_sum
from megatron_rl.verifiers.failures import FailureLog

T = TypeVar("T")
Piece = tuple[Sequence[Group], Mapping[int, Scored]]
"""Some groups, and what rewards have given for their answers, by the indices of the rewards."""


def results(calls: Sequence[Future[T]]) -> list[T]:
    """Wait for all calls, and return their results or raise the error of the first that has one."""
    while wait(calls, TICK_S).not_done:
        tick()
    return [call.result() for call in calls]


def in_order(groups: Sequence[Group], pieces: Iterable[Piece], i: int) -> Scored:
    """The results of reward i for these groups, from several calls. Other groups of these calls are left out, but not
    what the reward logged about them, because it belongs to the call."""
    of_group: dict[int, list[Verdict]] = {}
    seconds, logged = 0.0, dict[str, list[float]]()
    for own, given in pieces:
        verdicts = iter(given[i].verdicts)
        of_group |= {id(group): list(islice(verdicts, len(group.rollouts))) for group in own}
        seconds += given[i].seconds
        for name, values in given[i].logged.items():
            logged.setdefault(name, []).extend(values)
    return Scored([verdict for group in groups for verdict in of_group[id(group)]], seconds, logged)


def added_up(
    rewards: Sequence[RewardConfig], groups: Sequence[Group], given: Mapping[int, Scored], failures: FailureLog
) -> tuple[list[list[Verdict]], Metrics]:
    """The verdicts on all answers, combined from each reward's verdicts. What a reward could not score is written down.

    Args:
        given: what each reward gave, by its index.

    Returns:
        One verdict for each rollout of each group, and the metrics `reward/<name>/seconds`, the time of all calls,
        `reward/<name>/failed`, the share of answers that the reward could not score, and the means of what it has
        logged.
    """
    prompts = [group.prompt for group in groups for _ in group.rollouts]
    begins = [rollout.begins_answer for group in groups for rollout in group.rollouts]
    metrics: Metrics = {}
    for i, reward in enumerate(rewards):
        verdicts = given[i].verdicts
        failures.write(groups[0].version, reward.label, prompts, verdicts)
        metrics |= given[i].metrics
        metrics[f"reward/{reward.label}/seconds"] = given[i].seconds
        metrics[f"reward/{reward.label}/failed"] = sum(v.failed for v in compress(verdicts, begins)) / sum(begins)
    weights, columns = [reward.weight for reward in rewards], [given[i].verdicts for i in range(len(rewards))]
    flat = iter([weighted_sum(weights, verdicts) for verdicts in zip(*columns, strict=True)])
    return [[next(flat) for _ in group.rollouts] for group in groups], metrics
