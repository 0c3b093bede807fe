"""Rewards that compare the text after the thought with the row's ground truth, as a run calls them."""

from __future__ import annotations

import json
import math

import pytest
from answering import answered
from patience import deadline

from megatron_rl.config.rewards import CodeReward, ExactAnswerReward, InstructionsReward, MathematicsReward
from megatron_rl.types import Prompt, Verdict
from megatron_rl.verifiers import RewardSet, TrainerState
from megatron_rl.verifiers.answer import Answer
from megatron_rl.verifiers.columns import required_columns
from megatron_rl.verifiers.ground_truth import GroundTruthVerifier, Judge, fault_of_ground_truth


class Letters:
    """Token i is the character with this code."""

    def decode(self, ids, *, skip_special_tokens):
        return "".join(map(chr, ids))


def answer(text: str, truth: object, finish: str = "stop", **columns: object) -> Answer:
    prompt = Prompt("rows.jsonl:7", (1,), "question", {"ground_truth": truth} | columns)
    return answered(prompt, [ord(letter) for letter in text], finish)


TESTS = ["assert double(2) == 4", "assert double(-1) == -2"]
NO_COMMA = {"instruction_id": ["punctuation:no_comma"], "kwargs": [None]}
PROGRAM = "```python\ndef double(x):\n    return {}\n```"
CASES = [
    (MathematicsReward(), r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
    (MathematicsReward(), "it may be 0.5", "0.5", 0.0),
    (MathematicsReward(mode="lenient"), "it may be 0.5", "0.5", 1.0),
    (MathematicsReward(), r"\boxed{3}", ["2", 3], 1.0),
    (MathematicsReward(), r"\boxed{4}", ["2", "3"], 0.0),
    (CodeReward(), PROGRAM.format("2 * x"), TESTS, 1.0),
    (CodeReward(), PROGRAM.format("2 * x"), json.dumps(TESTS), 1.0),
    (CodeReward(), PROGRAM.format("abs(2 * x)"), TESTS, 0.0),
    (CodeReward(score="share"), PROGRAM.format("abs(2 * x)"), TESTS, 0.5),
    (CodeReward(score=0.5), PROGRAM.format("abs(2 * x)"), TESTS, 1.0),
    (CodeReward(), "```python\nprint(int(input()) + 1)\n```", [{"input": "4", "output": "5"}], 1.0),
    (InstructionsReward(), "no comma here", [NO_COMMA], 1.0),
    (InstructionsReward(), "one, two", NO_COMMA, 0.0),
]


@pytest.mark.parametrize(("cfg", "text", "truth", "score"), CASES, ids=lambda value: getattr(value, "kind", None))
def test_the_text_after_the_thought_is_judged(cfg, text, truth, score):
    judge = Judge(cfg, Letters(), "</think>")
    thought = r"\boxed{0.5} ```python" + "\ndouble = 1\n```, </think>"
    assert judge(answer(thought + text, truth)).score == score
    assert judge(answer(text, truth)) == Verdict(0.0, "no </think>")
    assert judge(answer(thought + text, truth, "length")) == Verdict(0.0, "cut by the length budget")


@pytest.mark.parametrize(
    ("cfg", "truth", "reason"),
    [
        (
            MathematicsReward(),
            None,
            "the mathematics reward needs a `ground_truth` that is text or a number, or a list",
        ),
        (MathematicsReward(), [], "the mathematics reward needs"),
        (MathematicsReward(), math.nan, "the row has no ground truth: it is NaN"),
        (ExactAnswerReward(), math.nan, "the row has no ground truth: it is NaN"),
        *((cfg, " ", "the row has no ground truth: it is empty") for cfg in (MathematicsReward(), ExactAnswerReward())),
        (ExactAnswerReward(answer="last_number"), math.nan, "the row has no ground truth: it is NaN"),
        (InstructionsReward(), math.nan, "but it is nan"),
        (CodeReward(), math.nan, "but they are 'nan'"),
        (CodeReward(), [], "the row's tests are broken"),
        (CodeReward(), ["assert f(1"], "the row's tests are broken: case 1: 'assert f(1' is no Python"),
        (CodeReward(), ["f(1) == 2"], "it asserts nothing"),
        (CodeReward(), "null", "the row has no ground truth: it is the text 'null'"),
        (CodeReward(), ["import numpy\nassert f(1) == numpy.pi"], "it imports numpy"),
        (InstructionsReward(), {"instruction_id": ["no_such:kind"], "kwargs": [None]}, "no_such:kind"),
        (ExactAnswerReward(answer="last_number"), "two", "holds no number"),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
@pytest.mark.parametrize("text", ["</think>x", "no delimiter"])
def test_a_row_that_cannot_be_compared_fails_for_all_its_answers(cfg, truth, reason, text):
    verdict = Judge(cfg, Letters(), "</think>")(answer(text, truth))
    assert verdict.failed and verdict.score is None
    assert verdict.reason.startswith("rows.jsonl:7: ") and reason in verdict.reason
    fault = fault_of_ground_truth(cfg, truth)
    assert fault is not None and reason in fault


@pytest.mark.deep
def test_a_program_that_sleeps_scores_0_within_the_time_of_its_answer():
    """It is no abstention: a model could hide an answer in one."""
    cfg = CodeReward(score="share", answer_timeout_s=min(deadline(5), 40))  # the sandbox ends one process after 60 s
    verifier = GroundTruthVerifier(cfg, Letters(), "", 2)
    programs = [PROGRAM.format("2 * x"), "```python\nimport time\ntime.sleep(1000)\n```", PROGRAM.format("x")]
    right, hung, wrong = verifier.score([answer(program, TESTS) for program in programs])
    assert (right.score, wrong.score) == (1.0, 0.0)
    assert hung.score == 0.0 and not hung.failed and "ran for more than" in hung.reason
    assert verifier.score([answer(programs[0], TESTS)]) == [right]
    verifier.close()


def test_each_row_goes_to_the_rewards_of_its_data_set():
    """A row of two data sets has two ground truths, and each reward takes its own."""
    configs = [MathematicsReward(datasets=("math", "gsm8k")), InstructionsReward(datasets=("ifeval",))]
    rewards = RewardSet(configs, Letters(), "")
    assert required_columns(configs) == ()
    answers = [
        answer(r"\boxed{18}, yes", "18", dataset="gsm8k"),
        answer(r"\boxed{18}, yes", [NO_COMMA], dataset="ifeval"),
        answer(r"\boxed{18}", ["18", NO_COMMA], dataset=["math", "ifeval"]),
        answer(r"\boxed{18}", ["18"], dataset=["math"]),
        answer(r"\boxed{18}", "18", dataset="chat"),
        answer(r"\boxed{18}", "18"),
    ]
    given = [rewards.score([index], answers, TrainerState(0, 1))[0].verdicts for index in (0, 1)]
    scores = [[verdict.score for verdict in verdicts] for verdicts in given]
    assert scores == [[1.0, None, 1.0, 1.0, None, None], [None, 0.0, 1.0, None, None, None]]
    assert not any(verdict.failed for verdict in given[0])
