"""The budget of restarts: what it lets pass, how long it waits, and what it says at its end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from megatron_rl.cluster import restarts, waiting
from megatron_rl.cluster.engines import EngineRank
from megatron_rl.ports import TooManyRestarts


class Clock:
    """A clock on which pauses take no time."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.pauses = 1000.0, []
        monkeypatch.setattr(restarts.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(waiting, "pause", self.pause)

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def test_pauses_grow_and_the_end_tells_all_causes(monkeypatch):
    clock = Clock(monkeypatch)
    budget = restarts.Restarts(3)
    budget.spend("trainer rank 1 died\nits log ends")
    clock.now += 100
    budget.spend("engine 0 died")
    budget.spend("verifier died")
    assert clock.pauses == [1, 2]
    with pytest.raises(TooManyRestarts) as caught:
        budget.spend("trainer rank 2 died\nits log ends")
    assert str(caught.value) == (
        "trainer rank 2 died\nits log ends\n"
        "The run ends because it had 3 restarts within an hour, as many as cluster.restarts_per_hour allows:\n"
        "  103 s ago: trainer rank 1 died\n"
        "  3 s ago: engine 0 died\n"
        "  2 s ago: verifier died"
    )


def test_an_error_that_comes_again_before_anything_was_done_ends_the_run(monkeypatch):
    clock = Clock(monkeypatch)
    budget = restarts.Restarts(20)
    budget.spend("engine 0: head_dim=16", lasts=True)
    budget.progressed()
    budget.spend("engine 0: head_dim=16", lasts=True)
    budget.spend("engine 0: another", lasts=True)
    for _ in range(3):  # what was killed may be killed again
        budget.spend("engine 0 died")
    budget.spend("engine 0: head_dim=16", lasts=True)
    pauses = len(clock.pauses)
    with pytest.raises(
        TooManyRestarts, match=r"^engine 0: head_dim=16\nThe run ends because the same error came again"
    ):
        budget.spend("engine 0: head_dim=16", lasts=True)
    assert len(clock.pauses) == pauses, "it ends at once"


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (SimpleNamespace(alive=True, failure=lambda: ""), True),
        (SimpleNamespace(alive=False, failure=lambda: "head_dim=16"), "head_dim=16"),
    ],
)
def test_an_engine_says_why_it_does_not_work(engine, said):
    assert asyncio.run(EngineRank.alive(SimpleNamespace(engine=engine))) == said


def test_what_is_older_than_an_hour_is_forgotten(monkeypatch):
    clock = Clock(monkeypatch)
    budget = restarts.Restarts(1)
    for _ in range(5):
        budget.spend("engine 0 died")
        clock.now += 3601
    assert clock.pauses == []


def test_no_budget_means_that_the_first_loss_ends_the_run():
    with pytest.raises(TooManyRestarts) as caught:
        restarts.Restarts(0).spend("trainer rank 1 died")
    assert str(caught.value) == "trainer rank 1 died"


def test_pauses_are_bounded(monkeypatch):
    clock = Clock(monkeypatch)
    budget = restarts.Restarts(20)
    for _ in range(20):
        budget.spend("engine 0 died")
    assert max(clock.pauses) == restarts.LONGEST_PAUSE_S
