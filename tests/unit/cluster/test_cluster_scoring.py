"""The scoring of a step whose groups finish in any order, with the rewards themselves in the place of their
processes."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import deadline

from megatron_rl.cluster.scoring import RayScoring, added_up, results
from megatron_rl.config.rewards import ComputeScoreReward, FunctionReward, LengthReward
from megatron_rl.types import Group, Prompt, Sample
from megatron_rl.verifiers import RewardSet, TrainerState
from megatron_rl.verifiers.answer import Answer
from megatron_rl.verifiers.failures import FailureLog


class Letters:
    def decode(self, ids, *, skip_special_tokens):
        return "".join(map(chr, ids))


def uneven(solution_str, ground_truth):
    """Fails on some answers, abstains on some, and tells a number about some of the others."""
    length = len(solution_str)
    if length % 5 == 4:
        raise RuntimeError("too odd")
    if length % 5 == 3:
        return None
    return {"score": length / 7} | ({"odd": 1 / (1 + length)} if length % 2 else {})


def place(completions, log_metric, log_extra, **columns):
    """Depends on the whole batch."""
    log_metric("largest", max(map(len, completions)))
    log_extra("of", [len(completions)] * len(completions))
    return list(range(len(completions)))


EARLY = [
    ComputeScoreReward(path=f"{__name__}:uneven"),
    LengthReward(target=4, weight=0.3, datasets=("one",)),
]
WHOLE = FunctionReward(path=f"{__name__}:place", weight=0.1)


class InProcess:
    """Scores as a verifier's process does. The text of an answer has the length that its group's payload says."""

    num_restarts = 0

    def __init__(self, rewards, gate=None):
        """
        Args:
            gate: is acquired before each call.
        """
        self._rewards, self._gate, self.calls = RewardSet(rewards, Letters(), ""), gate, []
        self.begun, self.done = threading.Semaphore(0), threading.Semaphore(0)

    def scored(self, groups, indices):
        self.begun.release()
        if self._gate:
            self._gate.acquire()
        self.calls.append([group.prompt.uid for group in groups])
        answers = [Answer(group.prompt, [97] * length, "stop") for group in groups for length in group.payload]
        own = [[i for i in call if i in indices] for call in self._rewards.calls]
        scored = {}
        for call in filter(None, own):
            scored.update(zip(call, self._rewards.score(call, answers, TrainerState(0, 1))))
        self.done.release()
        return scored

    def shaped(self, groups, verdicts):
        assert len(groups) == len(verdicts)
        return verdicts


def group(number: int, lengths) -> Group:
    columns = {"ground_truth": "x", "dataset": ("one", "two")[number % 2]}
    samples = [Sample(length, 0, length, 0, "stop", oldest_version=0) for length in lengths]
    return Group(Prompt(f"row {number}", (), "", columns), samples, lengths, 0)


def without_times(metrics):
    return {name: value for name, value in metrics.items() if not name.endswith("/seconds")}


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return FailureLog(tmp_path_factory.mktemp("logs") / "rewards.log")


@given(
    lengths=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=3), min_size=1, max_size=12),
    num_verifiers=st.integers(1, 3),
    random=st.randoms(use_true_random=False),
)
def test_any_order_and_any_number_of_verifiers_give_what_one_call_gives(failures, lengths, num_verifiers, random):
    groups = [group(number, own) for number, own in enumerate(lengths)]
    verdicts, metrics = added_up(EARLY, groups, InProcess(EARLY).scored(groups, range(2)), failures)
    # Drawn before a thread waits at the gate: hypothesis may end the example here.
    arriving = [(one, random.random() < 0.5) for one in random.sample(groups, len(groups))]
    gate = threading.Semaphore(0)
    verifiers = [InProcess(EARLY, gate) for _ in range(num_verifiers)]
    with RayScoring(EARLY, verifiers, failures) as scoring:
        for one, opens in arriving:
            scoring.add(one)
            if opens:
                gate.release()
        gate.release(len(groups))
        given_verdicts, given_metrics = scoring.finish(groups)
    assert given_verdicts == verdicts
    assert without_times(given_metrics) == without_times(metrics) | {"verifier/restarts": 0.0}, "to the bit"
    called = [uid for verifier in verifiers for call in verifier.calls for uid in call]
    assert sorted(called) == sorted(one.prompt.uid for one in groups), "each group is scored once"


def test_a_group_is_scored_while_others_are_generated(failures):
    scoring, groups = RayScoring(EARLY, [verifier := InProcess(EARLY)], failures), [group(0, [3]), group(1, [5, 2])]
    with scoring:
        scoring.add(groups[1])
        assert verifier.done.acquire(timeout=deadline(60.0)), "the first group waits for the second one"
        scoring.add(groups[0])
        verdicts, _ = scoring.finish(groups)
    assert verifier.calls == [["row 1"], ["row 0"]]
    assert [[verdict.parts for verdict in own] for own in verdicts] == [[(None, 0.75)], [(5 / 7, None), (2 / 7, None)]]


def test_a_function_is_called_once_with_all_answers_in_the_order_of_the_prompts(failures):
    rewards, groups = [WHOLE, *EARLY], [group(i, [i, 2 * i]) for i in range(6)]
    verifier = InProcess(rewards)
    with RayScoring(rewards, [verifier], failures) as scoring:
        for one in reversed(groups):
            scoring.add(one)
        verdicts, metrics = scoring.finish(groups)
    assert [verdict.parts[0] for own in verdicts for verdict in own] == [*range(12)]
    assert verdicts[0][0].details["place/of"] == 12 and metrics["reward/place/largest"] == 10
    assert verifier.calls[-1] == [one.prompt.uid for one in groups]


def test_only_functions_wait_for_the_end(failures):
    groups = [group(0, [1]), group(1, [2])]
    verifiers = [InProcess([WHOLE]) for _ in range(2)]
    with RayScoring([WHOLE], verifiers, failures) as scoring:
        scoring.add(groups[1])
        scoring.add(groups[0])
        assert not any(verifier.calls for verifier in verifiers)
        verdicts, _ = scoring.finish(groups)
    assert [verifier.calls for verifier in verifiers] == [[["row 0"]], [["row 1"]]], "each has a part of the step"
    assert [verdict.parts for own in verdicts for verdict in own] == [(0.0,), (0.0,)]


def test_groups_of_a_lost_engine_do_not_count(failures):
    lost, again = group(0, [4, 4]), group(0, [1, 2])
    with RayScoring(EARLY, [InProcess(EARLY)], failures) as scoring:
        scoring.add(lost)
        scoring.add(again)
        verdicts, metrics = scoring.finish([again])
    assert [[verdict.parts[0] for verdict in own] for own in verdicts] == [[1 / 7, 2 / 7]]
    assert metrics["reward/uneven/failed"] == 0, "both answers of the lost group fail"


def test_a_group_is_given_up_if_the_step_ends_before_its_scoring_begins(failures):
    gate = threading.Semaphore(0)
    verifier = InProcess(EARLY, gate)
    with RayScoring(EARLY, [verifier], failures) as scoring:
        scoring.add(group(0, [1]))
        assert verifier.begun.acquire(timeout=deadline(60.0))
        scoring.add(group(1, [1]))
    gate.release(2)
    with RayScoring(EARLY, [verifier], failures) as later:
        gate.release()
        later.add(last := group(2, [1]))
        later.finish([last])
    results(scoring._calls)
    assert sorted(verifier.calls) == [["row 0"], ["row 2"]]


def test_an_error_of_a_call_is_raised_at_the_end(failures):
    rewards = [ComputeScoreReward(path=f"{__name__}:uneven", on_error="stop")]
    with RayScoring(rewards, [InProcess(rewards)], failures) as scoring:
        scoring.add(bad := group(0, [4]))
        with pytest.raises(ValueError, match="reward uneven, row 0: .* too odd"):
            scoring.finish([bad])
