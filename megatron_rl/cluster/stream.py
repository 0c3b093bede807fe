"""Engines and verifiers that work while the trainer does something else; implements `ports.Stream`.

A group is given to the engines in parts; each part is one call. When all its answers are complete, a thread of a
verifier takes the group, scores it and writes it into the journal; then the group is handed out. The driver learns all
that happens to a group in `collect`, and makes all decisions there.

`open_stream` chooses once whether groups are handed out one by one (`RayStream`) or as whole batches (`BatchStream`).

Invariants (tests/unit/cluster, tests/e2e): if an engine dies, or loses its answers in a failed weight sync, its parts
are requested again. No group is handed out twice, and no cancelled group at all. An engine that gives no answer in time
is replaced.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from threading import Lock

import ray
from ray.exceptions import RayError

from megatron_rl.algorithms.utilities import settle_branches
from megatron_rl.cluster.engines import ATTEMPTS, EngineGroup
from megatron_rl.cluster.payloads import num_objects
from megatron_rl.cluster.running_groups import (
    Answered,
    AskedGroup,
    AskedPart,
    IdleTime,
    Lost,
    Sent,
    VerifiedGroups,
    deal,
    largest_part,
)
from megatron_rl.cluster.teachers import Teachers
from megatron_rl.cluster.verifier import RayVerifier, VerifierGroup
from megatron_rl.cluster.waiting import TICK_S, explain, in_thread, tick
from megatron_rl.config.prefix_values import PrefixValues
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.ports import Collected
from megatron_rl.types import Group, GroupRequest, Metrics, Tokens, Verdict
from megatron_rl.verifiers.metrics import merged

log = logging.getLogger(__name__)

Taught = Callable[[Sequence[Group]], list[Group]]
"""Gives groups the log-probs of their teachers."""
ANSWERING = "to answer"
"""What engines are asked to do, as messages name it."""
LINGER_S = 0.1
"""A verifier waits so long for more groups, because a call of its process costs much more than another group in it."""


def to_judge(groups: Iterable[Group], values: PrefixValues | None) -> list[Group]:
    """The groups, each with the group of the answers that go on from its passages behind it."""
    return [one for group in groups for one in (group, _branches(group, values)) if one is not None]


def judged(groups: Iterable[Group], verdicts: Iterable[Sequence[Verdict]], values: PrefixValues | None) -> list[Group]:
    """The groups with their verdicts, and with the utilities that branches give their passages.

    Args:
        verdicts: the verdicts on each group of `to_judge`.
    """
    given, found = iter(verdicts), []
    for group in groups:
        branches, group = _branches(group, values), group.judged(next(given))
        if branches is not None:
            group = replace(group, continuations=branches.judged(next(given)))
        if values is not None and values.rollouts is not None:
            group = settle_branches(group, values)
        found.append(group)
    return found


def _branches(group: Group, values: PrefixValues | None) -> Group | None:
    return group.continuations if values is not None and values.rollouts is not None else None


class RayStream:
    """Judges, journals and hands out each group as soon as its answers are complete. A lost part goes on with the
    tokens that it had, in any engine."""

    def __init__(
        self, config: GrpoRunConfig, engines: EngineGroup, verifiers: VerifierGroup, teachers: Teachers | None = None
    ) -> None:
        self._config, self._engines, self._verifiers, self._teachers = config, engines, verifiers, teachers
        self._tickets, self._batches = count(), count()
        self._asked: dict[int, AskedGroup] = {}
        """The groups that were asked for and neither handed out nor cancelled, by their numbers."""
        self._load = Counter({i: 0 for i in range(config.rollout.num_engines)})
        """The number of answers that each engine works on."""
        self._idle = IdleTime(self._load, time.perf_counter())
        self._lock = Lock()
        """Protects `_asked`, `_load` and `_idle`, which the driver and the verifiers' threads write."""
        self._answered: SimpleQueue[tuple[Sent, Future[Answered]]] = SimpleQueue()
        self._events: SimpleQueue[VerifiedGroups | Lost | Exception] = SimpleQueue()
        self._ready: dict[int, Group] = {}
        """The verified groups that are not handed out yet, by their numbers."""
        self._scored: list[tuple[VerifiedGroups, int]] = []
        """Each scoring since groups were handed out, with the number of its answers."""
        self._lost: list[Lost] = []
        """The calls whose answers were lost, and are not asked for again yet."""
        self._counts = Counter[str]()
        """The parts that were asked for again since the last `collect`, and the restarts of verifiers before it."""
        for verifier in verifiers.verifiers:
            in_thread(partial(self._verify, verifier), "verify")

    def ask(self, requests: Sequence[GroupRequest], version: int) -> None:
        """See `ports.Stream`. Each part goes to the engine that works on the fewest answers."""
        self._engines.before()  # a teacher may have had their memory since the push
        if not self._config.rollout.overlaps and not self._asked:  # the time while the trainer worked does not count
            self._idle.take(time.perf_counter())
        parts, largest = [], largest_part(self._config.rollout)
        for request in requests:
            asked = AskedGroup(next(self._tickets), request, version)
            asked.parts += [AskedPart(asked, samples) for samples in deal(request.num_samples, largest)]
            with self._lock:
                self._asked[request.number] = asked
            parts += asked.parts
        self._send(parts, version)

    def _send(self, parts: Sequence[AskedPart], version: int) -> None:
        """Ask for parts, which begin together in each engine."""
        name, calls = next(self._batches), list[tuple[Sent, list[str]]]()
        for part in parts:
            with self._lock:
                engine, earlier = self._route(part)
                part.sent = sent = Sent(part, engine, self._engines.engines[engine], name)
                calls.append((sent, earlier))
                self._load[engine] += len(part.samples)
                self._idle.begin_work(engine, time.perf_counter())
        sizes = Counter(sent.engine for sent, _ in calls)
        for sent, earlier in calls:
            part, asked = sent.part, sent.part.asked
            has_routes = self._config.policy.routing_replay
            call = sent.actor.answer.options(num_returns=1 + num_objects(len(part.samples), has_routes))
            held, batch = None if self._engines.loads_weights else version, (name, sizes[sent.engine])
            answers, *part.objects = call.remote(asked.ticket, asked.request, part.samples, held, batch, earlier)
            answers.future().add_done_callback(lambda future, sent=sent: self._answered.put((sent, future)))

    def _route(self, part: AskedPart) -> tuple[int, list[str]]:
        """The engine that a part goes to, and the files with the tokens that it continues from."""
        engine, earlier = min(self._load, key=self._load.__getitem__), list(part.records)
        if (record := self._engines.record_of[engine]) not in earlier:
            part.records.append(record)
        return engine, earlier

    def cancel(self, number: int) -> None:
        """See `ports.Stream`."""
        with self._lock:
            asked = self._asked.pop(number)
            actors = {part.sent.engine: part.sent.actor for part in asked.parts if part.sent is not None}
        self._ready.pop(number, None)
        for actor in actors.values():
            actor.cancel.remote(asked.ticket)

    def collect(self, version: int) -> Collected:
        """See `ports.Stream`.

        The metric `stream/asked_again` is the number of calls whose answers were lost, `verifier/restarts` the number
        of processes of rewards that were replaced, and `stream/idle_s` the idle time of all engines together, out of
        `stream/span_s`.
        """
        (deadlines := self._engines.deadlines).begin(ANSWERING)  # the limit is for engines that say nothing
        while True:
            if self._can_hand_out():
                return self._hand_out()
            if self._lost:
                self._ask_again(version)
            try:
                event = self._events.get(timeout=TICK_S)
            except Empty:
                tick()
                if self._asked and deadlines.is_over(ANSWERING):
                    self._end_silent()
                    deadlines.begin(ANSWERING)
                continue
            deadlines.end(ANSWERING)
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Lost):
                self._lost.append(event)
                continue
            with self._lock:
                verified = {
                    asked.request.number: group
                    for asked, attempt, group in event.groups
                    if self._is_wanted(asked) and asked.attempt == attempt
                }
            if verified:
                self._engines.answered()
                self._ready |= verified
                self._scored.append((event, sum(group.num_answers for group in verified.values())))

    def _can_hand_out(self) -> bool:
        return bool(self._ready)

    def _hand_out(self) -> Collected:
        groups, metrics = self._judged(dict(sorted(self._ready.items())))
        self._ready, self._scored = {}, []
        with self._lock:
            for number in groups:
                del self._asked[number]
            idle_s, span_s = self._idle.take(time.perf_counter())
        before, self._counts = self._counts, Counter(restarts=self._verifiers.num_restarts)
        own = {"stream/asked_again": float(before["again"]), "stream/idle_s": idle_s, "stream/span_s": span_s}
        restarts = float(self._counts["restarts"] - before["restarts"])
        return Collected(groups, metrics | own | {"verifier/restarts": restarts})

    def _judged(self, groups: dict[int, Group]) -> tuple[dict[int, Group], Metrics]:
        """The groups to hand out with their verdicts, and the metrics of all scorings since the last ones."""
        return groups, merged([one.metrics for one, _ in self._scored], [size for _, size in self._scored])

    def tokens(self, group: Group, with_routes: bool = False) -> list[Tokens]:
        """See `ports.Stream`."""
        return self._engines.tokens(group, with_routes)

    def _is_wanted(self, asked: AskedGroup) -> bool:
        return self._asked.get(asked.request.number) is asked

    def _ask_again(self, version: int) -> None:
        """Replace the engines that have died, and ask for what was lost again."""
        lost = [one for one in self._lost if one.sent.part.sent is one.sent and self._is_wanted(one.sent.part.asked)]
        is_dead: dict[int, bool] = {}
        for one in lost:
            sent, part, process = one.sent, one.sent.part, self._engines.processes[one.sent.engine]
            error = explain(one.error, process) if isinstance(one.error, RayError) else one.error
            if process.actor is sent.actor and sent.engine not in is_dead:
                is_dead[sent.engine] = self._engines.is_dead(sent.engine)
                if is_dead[sent.engine]:
                    log.warning("version %d: %s", version, error)
            # The run's budget of restarts bounds the number of deaths.
            part.num_failed += process.actor is sent.actor and not is_dead[sent.engine]
            if isinstance(error, ValueError | OSError) or part.num_failed == ATTEMPTS:
                raise error from one.error
        if any(is_dead.values()):
            self._engines.bring_weights(version)  # if the policy is lost, the loop recovers and collects again
        self._lost = []
        for batch in self._again([one.sent.part for one in lost]):
            self._counts["again"] += len(batch)
            self._send(batch, version)
        self._engines.deadlines.begin(ANSWERING)

    def _again(self, lost: Sequence[AskedPart]) -> Iterable[Sequence[AskedPart]]:
        """The parts to ask for again after some were lost, in batches that begin together."""
        return [lost]

    def _end_silent(self) -> None:
        """Kill the engines that should have answered, so that they are replaced."""
        with self._lock:
            parts = [part for asked in self._asked.values() for part in asked.parts if not part.answers]
            silent = {part.sent.engine for part in parts if part.sent is not None}
        for process in (self._engines.processes[index] for index in silent):
            log.warning("%s gave no answer: %s", process, self._engines.deadlines.describe(ANSWERING))
            ray.kill(process.actor)

    def _verify(self, verifier: RayVerifier) -> None:
        """What the thread of a verifier does: score the groups that are complete, several at once if there are."""
        while True:
            try:
                answered = [self._answered.get(timeout=TICK_S)]
            except Empty:
                tick()
                continue
            time.sleep(LINGER_S)
            with suppress(Empty):
                for _ in range(self._answered.qsize() // len(self._verifiers.verifiers)):
                    answered.append(self._answered.get_nowait())
            try:
                complete = [done for sent, future in answered if (done := self._completed(sent, future))]
                if complete:
                    taught = self._teach([(asked.request.number, group) for asked, _, group in complete])
                    self._events.put(self._verified(verifier, complete, taught))
            except Exception as error:  # the driver raises it
                self._events.put(error)

    def _completed(self, sent: Sent, future: Future[Answered]) -> tuple[AskedGroup, int, Group] | None:
        """The group of a call that has ended, with its attempt, if now all its answers are complete."""
        error, part = future.exception(), sent.part
        with self._lock:
            self._load[sent.engine] -= len(part.samples)
            if not self._load[sent.engine]:
                self._idle.end_work(sent.engine, time.perf_counter())
            if part.sent is not sent or not self._is_wanted(part.asked):
                return None
            if error is None:
                part.answers = Answered(*future.result())
                is_complete = all(part.answers for part in part.asked.parts)
                return (part.asked, part.asked.attempt, part.asked.group()) if is_complete else None
        self._events.put(Lost(sent, error))
        return None

    def _teach(self, groups: Sequence[tuple[int, Group]], idle: bool = False) -> Taught:
        """Ask the teachers of the groups that are trained on. What is returned waits for them.

        Args:
            groups: with the numbers of their requests.
            idle: see `Teachers.begin`.
        """
        if (teachers := self._teachers) is None:
            return list
        own = [i for i, (number, _) in enumerate(groups) if number >= 0]
        asked = teachers.begin([groups[i][1] for i in own], idle)

        def taught(groups: Sequence[Group]) -> list[Group]:
            found = dict(zip(own, teachers.finish([groups[i] for i in own], asked), strict=True))
            return [found.get(i, group) for i, group in enumerate(groups)]

        return taught

    def _verified(
        self, verifier: RayVerifier, complete: list[tuple[AskedGroup, int, Group]], taught: Taught
    ) -> VerifiedGroups:
        groups, values = [group for _, _, group in complete], self._config.rollout.prefix_values
        verdicts, metrics = verifier.score(to_judge(groups, values))
        groups = taught(judged(groups, verdicts, values))
        whole = [(asked, attempt, group) for (asked, attempt, _), group in zip(complete, groups, strict=True)]
        to_train_on = {asked.request.number: group for asked, _, group in whole if asked.request.number >= 0}
        if to_train_on:
            verifier.write(to_train_on)
        return VerifiedGroups(whole, metrics)


class BatchStream(RayStream):
    """Hands out together all groups that were asked for, and journals none. Rewards score each group when it is
    complete, except the ones that need all answers of a step; the verdicts fall at the end. After a loss parts begin
    from the start, in the same engine and with the same batch, because a batch of another size is rounded differently.
    """

    def _route(self, part: AskedPart) -> tuple[int, list[str]]:
        return super()._route(part)[0] if part.sent is None else part.sent.engine, []

    def _can_hand_out(self) -> bool:
        return bool(self._ready) and len(self._ready) == len(self._asked)

    def _ask_again(self, version: int) -> None:
        if not any(self._load.values()):  # no weights arrive while others answer
            super()._ask_again(version)

    def _judged(self, groups: dict[int, Group]) -> tuple[dict[int, Group], Metrics]:
        # A call with a group that is generated again does not count: what it logged is about all its groups.
        pieces = [one.piece for one, _ in self._scored if one.piece is not None and one.is_current]
        values = self._config.rollout.prefix_values
        verdicts, metrics = self._verifiers.decide(to_judge(groups.values(), values), pieces)
        told = judged(groups.values(), verdicts, values)
        taught = self._teach(list(zip(groups, told, strict=True)), idle=True)
        return dict(zip(groups, taught(told), strict=True)), metrics

    def _again(self, lost: Sequence[AskedPart]) -> Iterable[Sequence[AskedPart]]:
        """All parts of the engines that died, and the parts that were lost although their engines live, in order. The
        complete answers of a dead engine are forgotten."""
        again: dict[int, list[AskedPart]] = {}
        with self._lock:
            for asked in self._asked.values():
                for part in asked.parts:
                    assert part.sent is not None, "it was asked for"
                    if part in lost or self._engines.engines[part.sent.engine] is not part.sent.actor:
                        again.setdefault(part.sent.batch, []).append(part)
                        if part.answers:
                            part.answers = None
                            asked.attempt += 1
                            self._ready.pop(asked.request.number, None)
        return again.values()

    def _verified(
        self, verifier: RayVerifier, complete: list[tuple[AskedGroup, int, Group]], taught: Taught
    ) -> VerifiedGroups:
        groups, values = [group for _, _, group in complete], self._config.rollout.prefix_values
        early = [i for i, reward in enumerate(self._config.rewards) if not reward.needs_all_answers]
        scored = verifier.scored(to_judge(groups, values), early) if early else {}
        groups = taught(groups)
        whole = [(asked, attempt, group) for (asked, attempt, _), group in zip(complete, groups, strict=True)]
        return VerifiedGroups(whole, {}, (to_judge(groups, values), scored))


def open_stream(
    config: GrpoRunConfig, engines: EngineGroup, verifiers: VerifierGroup, teachers: Teachers | None = None
) -> RayStream:
    """The stream of a run, which begins to verify."""
    return (RayStream if config.rollout.one_by_one else BatchStream)(config, engines, verifiers, teachers)
