"""The stream between in-process engines whose answers end when a test says so, and an in-process verifier; and how long
engines have nothing to do."""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayActorError, RayTaskError

from megatron_rl.cluster.deadlines import Deadlines
from megatron_rl.cluster.payloads import StoredTokens
from megatron_rl.cluster.process import Process
from megatron_rl.cluster.running_groups import IdleTime, deal, largest_part
from megatron_rl.cluster.stream import open_stream
from megatron_rl.cluster.waiting import leave
from megatron_rl.types import GroupRequest, Prompt, Rollout, Verdict

ROW = Prompt("row", (5, 6, 7), "")
REWARDS = [SimpleNamespace(needs_all_answers=False), SimpleNamespace(needs_all_answers=True)]


def test_idle_time_adds_up_over_engines_and_calls():
    idle = IdleTime([0, 1], now=10.0)
    idle.begin_work(0, 12.0)
    assert idle.take(13.0) == (2.0 + 3.0, 3.0)
    idle.begin_work(0, 14.0)  # another group of a busy engine
    idle.end_work(0, 15.0)
    idle.begin_work(1, 16.0)
    assert idle.take(20.0) == (5.0 + 3.0, 7.0)
    assert idle.take(21.0) == (1.0, 1.0)


@given(st.integers(1, 64), st.integers(1, 64))
def test_a_group_is_dealt_in_the_fewest_equal_parts(num_samples, largest):
    parts = deal(num_samples, largest)
    assert [sample for part in parts for sample in part] == list(range(num_samples))
    sizes = [len(part) for part in parts]
    assert max(sizes) <= largest and max(sizes) - min(sizes) <= 1 and len(parts) == -(-num_samples // largest)


@pytest.mark.parametrize(
    ("engines", "lag", "largest"),
    [
        (1, 0, 64),
        (2, 1, 64),
        (160, 1, 3),  # 128 prompts x 8 on each of 20 nodes of 8 engines
        (2000, 0, 1),
    ],
)
def test_an_engine_works_on_several_parts(engines, lag, largest):
    prompts = 32 if engines < 3 else 128
    rollout = SimpleNamespace(
        max_lag=lag, prompts_per_step=prompts, samples_per_prompt=8, num_engines=engines, prefix_values=None
    )
    assert largest_part(rollout) == largest
    rollout.prefix_values = SimpleNamespace(rollouts=9, by="engine")
    assert largest_part(rollout) == 8, "a branch counts all answers of its group"


class HeldEngine:
    """Answers when it is told. Its methods are called as those of a Ray actor."""

    def __init__(self):
        self.calls: list[tuple[int, range, list[str], Future]] = []
        self.batches: list[tuple[int, int]] = []
        self.cancelled: list[int] = []
        self.answer = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._answer))
        self.cancel = SimpleNamespace(remote=self.cancelled.append)
        self.alive = SimpleNamespace(remote=lambda: None)

    def _answer(self, ticket, asked, samples, version, batch, earlier):
        future: Future = Future()
        self.calls.append((ticket, samples, earlier, future))
        self.batches.append(batch)
        return SimpleNamespace(future=lambda: future), *(f"tokens {asked.number} {i}" for i in samples)

    def end(self, call: int = 0) -> None:
        _, samples, _, future = self.calls.pop(call)
        # The prompt's length stands for the sample's number.
        rollouts = [Rollout(9, i, 1, 0, "stop", oldest_version=0) for i in samples]
        future.set_result((rollouts, [], [[1] * len(samples)]))

    def lose(self, call: int = 0) -> None:
        self.calls.pop(call)[3].set_exception(RayTaskError("answer", "lost", RuntimeError("a push failed")))

    def die(self) -> None:
        while self.calls:
            self.calls.pop()[3].set_exception(RayActorError())


class OnesVerifier:
    num_restarts = 0

    def __init__(self):
        self.journal: list[int] = []
        self.decided: list[list[list[StoredTokens]]] = []

    def score(self, groups):
        return [[Verdict(1.0) for _ in group.rollouts] for group in groups], {"reward/ones/seconds": 0.0}

    def scored(self, groups, indices):
        assert list(indices) == [0], "the other reward needs the whole step"
        return {0: len(groups)}

    def decide(self, groups, pieces):
        """Asked once for a step, with pieces of its own groups."""
        self.decided.append([group.payload for group in groups])
        scored = [group.payload for own, _ in pieces for group in own]
        assert scored and all(payload in self.decided[-1] for payload in scored)
        return self.score(groups)

    def write(self, groups):
        self.journal += groups


class AnyTeachers:
    """Says whom it was asked for, and gives each group a name."""

    def __init__(self):
        self.asked: list[str] = []

    def begin(self, groups, idle=False):
        if idle:  # all have been asked
            return []
        self.asked += [group.prompt.uid for group in groups]
        return [f"scores of {group.prompt.uid}" for group in groups]

    def finish(self, groups, asked):
        given = zip(groups, asked or [None] * len(groups), strict=True)
        return [self._with(group, one) if one else group for group, one in given]

    def _with(self, group, scores):
        return replace(group, payload=[replace(one, teacher=scores) for one in group.payload])


def make_stage(is_asynchronous: bool, teachers: AnyTeachers | None = None) -> SimpleNamespace:
    """A stream with two engines; groups of 8 are dealt in two parts."""
    engines, verifier = [HeldEngine(), HeldEngine()], OnesVerifier()
    rollout = SimpleNamespace(max_lag=0, prompts_per_step=4, samples_per_prompt=8, num_engines=2, prefix_values=None)
    rollout.one_by_one = rollout.overlaps = is_asynchronous
    config = SimpleNamespace(rollout=rollout, policy=SimpleNamespace(routing_replay=False), rewards=REWARDS)
    group = SimpleNamespace(
        engines=engines,
        processes=[Process(f"engine {i}", Path(os.devnull), engine) for i, engine in enumerate(engines)],
        record_of={0: "record 0", 1: "record 1"},
        is_dead=lambda index: False,
        before=lambda: None,
        deadlines=Deadlines(60.0),
        answered=lambda: None,
        loads_weights=False,
    )
    verifiers = SimpleNamespace(verifiers=[verifier], num_restarts=0, decide=verifier.decide)
    stream = open_stream(config, group, verifiers, teachers)
    return SimpleNamespace(stream=stream, engines=engines, verifier=verifier, group=group)


@pytest.fixture
def stage():
    yield make_stage(is_asynchronous=True)
    leave(10.0)


@pytest.fixture
def batch():
    yield make_stage(is_asynchronous=False)
    leave(10.0)


def ask(stage, number: int, num_samples: int, version: int) -> None:
    stage.stream.ask([GroupRequest(number, ROW, num_samples, (number,))], version)


def test_a_group_is_complete_when_all_its_parts_are(stage):
    first, second = stage.engines
    ask(stage, 7, 8, version=3)
    assert [call[1] for engine in stage.engines for call in engine.calls] == [range(4), range(4, 8)]
    second.end()
    ask(stage, 8, 8, version=3)
    assert [len(engine.calls) for engine in stage.engines] == [2, 1], "the engine with fewer answers gets the next part"
    first.end()
    verified = stage.stream.collect(3)
    [(number, group)] = verified.groups.items()
    assert number == 7 and group.version == 3 and stage.verifier.journal == [7]
    assert [sample.num_prompt_tokens for sample in group.rollouts] == list(range(8)), "in the order of the samples"
    assert group.payload == [StoredTokens((f"tokens 7 {i}", 0)) for i in range(8)]
    assert group.engines == [0] * 4 + [1] * 4
    assert all(sample.verdict.score == 1 for sample in group.rollouts)


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_groups_that_are_trained_on_get_their_teachers_scores(is_asynchronous):
    """Before the journal has them, and with the verdicts that were made meanwhile."""
    stage = make_stage(is_asynchronous, AnyTeachers())
    ask(stage, 7, 8, version=0)
    ask(stage, -1, 4, version=0)  # an evaluation
    for engine in stage.engines:
        while engine.calls:
            engine.end()
    groups: dict = {}
    while len(groups) < 2:
        groups |= stage.stream.collect(0).groups
    assert {one.teacher for one in groups[7].payload} == {"scores of row"}
    assert {one.teacher for one in groups[-1].payload} == {None}
    assert all(one.verdict.score == 1 for group in groups.values() for one in group.rollouts)
    assert len(stage.stream._teachers.asked) == 1
    leave(10.0)


def test_a_cancelled_group_is_never_handed_out_and_can_be_asked_for_again(stage):
    ask(stage, 7, 8, version=0)
    stage.engines[1].end()
    [ticket] = {call[0] for call in stage.engines[0].calls}
    stage.stream.cancel(7)
    assert all(engine.cancelled == [ticket] for engine in stage.engines)
    ask(stage, 7, 8, version=1)
    stage.engines[0].end()  # that of the cancelled group: it had just ended
    again = [call for engine in stage.engines for call in engine.calls]
    assert [call[1] for call in again] == [range(4), range(4, 8)] and len({call[0] for call in again} - {ticket}) == 1
    assert all(call[2] == [] for call in again), "it begins again"
    for engine in stage.engines:
        while engine.calls:
            engine.end()
    [group] = stage.stream.collect(1).groups.values()
    assert group.version == 1 and len(group.rollouts) == 8 and stage.verifier.journal == [7]
    assert not +stage.stream._load, "no engine works on anything"


def test_a_lost_part_goes_on_elsewhere_and_the_others_are_kept(stage):
    first, second = stage.engines
    ask(stage, 7, 8, version=0)
    ask(stage, -1, 4, version=0)  # an evaluation; the loads are 8 and 4
    second.end()
    first.lose()
    first.end()
    verified = stage.stream.collect(0)
    assert list(verified.groups) == [-1] and verified.metrics["stream/asked_again"] == 1 and not stage.verifier.journal
    [(_, samples, earlier, _)] = [*first.calls, *second.calls]
    assert samples == range(4) and earlier == ["record 0"]
    next(engine for engine in stage.engines if engine.calls).end()
    [group] = stage.stream.collect(0).groups.values()
    assert [sample.num_prompt_tokens for sample in group.rollouts] == list(range(8)) and stage.verifier.journal == [7]


def test_a_group_that_is_lost_too_often_ends_the_run(stage):
    ask(stage, 7, 4, version=0)
    for _ in range(2):
        next(engine for engine in stage.engines if engine.calls).lose()
        with pytest.raises(AskedAgain):
            collect_until_asked_again(stage)
    next(engine for engine in stage.engines if engine.calls).lose()
    with pytest.raises(RuntimeError, match="a push failed"):
        stage.stream.collect(0)


def test_groups_that_are_asked_for_together_begin_together_in_each_engine(batch):
    batch.stream.ask([GroupRequest(i, ROW, 4, (i,)) for i in range(3)], 0)
    ask(batch, 3, 4, version=0)
    first, second = (engine.batches for engine in batch.engines)
    assert [size for _, size in first] == [2, 2] and [size for _, size in second] == [1, 1]
    assert first[0] == first[1] and first[0][0] == second[0][0] != second[1][0]


def test_a_batch_is_handed_out_together_and_the_journal_stays_empty(batch):
    batch.stream.ask([GroupRequest(i, ROW, 4, (i,)) for i in (7, 8, 9)], 0)
    for _ in range(3):
        next(engine for engine in reversed(batch.engines) if engine.calls).end()
    collected = batch.stream.collect(0)
    assert list(collected.groups) == [7, 8, 9] and not batch.verifier.journal
    assert batch.verifier.decided == [[group.payload for group in collected.groups.values()]]


def test_of_a_batch_all_that_a_dead_engine_has_had_is_generated_again_and_the_rest_is_kept(batch):
    """Engine 0 has answered group 7, and dies with group 9. What it has answered begins again, from the start."""
    first, second = batch.engines
    batch.stream.ask([GroupRequest(i, ROW, 4, (i,)) for i in (7, 8, 9)], 0)
    first.end()
    second.end()
    batch.group.is_dead = lambda index: batch.group.engines[index] is first
    brought, new = [], HeldEngine()

    def bring_weights(version):
        brought.append(version)
        batch.group.engines[0] = batch.group.processes[0].actor = new

    batch.group.bring_weights = bring_weights
    first.die()
    with pytest.raises(AskedAgain):
        collect_until_asked_again(batch)
    asked = [call for engine in (new, second) for call in engine.calls]
    assert brought == [0] and [call[2] for call in asked] == [[], []], "from the start"
    assert [size for _, size in new.batches] == [2, 2], "a batch of another size is rounded differently"
    awaited = [p for one in batch.stream._asked.values() for p in one.parts if not p.answers]
    assert len(awaited) == 2, "an engine that does not answer them in time is replaced"
    for engine in (new, second):
        while engine.calls:
            engine.end()
    collected = batch.stream.collect(0)
    assert list(collected.groups) == [7, 8, 9] and collected.metrics["stream/asked_again"] == 2
    assert not +batch.stream._load, "no engine works on anything"


class AskedAgain(Exception):
    pass


def collect_until_asked_again(stage) -> None:
    """`collect` asks again and then waits for ever; this ends it in between."""
    original = stage.stream._send

    def send(parts, version):
        original(parts, version)
        raise AskedAgain

    stage.stream._send = send
    try:
        stage.stream.collect(0)
    finally:
        stage.stream._send = original
