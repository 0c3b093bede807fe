"""A group on its way through engines and verifiers, how it is divided among engines, and how long engines are idle.

Invariants (tests/unit/cluster): the parts of a group are as few and as equal as possible; idle time counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import ray

from megatron_rl.cluster.payloads import StoredTokens, stored
from megatron_rl.cluster.scoring import Piece
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.types import Group, GroupRequest, Metrics, Rollout

PARTS = 4
"""If groups are large and engines are many, an engine works on at least about this number of parts of groups."""


class Answered(NamedTuple):
    """What an engine gives for a part, besides the tokens."""

    rollouts: Sequence[Rollout]
    continuations: Sequence[Rollout]
    counts: Sequence[Sequence[int]]
    """How their tokens are distributed over objects; see `payloads.objects_of`."""


@dataclass(slots=True, eq=False)
class AskedGroup:
    """A group that engines work on, or a verifier, or that waits for the others of its step."""

    ticket: int
    """Names this asking of the group. The group's number would not do: it may be asked for again."""
    request: GroupRequest
    version: int
    parts: list[AskedPart] = field(default_factory=list)
    attempt: int = 0
    """How often answers that were complete are generated again."""

    def group(self) -> Group:
        """The group, when all its answers are complete."""
        answers, continuations = map(self._joined, zip(*(part.given() for part in self.parts), strict=True))
        return replace(answers, continuations=continuations if continuations.rollouts else None)

    def _joined(self, given: Sequence[Sequence[tuple[Rollout, StoredTokens]]]) -> Group:
        """The group of what each part has given."""
        rollouts, payload = [one for own in given for one, _ in own], [tokens for own in given for _, tokens in own]
        engines = [
            part.sent.engine for part, own in zip(self.parts, given, strict=True) if part.sent is not None for _ in own
        ]
        return Group(self.request.prompt, rollouts, payload, self.version, engines=engines)


@dataclass(slots=True, eq=False)
class AskedPart:
    """The answers of a group that one engine gives."""

    asked: AskedGroup
    samples: range
    sent: Sent | None = None
    """The newest call; results of older calls are ignored."""
    records: list[str] = field(default_factory=list)
    """The files with the tokens that its engines have sampled so far, in the order of the engines."""
    num_failed: int = 0
    """How often its answers were lost although the engine lives."""
    answers: Answered | None = None
    """None until they are complete."""
    objects: Sequence[ray.ObjectRef] = ()
    """The objects with the tokens of the answers and of the continuations; see `payloads.objects_of`."""

    def given(self) -> tuple[Sequence[tuple[Rollout, StoredTokens]], Sequence[tuple[Rollout, StoredTokens]]]:
        """The complete answers and their continuations, with their payloads."""
        assert self.answers is not None, "they are complete"
        rollouts, continuations, counts = self.answers
        both = list(zip([*rollouts, *continuations], stored(counts, self.objects), strict=True))
        return both[: len(rollouts)], both[len(rollouts) :]


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A request to one engine for the answers of a part."""

    part: AskedPart
    engine: int
    """The index of the engine."""
    actor: Any
    """The engine's actor. If the engine has another one now, it was restarted."""
    batch: int
    """Names the calls of all engines that began together."""


@dataclass(frozen=True, slots=True)
class Lost:
    sent: Sent
    error: BaseException


@dataclass(frozen=True, slots=True)
class VerifiedGroups:
    groups: list[tuple[AskedGroup, int, Group]]
    """Each group with the attempt that it is of."""
    metrics: Metrics
    piece: Piece | None = None
    """What rewards have given for the groups, if the verdicts are made later."""

    @property
    def is_current(self) -> bool:
        """Whether none of the groups is generated again."""
        return all(asked.attempt == attempt for asked, attempt, _ in self.groups)


def largest_part(rollout: RolloutConfig) -> int:
    """The largest number of a group's answers that one engine gets, so that the engines have equal work. The answers of
    a part share the keys and values of their prompt. If there are continuations, a group has one part, because `Branch`
    counts all its answers."""
    values = rollout.prefix_values
    if values is not None and (values.rollouts is not None or values.by == "trainer"):
        return rollout.samples_per_prompt
    under_way = (rollout.max_lag + 1) * rollout.prompts_per_step * rollout.samples_per_prompt
    return max(1, under_way // (PARTS * rollout.num_engines))


def deal(num_samples: int, largest: int) -> list[range]:
    """The fewest parts of at most `largest` answers; their sizes differ by 1 at most."""
    num = -(-num_samples // largest)
    bounds = [num_samples * i // num for i in range(num + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


class IdleTime:
    """How long engines have nothing to do. All times are in seconds of one clock."""

    def __init__(self, engines: Iterable[int], now: float) -> None:
        self._since = dict.fromkeys(engines, now)
        """The time since when each idle engine is idle."""
        self._total, self._taken = 0.0, now

    def begin_work(self, engine: int, now: float) -> None:
        self._total += now - self._since.pop(engine, now)

    def end_work(self, engine: int, now: float) -> None:
        self._since[engine] = now

    def take(self, now: float) -> tuple[float, float]:
        """The idle time of all engines together since the last call, and the time since the last call."""
        total, span = self._total + sum(now - since for since in self._since.values()), now - self._taken
        self._total, self._since, self._taken = 0.0, dict.fromkeys(self._since, now), now
        return total, span
