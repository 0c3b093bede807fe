"""Who is blamed when a verifier's process dies."""

from __future__ import annotations

from threading import Lock

import pytest

from megatron_rl.cluster.restarts import Restarts, TooManyRestarts
from megatron_rl.cluster.verifier import RayVerifier
from megatron_rl.cluster.waiting import ProcessLost

DOING = "to score with accuracy"


class Dying(RayVerifier):
    """A verifier whose process dies in some calls. A death is counted as `_ask_once` counts it."""

    def __init__(self, *outcomes, per_hour=3):
        self._lock, self._outcomes, self._restarts = Lock(), list(outcomes), Restarts(per_hour)
        self.num_deaths = 0

    def _ask_once(self, method, doing, timeout_s, *arguments):
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, ProcessLost):
            self.num_deaths += 1
            if not outcome.silent or outcome.stopped:
                self._restarts.spend(str(outcome))
            raise outcome
        return outcome

    @property
    def num_spent(self) -> int:
        return len(self._restarts._recent)


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr("megatron_rl.cluster.waiting.pause", lambda seconds: None)


def died(number: int, **facts) -> ProcessLost:
    return ProcessLost(f"verifier (process {number}) died", silent=False, **facts)


def test_a_reward_that_ends_its_process_in_every_step_is_named_and_uses_up_no_restarts():
    verifier = Dying(*map(died, range(20)))
    for _ in range(10):
        with pytest.raises(ProcessLost, match=r"^accuracy: the verifier's process died twice while it scored") as lost:
            verifier._ask("score", DOING, 1.0)
        assert not lost.value.silent
    assert verifier.num_deaths == 20 and verifier.num_spent == 0


def test_a_death_from_outside_is_counted():
    verifier = Dying(died(1), "scores", died(2), "scores")
    assert [verifier._ask("score", DOING, 1.0) for _ in range(2)] == ["scores"] * 2
    assert verifier.num_spent == 2


def test_two_deaths_of_which_one_came_from_outside_or_that_no_reward_can_cause_are_counted():
    for method, second in (("score", died(2, stopped=True)), ("write", died(2))):
        verifier = Dying(died(1), second)
        with pytest.raises(ProcessLost, match=r"^verifier \(process 2\) died"):
            verifier._ask(method, DOING, 1.0)
        assert verifier.num_spent == 2


def test_too_many_deaths_from_outside_end_the_run():
    verifier = Dying(*(outcome for number in range(4) for outcome in (died(number), "scores")), per_hour=3)
    for _ in range(3):
        verifier._ask("score", DOING, 1.0)
    with pytest.raises(TooManyRestarts):
        verifier._ask("score", DOING, 1.0)
