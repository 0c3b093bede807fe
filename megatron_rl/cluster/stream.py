"""Engines and verifiers that work while the trainer does; implements `ports.Stream`.

A group is one call of an engine. When its answers are complete, a thread of a verifier takes it, has it scored and
written into the journal, and then it is handed out. Whatever happens to a group, the driver learns it in `collect`: all
decisions are made there.

Invariants (tests/e2e): a group whose engine died, or lost its answers in a failed push, is asked for again and goes on
from the tokens that it had; no group is handed out twice; an engine that gives no answer in time is replaced.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any

import ray
from ray.exceptions import RayError

from megatron_rl.cluster.engines import ATTEMPTS, EngineGroup
from megatron_rl.cluster.verifier import RayVerifier, VerifierGroup
from megatron_rl.cluster.waiting import TICK_S, explain, in_thread, tick
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.ports import Verified
from megatron_rl.types import Group, Prompt, Sample, give_verdicts

log = logging.getLogger(__name__)

LINGER_S = 0.1
"""A verifier waits so long for more groups, because a call of its process costs much more than another group in it."""


@dataclass(slots=True)
class Asked:
    """A group that an engine works on."""

    prompt: Prompt
    num_samples: int
    version: int
    engine: int = -1
    """The index of the engine."""
    actor: Any = None
    """The engine's actor. If the engine has another one now, it was started anew."""
    payload: Any = None
    records: list[str] = field(default_factory=list)
    """The files with the tokens that its engines have sampled so far, in the order of the engines."""
    num_failed: int = 0
    """How often its answers were lost although the engine lives."""


@dataclass(frozen=True, slots=True)
class Lost:
    number: int
    error: BaseException


class IdleTime:
    """How long engines have nothing to do. All times are in seconds of one clock."""

    def __init__(self, engines: Iterable[int], now: float) -> None:
        self._since = dict.fromkeys(engines, now)
        """Since when an engine is idle, for those that are."""
        self._total = 0.0

    def begin_work(self, engine: int, now: float) -> None:
        self._total += now - self._since.pop(engine, now)

    def end_work(self, engine: int, now: float) -> None:
        self._since[engine] = now

    def take(self, now: float) -> float:
        """The idle time of all engines together since the last call."""
        total = self._total + sum(now - since for since in self._since.values())
        self._total, self._since = 0.0, dict.fromkeys(self._since, now)
        return total


class RayStream:
    def __init__(self, config: GrpoRunConfig, engines: EngineGroup, verifiers: VerifierGroup) -> None:
        self._engines, self._timeout_s = engines, config.cluster.step_timeout_s
        self._asked: dict[int, Asked] = {}
        """The groups that engines work on, by their numbers."""
        self._load = Counter({i: 0 for i in range(config.rollout.num_engines)})
        """The number of groups that each engine works on."""
        self._idle = IdleTime(self._load, time.perf_counter())
        self._lock = Lock()
        """Protects `_asked`, `_load` and `_idle`, which the driver and the verifiers' threads write."""
        self._answered: SimpleQueue[tuple[int, Future[list[Sample]]]] = SimpleQueue()
        self._events: SimpleQueue[Verified | Lost | Exception] = SimpleQueue()
        self._num_again = 0
        """The number of groups that were asked for again since the last `collect`."""
        self._num_verifiers = len(verifiers.verifiers)
        for verifier in verifiers.verifiers:
            in_thread(partial(self._verify, verifier), "verify")

    def ask(self, number: int, prompt: Prompt, num_samples: int, version: int) -> None:
        """See `ports.Stream`. The group goes to the engine that works on the fewest groups."""
        with self._lock:
            self._asked[number] = Asked(prompt, num_samples, version)
        self._send(number)

    def _send(self, number: int) -> None:
        with self._lock:
            asked = self._asked[number]
            asked.engine = min(self._load, key=self._load.__getitem__)
            asked.actor = self._engines.engines[asked.engine]
            self._load[asked.engine] += 1
            self._idle.begin_work(asked.engine, time.perf_counter())
            earlier, record = list(asked.records), self._engines.record_of[asked.engine]
            if record not in earlier:
                asked.records.append(record)
        call = asked.actor.answer.options(num_returns=2)
        samples, asked.payload = call.remote(number, asked.prompt, asked.num_samples, earlier)
        samples.future().add_done_callback(lambda future: self._answered.put((number, future)))

    def collect(self, version: int) -> Verified:
        """See `ports.Stream`. The metric `stream/asked_again` is the number of groups whose answers were lost, and
        `stream/idle_s` the time in which engines had nothing to do, of all engines together."""
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
            if isinstance(event, Verified):
                again, self._num_again = self._num_again, 0
                with self._lock:
                    idle_s = self._idle.take(time.perf_counter())
                counted = {"stream/asked_again": float(again), "stream/idle_s": idle_s}
                return replace(event, metrics=event.metrics | counted)
            if not isinstance(event, Lost):
                raise event
            self._ask_again(event, version)

    def _ask_again(self, lost: Lost, version: int) -> None:
        asked = self._asked[lost.number]
        process = self._engines.processes[asked.engine]
        error = explain(lost.error, process) if isinstance(lost.error, RayError) else lost.error
        has_new_engine = process.actor is not asked.actor
        is_dead = not has_new_engine and self._engines.is_dead(asked.engine)
        # The run's budget of restarts bounds the number of deaths.
        asked.num_failed += not (has_new_engine or is_dead)
        if isinstance(error, ValueError | OSError) or asked.num_failed == ATTEMPTS:
            raise error from lost.error
        if is_dead:
            log.warning("version %d: %s", version, error)
            try:
                self._engines.bring_weights(version)
            except BaseException:
                self._events.put(lost)  # if the policy is lost, the loop recovers and collects again
                raise
        self._num_again += 1
        self._send(lost.number)

    def _end_silent(self) -> None:
        """Kill the engines that should have answered, so that they are replaced."""
        with self._lock:
            silent = {asked.engine for asked in self._asked.values()}
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
                groups = {number: group for number, future in answered if (group := self._group(number, future))}
                if groups:
                    self._events.put(_verified(verifier, groups))
            except Exception as error:  # the driver raises it
                self._events.put(error)

    def _wait_for_answers(self) -> tuple[int, Future[list[Sample]]]:
        while True:
            try:
                return self._answered.get(timeout=TICK_S)
            except Empty:
                tick()

    def _group(self, number: int, future: Future[list[Sample]]) -> Group | None:
        """The group of a complete call; None if its answers are lost."""
        error = future.exception()
        with self._lock:
            asked = self._asked[number] if error else self._asked.pop(number)
            self._load[asked.engine] -= 1
            if not self._load[asked.engine]:
                self._idle.end_work(asked.engine, time.perf_counter())
        if error is not None:
            self._events.put(Lost(number, error))
            return None
        return Group(asked.prompt, future.result(), asked.payload, asked.version)


def _verified(verifier: RayVerifier, groups: dict[int, Group]) -> Verified:
    verdicts, metrics = verifier.score(list(groups.values()))
    give_verdicts(groups.values(), verdicts)
    to_train_on = {number: group for number, group in groups.items() if number >= 0}
    if to_train_on:
        verifier.write(to_train_on)
    return Verified(groups, metrics)
