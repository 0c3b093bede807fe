"""The stream between in-process engines whose answers end when a test says so, and an in-process verifier; and how long
engines have nothing to do."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayTaskError

from megatron_rl.cluster.stream import IdleTime, RayStream, deal, largest_part
from megatron_rl.cluster.waiting import leave
from megatron_rl.types import Prompt, Sample, Verdict

ROW = Prompt("row", (5, 6, 7), "")


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
    rollout.prefix_values = SimpleNamespace(rollouts=9)
    assert largest_part(rollout) == 8, "samples that go on from passages are behind all others of their group"


class HeldEngine:
    """Answers when it is told. Its methods are called as those of a Ray actor."""

    def __init__(self):
        self.calls: list[tuple[int, range, list[str], Future]] = []
        self.cancelled: list[int] = []
        self.answer = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._answer))
        self.cancel = SimpleNamespace(remote=self.cancelled.append)
        self.alive = SimpleNamespace(remote=lambda: None)

    def _answer(self, ticket, number, prompt, samples, earlier):
        future: Future = Future()
        self.calls.append((ticket, samples, earlier, future))
        return SimpleNamespace(future=lambda: future), f"tokens {number} {samples}"

    def end(self, call: int = 0) -> None:
        _, samples, _, future = self.calls.pop(call)
        # The prompt's length stands for the sample's number.
        future.set_result([Sample(9, i, 1, 0, "stop", oldest_version=0) for i in samples])

    def lose(self, call: int = 0) -> None:
        self.calls.pop(call)[3].set_exception(RayTaskError("answer", "lost", RuntimeError("a push failed")))


class OnesVerifier:
    def __init__(self):
        self.journal: list[int] = []

    def score(self, groups):
        return [[Verdict(1.0) for _ in group.samples] for group in groups], {"reward/ones/seconds": 0.0}

    def write(self, groups):
        self.journal += groups


@pytest.fixture
def stage(monkeypatch):
    """A stream with two engines; groups of 8 are dealt in two parts."""
    engines, verifier = [HeldEngine(), HeldEngine()], OnesVerifier()
    rollout = SimpleNamespace(max_lag=0, prompts_per_step=4, samples_per_prompt=8, num_engines=2, prefix_values=None)
    cluster, policy = SimpleNamespace(step_timeout_s=60.0), SimpleNamespace(routing_replay=False)
    config = SimpleNamespace(rollout=rollout, cluster=cluster, policy=policy)
    group = SimpleNamespace(
        engines=engines,
        processes=[SimpleNamespace(name=f"engine {i}", log="its log", actor=e) for i, e in enumerate(engines)],
        record_of={0: "record 0", 1: "record 1"},
        is_dead=lambda index: False,
    )
    yield SimpleNamespace(
        stream=RayStream(config, group, SimpleNamespace(verifiers=[verifier])), engines=engines, verifier=verifier
    )
    leave(10.0)


def test_a_group_is_complete_when_all_its_parts_are(stage):
    first, second = stage.engines
    stage.stream.ask(7, ROW, 8, version=3)
    assert [call[1] for engine in stage.engines for call in engine.calls] == [range(4), range(4, 8)]
    second.end()
    stage.stream.ask(8, ROW, 8, version=3)
    assert [len(engine.calls) for engine in stage.engines] == [2, 1], "the engine with fewer answers gets the next part"
    first.end()
    verified = stage.stream.collect(3)
    [(number, group)] = verified.groups.items()
    assert number == 7 and group.version == 3 and stage.verifier.journal == [7]
    assert [sample.num_prompt_tokens for sample in group.samples] == list(range(8)), "in the order of the samples"
    assert group.payload.parts == (("tokens 7 range(0, 4)",), ("tokens 7 range(4, 8)",))
    assert all(sample.verdict.score == 1 for sample in group.samples)


def test_a_cancelled_group_is_never_handed_out_and_can_be_asked_for_again(stage):
    stage.stream.ask(7, ROW, 8, version=0)
    stage.engines[1].end()
    [ticket] = {call[0] for call in stage.engines[0].calls}
    stage.stream.cancel(7)
    assert all(engine.cancelled == [ticket] for engine in stage.engines)
    stage.stream.ask(7, ROW, 8, version=1)
    stage.engines[0].end()  # that of the cancelled group: it had just ended
    again = [call for engine in stage.engines for call in engine.calls]
    assert [call[1] for call in again] == [range(4), range(4, 8)] and {call[0] for call in again} == {ticket + 1}
    assert all(call[2] == [] for call in again), "it begins anew"
    for engine in stage.engines:
        while engine.calls:
            engine.end()
    [group] = stage.stream.collect(1).groups.values()
    assert group.version == 1 and len(group.samples) == 8 and stage.verifier.journal == [7]
    assert not +stage.stream._load, "no engine works on anything"


def test_a_lost_part_goes_on_elsewhere_and_the_others_are_kept(stage):
    first, second = stage.engines
    stage.stream.ask(7, ROW, 8, version=0)
    stage.stream.ask(-1, ROW, 4, version=0)  # an evaluation; the loads are 8 and 4
    second.end()
    first.lose()
    first.end()
    verified = stage.stream.collect(0)
    assert list(verified.groups) == [-1] and verified.metrics["stream/asked_again"] == 1 and not stage.verifier.journal
    [(_, samples, earlier, _)] = [*first.calls, *second.calls]
    assert samples == range(4) and earlier == ["record 0"]
    next(engine for engine in stage.engines if engine.calls).end()
    [group] = stage.stream.collect(0).groups.values()
    assert [sample.num_prompt_tokens for sample in group.samples] == list(range(8)) and stage.verifier.journal == [7]


def test_a_group_that_is_lost_too_often_ends_the_run(stage):
    stage.stream.ask(7, ROW, 4, version=0)
    for _ in range(2):
        next(engine for engine in stage.engines if engine.calls).lose()
        with pytest.raises(AskedAgain):
            collect_until_asked_again(stage)
    next(engine for engine in stage.engines if engine.calls).lose()
    with pytest.raises(RuntimeError, match="a push failed"):
        stage.stream.collect(0)


class AskedAgain(Exception):
    pass


def collect_until_asked_again(stage) -> None:
    """`collect` asks again and then waits for ever; this ends it in between."""
    original = stage.stream._send

    def send(part):
        original(part)
        raise AskedAgain

    stage.stream._send = send
    try:
        stage.stream.collect(0)
    finally:
        stage.stream._send = original
