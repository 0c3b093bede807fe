from __future__ import annotations

import json
import re

import numpy as np
import pytest

from megatron_rl.config.rewards import ExactAnswerReward, FunctionReward
from megatron_rl.types import Prompt, Tokens, Verdict
from megatron_rl.verifiers import RewardSet, answers_of, weighted_sum
from megatron_rl.verifiers.failures import FailureLog
from megatron_rl.verifiers.functions import load_function


class Letters:
    """Token i is the i-th letter; 0 is special."""

    def decode(self, ids, *, skip_special_tokens):
        return "".join("." if i == 0 else chr(96 + i) for i in ids if i or not skip_special_tokens)


SEEN: list[dict] = []


def record(prompts, completions, completion_ids, **columns):
    SEEN.append({"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns})
    return [float(len(ids)) for ids in completion_ids]


def abstains_on_b(completions, **_):
    return [None if text == "b" else 10.0 for text in completions]


def crashes(**_):
    raise RuntimeError("the judge is down")


def one_short(completions, **_):
    return [1.0] * (len(completions) - 1)


def answers_text(completions, **_):
    return ["1.0" for _ in completions]


def answers_nan_once(completions, **_):
    return [float("nan"), *(1.0 for _ in completions[1:])]


def answers_none(**_):
    return None


def tokens(prompt: Prompt, *response: int) -> Tokens:
    ids = np.array([*prompt.token_ids, *response], np.int32)
    return Tokens(ids, np.arange(len(ids)) >= len(prompt.token_ids), np.zeros(len(ids)), np.zeros(len(ids)))


PLAIN = Prompt("r:1", (1, 2), "ab", {"ground_truth": "b"})
CHAT = Prompt("r:2", (3,), ({"role": "user", "content": "c"},), {"ground_truth": "z", "level": 4})


def score(*configs, delimiter: str = "") -> list[list[Verdict]]:
    groups = [[tokens(PLAIN, 2, 0), tokens(PLAIN, 1, 1, 0)], [tokens(CHAT, 2, 0)]]
    rewards = RewardSet(configs, Letters(), delimiter)
    answers = answers_of([PLAIN, CHAT], groups, [["stop", "stop"], ["stop"]])
    columns = [rewards.score(index, answers) for index in range(len(configs))]
    weights = [cfg.weight for cfg in configs]
    first, second, third = [weighted_sum(weights, verdicts) for verdicts in zip(*columns, strict=True)]
    return [[first, second], [third]]


def function(name: str, weight: float = 1.0, on_error: str = "abstain") -> FunctionReward:
    return FunctionReward(path=f"{__name__}:{name}", weight=weight, on_error=on_error)


def test_functions_see_what_trl_shows_them():
    SEEN.clear()
    verdicts = score(function("record"))
    assert [[v.score for v in group] for group in verdicts] == [[2.0, 3.0], [2.0]]
    assert SEEN == [
        {
            "prompts": ["ab", "ab", [{"role": "user", "content": "c"}]],
            "completions": ["b", "aa", [{"role": "assistant", "content": "b"}]],
            "completion_ids": [[2, 0], [1, 1, 0], [2, 0]],
            "ground_truth": ["b", "b", "z"],
            "level": [None, None, 4],
        }
    ]


def test_weighted_sum_leaves_out_who_abstains():
    verdicts = score(ExactAnswerReward(), function("abstains_on_b", weight=0.5))
    path = f"{__name__}:abstains_on_b"
    alone, both = Verdict(1.0, f"{path} abstained", (1.0, None)), Verdict(5.0, "other answer", (0.0, 10.0))
    assert verdicts == [[alone, both], [both]]


def test_an_exception_is_an_abstention_of_all_with_its_reason():
    [first, second], [third] = score(function("crashes"))
    assert first == second == third and first.score is None
    assert "crashes raised RuntimeError: the judge is down (" in first.reason
    assert "test_verifiers_compose.py:" in first.reason
    partly = score(ExactAnswerReward(), function("crashes"))
    assert [verdict.score for verdict in partly[0]] == [1.0, 0.0], "the others count, a 0 among them"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_short", "returned 2 scores for 3 completions"),
        ("answers_text", r"returned '1.0' \(str\) for completion 0"),
        ("answers_nan_once", r"returned nan \(float\) for completion 0"),
        ("crashes", "raised RuntimeError: the judge is down"),
        ("answers_none", "returned NoneType"),
    ],
)
def test_what_a_reward_cannot_score_is_an_abstention_or_stops_the_run(name, message):
    with pytest.raises(ValueError, match=f"reward {name}, r:1: {__name__}:{name} {message}"):
        score(function(name, on_error="stop"))
    first = score(function(name))[0][0]
    assert first.score is None and re.search(message, first.reason)


def test_one_bad_number_costs_its_own_answer_alone():
    assert [[v.score for v in group] for group in score(function("answers_nan_once"))] == [[None, 1.0], [1.0]]


def test_the_failure_log_keeps_the_first_and_counts_the_rest(tmp_path):
    log, row = FailureLog(tmp_path / "rewards.log"), Prompt("rows.jsonl:7", (1,), "")
    verdicts = [Verdict(None, "it raised", failed=True), Verdict(1.0), Verdict(None, "abstained")]
    log.write(3, "judge", [row] * 3, verdicts)
    log.write(4, "judge", [row] * 150, [Verdict(None, "again", failed=True)] * 150)
    log.write(4, "other", [row], [Verdict(1.0)])
    lines = [json.loads(line) for line in (tmp_path / "rewards.log").read_text().splitlines()]
    assert lines[0] == {"step": 3, "reward": "judge", "row": "rows.jsonl:7", "error": "it raised"}
    assert len(lines) == 1 + 99 + 1
    assert lines[-1] == {"step": 4, "reward": "judge", "more_failures": 51}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("math", "must read `package.module:function`"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("json:no_such_function", "has no function 'no_such_function'"),
        ("json:__name__", "has no function"),
    ],
)
def test_a_wrong_path_is_named(path, message):
    with pytest.raises(ValueError, match=message):
        load_function(path)


def test_required_columns():
    assert RewardSet([ExactAnswerReward()], Letters(), "").required_columns == ("ground_truth",)
    assert RewardSet([function("record")], Letters(), "").required_columns == ()
