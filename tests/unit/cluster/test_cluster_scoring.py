"""The verdicts of a step whose groups finish in any order, with the rewards themselves in the place of their
processes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from answering import answered
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.cluster.scoring import added_up
from megatron_rl.cluster.verifier import VerifierGroup, VerifierRank
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.rewards import ComputeScoreReward, FunctionReward, LengthReward
from megatron_rl.types import Group, Prompt, Rollout, Tokens
from megatron_rl.verifiers import RewardSet, TrainerState
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


def refuses(completions, **columns):
    raise RuntimeError("too odd")


EARLY = [
    ComputeScoreReward(path=f"{__name__}:uneven"),
    LengthReward(target=4, weight=0.3, datasets=("one",)),
]
WHOLE = FunctionReward(path=f"{__name__}:place", weight=0.1)


class InProcess:
    """Scores as a verifier's process does. The text of an answer has the length that its group's payload says."""

    def __init__(self, rewards):
        self._rewards, self.calls = RewardSet(rewards, Letters(), ""), []

    def scored(self, groups, indices):
        self.calls.append([group.prompt.uid for group in groups])
        answers = [answered(group.prompt, [97] * length, "stop") for group in groups for length in group.payload]
        own = [[i for i in call if i in indices] for call in self._rewards.calls]
        scored = {}
        for call in filter(None, own):
            scored.update(zip(call, self._rewards.score(call, answers, TrainerState(0, 1)), strict=True))
        return scored


def group(number: int, lengths) -> Group:
    columns = {"ground_truth": "x", "dataset": ("one", "two")[number % 2]}
    samples = [Rollout(length, 0, length, 0, "stop", oldest_version=0) for length in lengths]
    return Group(Prompt(f"row {number}", (), "", columns), samples, lengths, 0)


def without_times(metrics):
    return {name: value for name, value in metrics.items() if not name.endswith("/seconds")}


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return FailureLog(tmp_path_factory.mktemp("logs") / "rewards.log")


def group_of(rewards, verifiers, failures) -> VerifierGroup:
    """Verifiers without processes."""
    whole = VerifierGroup.__new__(VerifierGroup)
    whole._rewards, whole._shaping, whole.verifiers, whole._failures = rewards, (), verifiers, failures
    return whole


@given(
    lengths=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=3), min_size=1, max_size=12),
    num_verifiers=st.integers(1, 3),
    random=st.randoms(use_true_random=False),
)
def test_any_pieces_and_any_number_of_verifiers_give_what_one_call_gives(failures, lengths, num_verifiers, random):
    groups = [group(number, own) for number, own in enumerate(lengths)]
    verdicts, metrics = added_up(EARLY, groups, InProcess(EARLY).scored(groups, range(2)), failures)
    verifiers = [InProcess(EARLY) for _ in range(num_verifiers)]
    left, pieces = random.sample(groups, len(groups)), []
    while left:
        size = random.randint(1, len(left))
        taken, left = left[:size], left[size:]
        pieces.append((taken, random.choice(verifiers).scored(taken, range(2))))
    pieces = [piece for piece in pieces if random.random() < 0.8]  # the others are scored again
    given_verdicts, given_metrics = group_of(EARLY, verifiers, failures).decide(groups, pieces)
    assert given_verdicts == verdicts
    assert without_times(given_metrics) == without_times(metrics), "to the bit"


def test_a_function_is_called_once_with_all_answers_in_the_order_of_the_prompts(failures):
    rewards, groups = [WHOLE, *EARLY], [group(i, [i, 2 * i]) for i in range(6)]
    verifier = InProcess(rewards)
    pieces = [([one], verifier.scored([one], (1, 2))) for one in reversed(groups)]
    verdicts, metrics = group_of(rewards, [verifier], failures).decide(groups, pieces)
    assert [verdict.parts[0] for own in verdicts for verdict in own] == [*range(12)]
    assert verdicts[0][0].details["place/of"] == 12 and metrics["reward/place/largest"] == 10
    assert verifier.calls[-1] == [one.prompt.uid for one in groups]


def test_each_verifier_calls_a_function_for_its_part_of_the_step(failures):
    groups, verifiers = [group(0, [1]), group(1, [2])], [InProcess([WHOLE]) for _ in range(2)]
    verdicts, _ = group_of([WHOLE], verifiers, failures).decide(groups, [])
    assert [verifier.calls for verifier in verifiers] == [[["row 0"]], [["row 1"]]]
    assert [verdict.parts for own in verdicts for verdict in own] == [(0.0,), (0.0,)]


def test_groups_of_a_lost_engine_do_not_count(failures):
    lost, again, verifier = group(0, [4, 4]), group(0, [1, 2]), InProcess(EARLY)
    pieces = [([one], verifier.scored([one], range(2))) for one in (lost, again)]
    verdicts, metrics = group_of(EARLY, [verifier], failures).decide([again], pieces)
    assert [[verdict.parts[0] for verdict in own] for own in verdicts] == [[1 / 7, 2 / 7]]
    assert metrics["reward/uneven/failed"] == 0, "both answers of the lost group fail"


def test_an_error_of_a_call_is_raised(failures):
    rewards = [FunctionReward(path=f"{__name__}:refuses", on_error="stop")]
    with pytest.raises(ValueError, match="row 0: .*too odd"):
        group_of(rewards, [InProcess(rewards)], failures).decide([group(0, [4])], [])


def test_the_verifiers_process_counts_what_shaping_needs():
    rewards = [ComputeScoreReward(path=f"{__name__}:uneven"), LengthReward(target=4)]
    rank = VerifierRank.__new__(VerifierRank)
    rank.config = SimpleNamespace(
        algorithm=AlgorithmConfig(shaping=({"kind": "repetition", "ngram_size": 2},)),
        rewards=rewards,
        run=SimpleNamespace(steps=1),
    )
    rank.rewards, rank._judged = RewardSet(rewards, Letters(), ""), ([], [], [])
    ids = np.array([7, 97, 98, 97, 98, 97], np.int32)
    tokens = Tokens(ids, ids > 7, np.zeros(6, np.float32), np.zeros(6, np.int32))
    one = Prompt("row 0", (7,), "", {"ground_truth": "x", "dataset": "one"})
    for call in rank.rewards.calls:
        given = rank.score(call, 0, [one], [[tokens]], [[Rollout(6, 1, 5, 0, "stop")]])
        assert [scored.verdicts[0].repeated for scored in given] == [{2: 0.5}] * len(call)
