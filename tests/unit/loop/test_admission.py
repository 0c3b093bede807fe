"""Admission under any order in which groups finish, against its invariants, and small cases by hand."""

from __future__ import annotations

import random
from collections import Counter

import cover
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.loop.admission import Admission


class Play:
    """A run of steps in which a random generator decides which groups finish, and which ones are useful."""

    def __init__(self, batch: int, max_lag: int, seed: int, useful: float = 1.0, waits: bool = True):
        self.admission = Admission(batch, max_lag, waits)
        self.random, self.useful = random.Random(seed), useful
        self.admitted: dict[int, int] = {}
        self.taken: list[int] = []
        self.lags: list[int] = []

    def refill(self, version: int) -> None:
        for _ in range(self.admission.room(10**6)):
            number = len(self.admitted)
            self.admitted[number] = version
            self.admission.admit(number, version)

    def finish_some(self, at_most: int | None = None) -> None:
        running = list(self.admission.running)
        for number in self.random.sample(running, self.random.randint(0, min(len(running), at_most or len(running)))):
            is_ready = self.admission.finish(number, useful=self.random.random() < self.useful)
            assert is_ready == (number in self.admission.ready)

    def step(self, step: int) -> list[int]:
        self.refill(step)
        self.finish_some()
        while (taken := self.admission.take(step)) is None:
            self.refill(step)
            assert self.admission.running, "the step waits for nothing"
            self.finish_some(at_most=3)
        self.lags += [step - self.admitted[number] for number in taken]
        self.taken += taken
        return taken


@pytest.mark.parametrize("part", cover.essential(range(4), 0))  # each has examples of its own
@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 10**6))
def test_every_group_is_taken_once_and_in_time(part, batch, max_lag, seed):
    play = Play(batch, max_lag, seed)
    for step in range(20):
        assert len(play.step(step)) == batch
        waiting = len(play.admission.running) + len(play.admission.ready)
        assert waiting == max_lag * batch, "what runs and what waits is max_lag + 1 batches, less the one just taken"
    assert max(play.lags) <= max_lag
    assert len(set(play.taken)) == len(play.taken) == 20 * batch
    assert sorted([*play.taken, *play.admission.running, *play.admission.ready]) == list(range(len(play.admitted)))
    assert play.admission.num_surplus == play.admission.num_useless == 0


@pytest.mark.parametrize("part", cover.essential(range(4), 0))  # each has examples of its own
@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(0, 4), st.sampled_from([0.0625, 0.1, 0.5, 0.9]), st.integers(0, 10**6))
def test_the_batch_is_full_however_few_groups_are_useful(part, batch, max_lag, useful, seed):
    play = Play(batch, max_lag, seed, useful)
    for step in range(12):
        assert len(play.step(step)) == batch
    assert max(play.lags) <= max_lag
    counted = [*play.taken, *play.admission.running, *play.admission.ready]
    assert len(set(counted)) == len(counted)
    assert len(counted) + play.admission.num_useless + play.admission.num_surplus == len(play.admitted)


@pytest.mark.parametrize("part", cover.essential(range(4), 0))  # each has examples of its own
@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(0, 4), st.sampled_from([0.1, 0.5, 1.0]), st.integers(0, 10**6))
def test_a_step_with_a_full_batch_never_waits_if_late_groups_are_given_up(part, batch, max_lag, useful, seed):
    play = Play(batch, max_lag, seed, useful, waits=False)
    for step in range(12):
        play.refill(step)
        play.finish_some()
        has_batch = len(play.admission.ready) >= batch
        taken = play.admission.take(step)
        assert (taken is not None) == has_batch
        if taken is None:
            play.step(step)
        else:
            play.lags += [step - play.admitted[number] for number in taken]
            play.taken += taken
    assert max(play.lags) <= max_lag and len(play.taken) == 12 * batch
    admission = play.admission
    counted = [*play.taken, *admission.running, *admission.ready]
    assert len(set(counted)) == len(counted) and not set(admission.late) & set(counted)
    gone = admission.num_useless + admission.num_surplus + len(admission.late)
    assert len(counted) + gone == len(play.admitted)


def test_only_the_groups_that_are_too_many_are_given_up_and_the_oldest_first():
    admission = Admission(2, max_lag=1, waits=False)
    for number in range(4):
        admission.admit(number, 0)
    for number in (2, 3):
        admission.finish(number, useful=True)
    assert admission.take(0) == [2, 3]
    for number in (4, 5):
        admission.admit(number, 1)
        admission.finish(number, useful=True)
    assert admission.take(1) == [4, 5] and admission.late == [0, 1]
    assert admission.room(10**6) == 4, "others run in their places"


def test_a_step_waits_for_the_groups_that_it_alone_can_take():
    admission = Admission(2, max_lag=1)
    for number in range(4):
        admission.admit(number, 0)
    for number in (2, 3):
        admission.finish(number, useful=True)
    assert admission.take(0) == [2, 3]
    assert admission.room(10**6) == 2
    for number in (4, 5):
        admission.admit(number, 1)
        admission.finish(number, useful=True)
    assert admission.take(1) is None, "0 and 1 have version 0, and in step 2 they would be too old"
    admission.finish(1, useful=True)
    assert admission.take(1) is None
    admission.finish(0, useful=True)
    assert admission.take(1) == [0, 1]


def test_more_groups_run_if_few_are_useful_and_what_is_too_much_is_counted():
    admission = Admission(2, max_lag=0)
    admission.share = 0.5
    assert admission.room(10**6) == 4
    for number in range(4):
        admission.admit(number, 0)
    for number in (1, 2, 3):
        admission.finish(number, useful=True)
    assert admission.take(0) is None, "the rest of the step's own groups might be among the long ones"
    admission.finish(0, useful=True)
    assert admission.take(0) == [0, 1]
    assert admission.num_surplus == 2 and not admission.ready


def test_more_useful_groups_than_expected_never_make_a_lag_too_large():
    admission = Admission(2, max_lag=1)
    admission.share = 0.25
    for number in range(admission.room(10**6)):
        admission.admit(number, 0)
    for number in list(admission.running):
        admission.finish(number, useful=True)
    assert len(admission.ready) == 16
    assert admission.take(0) == [0, 1]
    assert admission.take(1) == [2, 3], "step 1 is the last one that may train on version 0"
    assert not admission.ready and admission.num_surplus == 12


def test_no_group_is_admitted_that_no_step_will_take():
    admission = Admission(2, max_lag=3)
    assert [admission.room(num_steps) for num_steps in (0, 1, 3, 9)] == [0, 2, 6, 8]


def test_long_answers_are_not_starved():
    """Lengths are drawn for the stream; a group finishes when its time has come. The lengths of what the steps take are
    those of the stream, in every quarter of the distribution."""
    rng = random.Random(0)
    length = {number: rng.lognormvariate(0, 1.2) for number in range(20_000)}
    admission, number, now, taken = Admission(32, max_lag=2), 0, 0.0, []
    ends: dict[int, float] = {}
    for step in range(500):
        for _ in range(admission.room(10**6)):
            admission.admit(number, step)
            ends[number] = now + length[number]
            number += 1
        while (batch := admission.take(step)) is None:
            first = min(admission.running, key=ends.__getitem__)
            now = max(now, ends[first])
            admission.finish(first, useful=True)
        taken += batch
        now += 0.3
    bounds = sorted(length[n] for n in range(number))
    quarters = Counter(sum(length[n] > bounds[len(bounds) * q // 4] for q in (1, 2, 3)) for n in taken)
    assert all(quarters[q] / len(taken) == pytest.approx(0.25, abs=0.002) for q in range(4))
    assert set(range(number)) - set(taken) == {*admission.running, *admission.ready}
