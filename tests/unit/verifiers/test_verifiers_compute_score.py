"""Reward functions as verl's documentation shows them, called as a run calls them."""

from __future__ import annotations

import asyncio
import re

import numpy as np
import pytest
from contracts import TWO, answer, scored, scores

from megatron_rl.config.rewards import ComputeScoreReward


def verl(function: str, **changes) -> ComputeScoreReward:
    return ComputeScoreReward(**{"path": f"{__name__}:{function}"} | changes)


SEEN: list[dict] = []
WAITING: list[str] = []


async def _meets(own: str, other: str) -> None:
    """Ends only if the other call runs at the same time."""
    WAITING.append(own)
    while other not in WAITING:
        await asyncio.sleep(0)


def crashes(**_):
    raise RuntimeError("the judge is down")


def reads_a_key(extra_info, **_):
    return extra_info["level"]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    SEEN.append({"data_source": data_source, "ground_truth": ground_truth, "extra_info": extra_info})
    return float(ground_truth in solution_str)


def detailed(data_source, solution_str, ground_truth, extra_info, bonus=0.0, **kwargs):
    correct = solution_str.endswith(f"{{{ground_truth}}}")
    if "3" in solution_str:
        return {"score": bonus, "acc": correct}
    return {"score": 1.0 + bonus, "acc": correct, "length": np.int64(12), "pred": solution_str}


def takes_two(solution_str, ground_truth, method="strict"):
    return solution_str == ground_truth if method == "strict" else 0.5


async def asks_a_judge(data_source, solution_str, ground_truth, extra_info):
    if "3" in solution_str:
        raise ConnectionError("the judge hung up")
    await _meets(solution_str, {"a": "b", "b": "a"}[solution_str])
    return 0.5


def without_score(**_):
    return {"acc": 1.0}


def writes_into_its_information(extra_info, **_):
    extra_info["seen"] = extra_info.get("seen", 0) + 1
    return extra_info["seen"]


def test_a_function_gets_what_verl_gives():
    SEEN.clear()
    nested = {"style": "rule", "ground_truth": "2"}
    answers = [
        answer("2", data_source="openai/gsm8k", reward_model=nested, extra_info={"index": 3}),
        answer("3", dataset="gsm8k", ground_truth="2"),
    ]
    assert scores(verl("compute_score"), answers) == [1.0, 0.0]
    assert SEEN == [
        {"data_source": "openai/gsm8k", "ground_truth": "2", "extra_info": {"index": 3}},
        {"data_source": "gsm8k", "ground_truth": "2", "extra_info": {}},
    ]


def test_the_numbers_beside_the_score_are_metrics():
    given = scored(verl("detailed", arguments={"bonus": 0.5}))
    assert [verdict.score for verdict in given.verdicts] == [1.5, 0.5]
    assert given.metrics == {"reward/detailed/acc": 0.5, "reward/detailed/length": 12.0}
    right, wrong = (verdict.details for verdict in given.verdicts)
    assert right == {"detailed/acc": True, "detailed/length": 12, "detailed/pred": r"so \boxed{2}"}
    assert wrong == {"detailed/acc": False}


def test_arguments_replace_what_the_run_gives():
    SEEN.clear()
    assert scores(verl("compute_score", arguments={"data_source": "math"}), TWO[:1]) == [1.0]
    assert SEEN[0]["data_source"] == "math"


def test_a_function_with_fewer_arguments_gets_those():
    exact = [answer("2", ground_truth="2"), answer("3", ground_truth="2")]
    assert scores(verl("takes_two"), exact) == [1.0, 0.0]
    assert scores(verl("takes_two", arguments={"method": "flexible"}), exact) == [0.5, 0.5]


def test_an_asynchronous_function_scores_all_answers_at_the_same_time():
    WAITING.clear()
    three = [answer("a", ground_truth="a"), answer("3", ground_truth="a"), answer("b", ground_truth="a")]
    verdicts = scored(verl("asks_a_judge"), three).verdicts
    assert [verdict.score for verdict in verdicts] == [0.5, None, 0.5]
    assert verdicts[1].failed and "raised ConnectionError: the judge hung up" in verdicts[1].reason


@pytest.mark.parametrize(
    ("name", "columns", "reason"),
    [
        ("without_score", {"ground_truth": "2"}, r"returned a mapping without `score` \(it has acc\)"),
        ("compute_score", {"data_source": "math"}, "has neither `ground_truth` nor `reward_model`"),
        ("asks_a_judge", {"reward_model": {}}, "has neither `ground_truth` nor `reward_model`"),
        ("crashes", {"ground_truth": "2"}, "raised RuntimeError: the judge is down"),
        ("reads_a_key", {"ground_truth": "2"}, "raised KeyError"),
    ],
)
def test_what_cannot_be_scored_fails_with_the_reason(name, columns, reason):
    [verdict] = scored(verl(name), [answer("2", **columns)]).verdicts
    assert verdict.failed and verdict.score is None and re.search(reason, verdict.reason)


def test_a_function_cannot_change_the_rows():
    one = answer("2", ground_truth="2", extra_info={"seen": 4})
    assert scores(verl("writes_into_its_information"), [one, one]) == [5.0, 5.0]
