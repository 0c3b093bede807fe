"""Engines and verifiers that work while the trainer does; implements `ports.Stream`.

A group is dealt to the engines in parts, each of which is one call. When all its answers are complete, a thread of a
verifier takes it, has it scored and written into the journal, and then it is handed out. Whatever happens to a group,
the driver learns it in `collect`: all decisions are made there.

Invariants (tests/unit/cluster, tests/e2e): a part whose engine died, or lost its answers in a failed push, is asked for
again and goes on from the tokens that it had; no group is handed out twice, and none that was cancelled; an engine that
gives no answer in time is replaced.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any

import ray
from ray.exceptions import RayError

from megatron_rl.algorithms.utilities import settle
from megatron_rl.cluster.engines import ATTEMPTS, EngineGroup
from megatron_rl.cluster.payloads import StoredTokens, num_objects
from megatron_rl.cluster.verifier import RayVerifier, VerifierGroup
from megatron_rl.cluster.waiting import TICK_S, explain, in_thread, tick
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.ports import Verified
from megatron_rl.types import Group, Metrics, Prompt, Sample, give_verdicts

log = logging.getLogger(__name__)

LINGER_S = 0.1
"""A verifier waits so long for more groups, because a call of its process costs much more than another group in it."""


PARTS = 4
"""If groups are large and engines are many, an engine works on at least about so many parts of groups."""


@dataclass(slots=True, eq=False)
class Asked:
    """A group that engines work on, or a verifier."""

    ticket: int
    """Names this asking of the group. The group's number would not do: it may be asked for again."""
    number: int
    prompt: Prompt
    version: int
    parts: list[Part] = field(default_factory=list)

    @property
    def group(self) -> Group:
        samples = [sample for part in self.parts for sample in part.answers or ()]
        return Group(self.prompt, samples, StoredTokens(tuple(part.stored for part in self.parts)), self.version)


@dataclass(slots=True, eq=False)
class Part:
    """The samples of a group that one engine answers."""

    asked: Asked
    samples: range
    engine: int = -1
    """The index of the engine."""
    actor: Any = None
    """The engine's actor. If the engine has another one now, it was started anew."""
    records: list[str] = field(default_factory=list)
    """The files with the tokens that its engines have sampled so far, in the order of the engines."""
    num_failed: int = 0
    """How often its answers were lost although the engine lives."""
    answers: list[Sample] | None = None
    """None until they are complete."""
    stored: tuple[ray.ObjectRef, ...] = ()
    """The objects of the tokens; see `payloads.objects_of`."""


@dataclass(frozen=True, slots=True)
class Lost:
    part: Part
    error: BaseException


@dataclass(frozen=True, slots=True)
class Scored:
    groups: list[tuple[Asked, Group]]
    metrics: Metrics


def largest_part(rollout: RolloutConfig) -> int:
    """The largest number of a group's answers that one engine gets, so that the engines have equal work. The answers of
    a part share the keys and values of their prompt. If samples go on from passages, a group has one part, so that they
    are behind all others."""
    if rollout.prefix_values is not None and rollout.prefix_values.rollouts is not None:
        return rollout.samples_per_prompt
    under_way = (rollout.max_lag + 1) * rollout.prompts_per_step * rollout.samples_per_prompt
    return max(1, under_way // (PARTS * rollout.num_engines))


def deal(num_samples: int, largest: int) -> list[range]:
    """The fewest parts of at most `largest` samples; their sizes differ by 1 at most."""
    num = -(-num_samples // largest)
    bounds = [num_samples * i // num for i in range(num + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


class IdleTime:
    """How long engines have nothing to do. All times are in seconds of one clock."""

    def __init__(self, engines: Iterable[int], now: float) -> None:
        self._since = dict.fromkeys(engines, now)
        """Since when an engine is idle, for those that are."""
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


class RayStream:
    def __init__(self, config: GrpoRunConfig, engines: EngineGroup, verifiers: VerifierGroup) -> None:
        self._engines, self._timeout_s = engines, config.cluster.step_timeout_s
        self._largest_part = largest_part(config.rollout)
        self._values = config.rollout.prefix_values
        self._num_objects = num_objects(config.policy.routing_replay)
        self._tickets = count()
        self._asked: dict[int, Asked] = {}
        """The groups that were asked for and neither handed out nor cancelled, by their numbers."""
        self._load = Counter({i: 0 for i in range(config.rollout.num_engines)})
        """The number of answers that each engine works on."""
        self._idle = IdleTime(self._load, time.perf_counter())
        self._lock = Lock()
        """Protects `_asked`, `_load` and `_idle`, which the driver and the verifiers' threads write."""
        self._answered: SimpleQueue[tuple[Part, Future[list[Sample]]]] = SimpleQueue()
        self._events: SimpleQueue[Scored | Lost | Exception] = SimpleQueue()
        self._num_again = 0
        """The number of parts that were asked for again since the last `collect`."""
        self._num_verifiers = len(verifiers.verifiers)
        for verifier in verifiers.verifiers:
            in_thread(partial(self._verify, verifier), "verify")

    def ask(self, number: int, prompt: Prompt, num_samples: int, version: int) -> None:
        """See `ports.Stream`. Each part goes to the engine that works on the fewest answers."""
        asked = Asked(next(self._tickets), number, prompt, version)
        asked.parts += [Part(asked, samples) for samples in deal(num_samples, self._largest_part)]
        with self._lock:
            self._asked[number] = asked
        for part in asked.parts:
            self._send(part)

    def _send(self, part: Part) -> None:
        with self._lock:
            part.engine = min(self._load, key=self._load.__getitem__)
            part.actor = self._engines.engines[part.engine]
            self._load[part.engine] += len(part.samples)
            self._idle.begin_work(part.engine, time.perf_counter())
            earlier, record = list(part.records), self._engines.record_of[part.engine]
            if record not in earlier:
                part.records.append(record)
        asked, call = part.asked, part.actor.answer.options(num_returns=1 + self._num_objects)
        samples, *stored = call.remote(asked.ticket, asked.number, asked.prompt, part.samples, earlier)
        part.stored = tuple(stored)
        samples.future().add_done_callback(lambda future: self._answered.put((part, future)))

    def cancel(self, number: int) -> None:
        """See `ports.Stream`."""
        with self._lock:
            asked = self._asked.pop(number)
            actors = {part.engine: part.actor for part in asked.parts}
        for actor in actors.values():
            actor.cancel.remote(asked.ticket)

    def collect(self, version: int) -> Verified:
        """See `ports.Stream`. The metric `stream/asked_again` is the number of calls whose answers were lost, and
        `stream/idle_s` the time in which engines had nothing to do, of all engines together, out of `stream/span_s`."""
        end = time.monotonic() + self._timeout_s
        while True:
            try:
                event = self._events.get(timeout=TICK_S)
            except Empty:
                tick()
                if self._asked and time.monotonic() > end:
                    self._end_silent()
                    end = time.monotonic() + self._timeout_s
                continue
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Lost):
                self._ask_again(event, version)
                continue
            with self._lock:
                groups = {asked.number: group for asked, group in event.groups if self._is_wanted(asked)}
                for number in groups:
                    del self._asked[number]
                if not groups:
                    continue
                idle_s, span_s = self._idle.take(time.perf_counter())
            again, self._num_again = self._num_again, 0
            own = {"stream/asked_again": float(again), "stream/idle_s": idle_s, "stream/span_s": span_s}
            return Verified(groups, event.metrics | own)

    def _is_wanted(self, asked: Asked) -> bool:
        return self._asked.get(asked.number) is asked

    def _ask_again(self, lost: Lost, version: int) -> None:
        part = lost.part
        process = self._engines.processes[part.engine]
        error = explain(lost.error, process) if isinstance(lost.error, RayError) else lost.error
        has_new_engine = process.actor is not part.actor
        is_dead = not has_new_engine and self._engines.is_dead(part.engine)
        # The run's budget of restarts bounds the number of deaths.
        part.num_failed += not (has_new_engine or is_dead)
        if isinstance(error, ValueError | OSError) or part.num_failed == ATTEMPTS:
            raise error from lost.error
        if is_dead:
            log.warning("version %d: %s", version, error)
            try:
                self._engines.bring_weights(version)
            except BaseException:
                self._events.put(lost)  # if the policy is lost, the loop recovers and collects again
                raise
        if self._is_wanted(part.asked):
            self._num_again += 1
            self._send(part)

    def _end_silent(self) -> None:
        """Kill the engines that should have answered, so that they are replaced."""
        with self._lock:
            silent = {part.engine for asked in self._asked.values() for part in asked.parts if part.answers is None}
        for index in silent:
            log.warning("%s gave no answer in %g s", self._engines.processes[index], self._timeout_s)
            ray.kill(self._engines.engines[index])

    def _verify(self, verifier: RayVerifier) -> None:
        """What the thread of a verifier does: score the groups that are complete, several at once if there are."""
        while True:
            answered = [self._wait_for_answers()]
            time.sleep(LINGER_S)
            with suppress(Empty):
                for _ in range(self._answered.qsize() // self._num_verifiers):
                    answered.append(self._answered.get_nowait())
            try:
                complete = [asked for part, future in answered if (asked := self._completed(part, future))]
                if complete:
                    self._events.put(self._scored(verifier, complete))
            except Exception as error:  # the driver raises it
                self._events.put(error)

    def _wait_for_answers(self) -> tuple[Part, Future[list[Sample]]]:
        while True:
            try:
                return self._answered.get(timeout=TICK_S)
            except Empty:
                tick()

    def _completed(self, part: Part, future: Future[list[Sample]]) -> Asked | None:
        """The group of a call that has ended, if now all its answers are complete."""
        error, asked = future.exception(), part.asked
        with self._lock:
            self._load[part.engine] -= len(part.samples)
            if not self._load[part.engine]:
                self._idle.end_work(part.engine, time.perf_counter())
            if not self._is_wanted(asked):
                return None
            if error is None:
                part.answers = future.result()
                return asked if all(part.answers is not None for part in asked.parts) else None
        self._events.put(Lost(part, error))
        return None

    def _scored(self, verifier: RayVerifier, complete: list[Asked]) -> Scored:
        groups = [(asked, asked.group) for asked in complete]
        verdicts, metrics = verifier.score([group for _, group in groups])
        give_verdicts([group for _, group in groups], verdicts)
        settle((group for _, group in groups), self._values)
        to_train_on = {asked.number: group for asked, group in groups if asked.number >= 0}
        if to_train_on:
            verifier.write(to_train_on)
        return Scored(groups, metrics)
