from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_rl.config.rewards import ExactAnswerReward, FunctionReward
from megatron_rl.types import Prompt, Rollout, Tokens, Verdict
from megatron_rl.verifiers import RewardSet, TrainerState, answers_of, weighted_sum
from megatron_rl.verifiers.columns import required_columns
from megatron_rl.verifiers.failures import FailureLog
from megatron_rl.verifiers.metrics import merged


class Letters:
    """Token i is the i-th letter; 0 is special."""

    def decode(self, ids, *, skip_special_tokens):
        return "".join("." if i == 0 else chr(96 + i) for i in ids if i or not skip_special_tokens)


def half_is_b(completions, **_):
    return [None if text == "b" else 10.0 for text in completions]


def crashes(**_):
    raise RuntimeError("the judge is down")


def tokens(prompt: Prompt, *response: int) -> Tokens:
    ids = np.array([*prompt.token_ids, *response], np.int32)
    return Tokens(ids, np.arange(len(ids)) >= len(prompt.token_ids), np.zeros(len(ids)), np.zeros(len(ids)))


def sample(tokens: Tokens) -> Rollout:
    return Rollout(len(tokens.ids), int((~tokens.action_mask).sum()), int(tokens.action_mask.sum()), 0, finish="stop")


PLAIN = Prompt("r:1", (1, 2), "ab", {"ground_truth": "b"})
CHAT = Prompt("r:2", (3,), ({"role": "user", "content": "c"},), {"ground_truth": "z", "level": 4})


def function(name: str, weight: float = 1.0, on_error: str = "abstain") -> FunctionReward:
    return FunctionReward(path=f"{__name__}:{name}", weight=weight, on_error=on_error)


def score(*configs) -> list[Verdict]:
    groups = [[tokens(PLAIN, 2, 0), tokens(PLAIN, 1, 1, 0)], [tokens(CHAT, 2, 0)]]
    rewards = RewardSet(configs, Letters(), "")
    answers = answers_of([PLAIN, CHAT], groups, [[sample(one) for one in group] for group in groups])
    columns = [rewards.score(call, answers, TrainerState(0, 1))[0].verdicts for call in rewards.calls]
    weights = [cfg.weight for cfg in configs]
    return [weighted_sum(weights, verdicts) for verdicts in zip(*columns, strict=True)]


def test_weighted_sum_leaves_out_who_abstains():
    verdicts = score(ExactAnswerReward(), function("half_is_b", weight=0.5))
    path = f"{__name__}:half_is_b"
    # The third answer is in the form of a chat, so it is no text, and the function compares it with `b` in vain.
    assert verdicts == [
        Verdict(1.0, f"{path} returned None", (1.0, None), details={"exact_answer/final_answer": "b"}),
        Verdict(5.0, "other answer", (0.0, 10.0), details={"exact_answer/final_answer": "aa"}),
        Verdict(5.0, "other answer", (0.0, 10.0), details={"exact_answer/final_answer": "b"}),
    ]


def test_the_other_rewards_count_if_one_fails():
    verdicts = score(ExactAnswerReward(), function("crashes"))
    assert [verdict.score for verdict in verdicts] == [1.0, 0.0, 0.0], "a 0 among them"


def test_a_failure_stops_the_run_if_on_error_says_so():
    with pytest.raises(ValueError, match=f"reward crashes, r:1: {__name__}:crashes raised RuntimeError"):
        score(ExactAnswerReward(), function("crashes", on_error="stop"))


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


def test_required_columns():
    assert required_columns([ExactAnswerReward()]) == ("ground_truth",)
    assert required_columns([function("crashes")]) == ()


def test_parts_of_a_step_are_merged_by_what_their_numbers_mean():
    one = {"reward/f/seconds": 1.0, "reward/f/failed": 0.5, "reward/f/accuracy": 1.0, "verifier/restarts": 1.0}
    two = {"reward/f/seconds": 2.0, "reward/f/failed": 0.0, "verifier/restarts": 0.0, "reward/f/length": 4.0}
    three = {"reward/f/seconds": 0.5, "reward/f/failed": 0.0, "reward/f/accuracy": 0.5}
    assert merged([one, two, three], [10, 20, 30]) == {
        "reward/f/seconds": 3.5,
        "reward/f/failed": pytest.approx(5 / 60),
        "reward/f/accuracy": pytest.approx((10 + 15) / 40),
        "reward/f/length": 4.0,
        "verifier/restarts": 1.0,
    }
