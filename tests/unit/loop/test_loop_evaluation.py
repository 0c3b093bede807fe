"""Accuracies of evaluations, against values that were computed by hand."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_ports import config

from megatron_rl.loop.evaluation import describe_heldout, interval, majority, pass_at_k
from megatron_rl.types import Group, Prompt, Rollout, Verdict


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(right, data):
    k = data.draw(st.integers(1, len(right)))
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(fmean(map(any, combinations(right, k))))


def test_pass_at_k_by_hand():
    assert [pass_at_k(4, 2, k) for k in (1, 2, 4)] == [1 / 2, 5 / 6, 1]
    assert [pass_at_k(8, 0, k) for k in (1, 8)] == [0, 0]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(True, "7"), (False, "8"), (True, "7")], 1),
        ([(False, "8"), (False, "8"), (True, "7")], 0),
        ([(True, "7"), (False, "8")], 1 / 2),  # a tie
        ([(True, "7"), (False, "8"), (False, "9")], 1 / 3),
        ([(False, None), (False, None), (True, "7")], 1),  # None has no vote
        ([(False, None), (False, None)], 0),
    ],
)
def test_the_most_frequent_final_answer_decides(answers, expected):
    assert majority(answers) == pytest.approx(expected)


def test_the_interval_is_wilsons_for_one_answer_to_each_prompt():
    half = [0.0] * 5 + [1.0] * 5
    # Wilson's interval for 5 of 10 is 0.2366 to 0.7634; the variance between prompts is that of a sample, so 9 count.
    assert interval(0.5, half, 10) == pytest.approx((0.2265, 0.7735), abs=1e-4)
    assert interval(0.0, [0.0] * 10, 10) == pytest.approx((0, 0.2775), abs=1e-4)
    assert interval(1.0, [1.0] * 10, 10) == pytest.approx((0.7225, 1), abs=1e-4)


def test_answers_to_one_prompt_that_are_alike_count_once():
    alike, free = [0.0, 1.0] * 10, [0.5] * 20
    low, high = interval(0.5, alike, 160)
    assert high - low == pytest.approx(2 * interval(0.5, [0.0, 1.0] * 10, 20)[1] - 1)  # as with one answer each
    low_free, high_free = interval(0.5, [0.375, 0.625] * 10, 160)  # nearly as if all answers were independent
    assert high_free - low_free < 0.5 * (high - low)
    assert interval(0.5, free, 160)[0] > 0


def test_the_interval_holds_the_truth_as_often_as_it_says():
    generator = np.random.default_rng(0)
    held = []
    for _ in range(2000):
        skill = generator.beta(0.6, 1.4, 60)  # prompts differ; the mean is 0.3
        values = generator.binomial(4, skill) / 4
        low, high = interval(values.mean(), values.tolist(), 240)
        held.append(low <= 0.3 <= high)
    assert 0.93 < fmean(held) < 0.97  # 2,000 draws: three standard errors are 0.015


def test_the_metrics_of_an_evaluation_by_hand():
    cfg = config(
        rewards=[{"kind": "exact_answer", "name": "numbers", "answer": "last_number"}], eval={"samples_per_prompt": 4}
    )

    def group(uid: str, *answers: tuple[float | None, str | None]) -> Group:
        samples = [
            Rollout(
                9, 4, 5, 0, "stop",
                verdict=Verdict(
                    score, parts=(score,), details={} if final is None else {"numbers/final_answer": final}
                ),
            )
            for score, final in answers
        ]  # fmt: skip
        return Group(Prompt(uid, (1, 2, 3, 4), "q", {}), samples, None, 0)

    metrics = describe_heldout(
        cfg,
        [
            group("a", (1.0, "7"), (0.0, "8"), (1.0, "7"), (0.0, None)),
            group("b", (0.0, "3"), (0.0, "3"), (1.0, "4"), (None, None)),  # one answer was not scored
            group("c", (None, None), (None, None), (None, None), (None, None)),
        ],
    )
    assert metrics["eval/accuracy"] == pytest.approx(3 / 7)
    assert metrics["eval/pass@2"] == pytest.approx(fmean([5 / 6, 2 / 3]))
    assert metrics["eval/pass@4"] == 1  # b has only three scored answers
    assert metrics["eval/maj@4"] == 0.5
    assert metrics["eval/reward_mean"] == pytest.approx(3 / 7) and metrics["eval/abstained"] == 5
    for name in ("accuracy", "pass@2", "pass@4", "maj@4"):
        assert metrics[f"eval/{name}_low"] <= metrics[f"eval/{name}"] <= metrics[f"eval/{name}_high"]


def test_one_answer_to_each_prompt_gives_an_accuracy_alone():
    cfg = config(rewards=[{"kind": "exact_answer"}])
    verdict = Verdict(1.0, parts=(1.0,), details={"exact_answer/final_answer": "7"})
    metrics = describe_heldout(
        cfg, [Group(Prompt("a", (1,), "q", {}), [Rollout(3, 1, 2, 0, "stop", verdict=verdict)], None, 0)]
    )
    assert {name for name in metrics if "accuracy" in name or "@" in name} == {
        "eval/accuracy", "eval/accuracy_low", "eval/accuracy_high",
    }  # fmt: skip


def test_several_data_sets_have_metrics_of_their_own():
    cfg = config(rewards=[{"kind": "exact_answer"}])

    def group(dataset: str, score: float, tokens: int) -> Group:
        sample = Rollout(9, 4, 4 + tokens, 0, "stop", verdict=Verdict(score, parts=(score,)))
        return Group(Prompt("uid", (1, 2, 3, 4), "q", {"dataset": dataset}), [sample], None, 0)

    one = describe_heldout(cfg, [group("a", 1.0, 1), group("a", 0.0, 1)])
    assert not any(name.startswith("eval/dataset") for name in one), "there is one alone"
    several = describe_heldout(cfg, [group("a", 1.0, 1), group("a", 0.0, 1), group("b", 0.25, 1)])
    assert several["eval/dataset/a/reward_mean"] == 0.5 and several["eval/dataset/b/reward_mean"] == 0.25
    assert several["eval/dataset/a/response_mean"] > 0
