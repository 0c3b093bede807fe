"""Scores the groups of a step while others are still generated; implements `ports.Scoring`.

A verifier that has nothing to do takes groups that have finished, and scores them in a thread. Rewards that need all
answers of the step come when the last group is there.

Invariant (tests/unit/cluster): verdicts and metrics, except for times, do not depend on the order in which the groups
finish, on how many a verifier takes at once, and on the number of verifiers; they are those of one call, to the bit. A
`function` is called by each verifier for its own part of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import islice
from threading import Lock
from types import TracebackType
from typing import Protocol, TypeVar

from megatron_rl.cluster.waiting import TICK_S, in_thread, tick
from megatron_rl.config.rewards import RewardConfig
from megatron_rl.types import Group, Metrics, Verdict
from megatron_rl.verifiers import Scored, weighted_sum
from megatron_rl.verifiers.failures import FailureLog

T = TypeVar("T")


class Verifier(Protocol):
    """One process that scores; see `verifier.RayVerifier`."""

    num_restarts: int

    def scored(self, groups: Sequence[Group], indices: Collection[int]) -> dict[int, Scored]: ...
    def shaped(self, groups: Sequence[Group], verdicts: list[list[Verdict]]) -> list[list[Verdict]]: ...


class RayScoring:
    def __init__(self, rewards: Sequence[RewardConfig], verifiers: Sequence[Verifier], failures: FailureLog) -> None:
        self._rewards, self._verifiers, self._failures = rewards, verifiers, failures
        self._early = [i for i, reward in enumerate(rewards) if not reward.needs_all_answers]
        self._late = [i for i, reward in enumerate(rewards) if reward.needs_all_answers]
        self._lock = Lock()
        """Protects what follows, which the driver and the threads write."""
        self._idle = list(verifiers)
        self._waiting: list[Group] = []
        """The groups that no verifier has taken yet."""
        self._scored: list[tuple[list[Group], dict[int, Scored]]] = []
        self._calls: list[Future[None]] = []

    def __enter__(self) -> RayScoring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._waiting.clear()

    def add(self, group: Group) -> None:
        """See `ports.Scoring`."""
        if not self._early:
            return
        with self._lock:
            self._waiting.append(group)
            if self._idle:
                self._calls.append(in_thread(partial(self._score_early, self._idle.pop()), "score"))

    def _score_early(self, verifier: Verifier) -> None:
        """What a thread does: score groups until none waits."""
        while groups := self._take(verifier):
            given = verifier.scored(groups, self._early)
            with self._lock:
                self._scored.append((groups, given))

    def _take(self, verifier: Verifier) -> list[Group]:
        """The groups that a verifier scores next. If there are none, it is idle."""
        with self._lock:
            num = -(-len(self._waiting) // len(self._verifiers))
            taken, self._waiting = self._waiting[:num], self._waiting[num:]
            if not taken:
                self._idle.append(verifier)
            return taken

    def finish(self, groups: Sequence[Group]) -> tuple[list[list[Verdict]], Metrics]:
        """See `ports.Scoring`. The metrics are those of `added_up`, and `verifier/restarts`, the number since the run
        began.

        Raises:
            ValueError: an answer cannot be scored, and the reward's `on_error` is stop.
        """
        results(self._calls)
        given = {i: in_order(groups, self._scored, i) for i in self._early}
        num = len(self._verifiers)
        bounds = [len(groups) * i // num for i in range(num + 1)]
        parts = [(v, slice(a, b)) for v, a, b in zip(self._verifiers, bounds, bounds[1:]) if b > a]
        if self._late:
            late_calls = [in_thread(partial(v.scored, groups[part], self._late), "score") for v, part in parts]
            late = [(groups[part], one) for (_, part), one in zip(parts, results(late_calls), strict=True)]
            given |= {i: in_order(groups, late, i) for i in self._late}
        verdicts, metrics = added_up(self._rewards, groups, given, self._failures)
        calls = [in_thread(partial(v.shaped, groups[part], verdicts[part]), "shape") for v, part in parts]
        shaped = [own for part in results(calls) for own in part]
        metrics["verifier/restarts"] = float(sum(verifier.num_restarts for verifier in self._verifiers))
        return shaped, metrics


def results(calls: Sequence[Future[T]]) -> list[T]:
    """Wait for all calls, and return their results or raise the error of the first that has one."""
    while wait(calls, TICK_S).not_done:
        tick()
    return [call.result() for call in calls]


def in_order(groups: Sequence[Group], pieces: Iterable[tuple[Sequence[Group], Mapping[int, Scored]]], i: int) -> Scored:
    """What reward i gave for these groups, from what it gave in several calls. Their other groups are left out; what
    the reward has logged about them is not, because it belongs to the call."""
    of_group: dict[int, list[Verdict]] = {}
    seconds, logged = 0.0, dict[str, list[float]]()
    for own, given in pieces:
        verdicts = iter(given[i].verdicts)
        of_group |= {id(group): list(islice(verdicts, len(group.samples))) for group in own}
        seconds += given[i].seconds
        for name, values in given[i].logged.items():
            logged.setdefault(name, []).extend(values)
    return Scored([verdict for group in groups for verdict in of_group[id(group)]], seconds, logged)


def added_up(
    rewards: Sequence[RewardConfig], groups: Sequence[Group], given: Mapping[int, Scored], failures: FailureLog
) -> tuple[list[list[Verdict]], Metrics]:
    """The verdicts on all answers from those of each reward. What a reward could not score is written down.

    Args:
        given: what each reward gave, by its index.

    Returns:
        One verdict for each sample of each group, and the metrics `reward/<name>/seconds`, the time of all calls,
        `reward/<name>/failed`, the share of answers that the reward could not score, and the means of what it has
        logged.
    """
    prompts = [group.prompt for group in groups for _ in group.samples]
    metrics: Metrics = {}
    for i, reward in enumerate(rewards):
        verdicts = given[i].verdicts
        failures.write(groups[0].version, reward.label, prompts, verdicts)
        metrics |= given[i].metrics
        metrics[f"reward/{reward.label}/seconds"] = given[i].seconds
        metrics[f"reward/{reward.label}/failed"] = sum(v.failed for v in verdicts) / len(verdicts)
    weights, columns = [reward.weight for reward in rewards], [given[i].verdicts for i in range(len(rewards))]
    flat = iter([weighted_sum(weights, verdicts) for verdicts in zip(*columns, strict=True)])
    return [[next(flat) for _ in group.samples] for group in groups], metrics
