"""A reward model on a vLLM server; tests/unit/rollout has its forms from vLLM itself."""

from __future__ import annotations

import math

import pytest
from answering import answered
from pydantic import ValidationError
from service_server import serving

from megatron_rl.config.rewards import RewardModelReward
from megatron_rl.types import Prompt, Verdict
from megatron_rl.verifiers import RewardSet, TrainerState, service
from megatron_rl.verifiers.answer import Answer

CHAT = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "1 + 1?"})


class Letters:
    """Token i is the character with this code."""

    def decode(self, ids, *, skip_special_tokens):
        return "".join(map(chr, ids))


def answer(text: str, finish: str = "stop", question=CHAT) -> Answer:
    return answered(Prompt("rows.jsonl:7", (1,), question), [ord(letter) for letter in text], finish)


def classification(*logits: object) -> dict:
    """A reply in the form of vLLM 0.32."""
    return {
        "id": "classify-9d1c",
        "object": "list",
        "created": 1745383065,
        "model": "m",
        "data": [{"index": 0, "label": "LABEL_0", "probs": list(logits), "num_classes": len(logits)}],
        "usage": {"prompt_tokens": 10, "total_tokens": 10, "completion_tokens": 0, "prompt_tokens_details": None},
    }


def verdicts(url: str, *answers: Answer, delimiter: str = "</think>", **keys: object) -> list[Verdict]:
    cfg = RewardModelReward(**{"url": url, "model": "m", "unfinished_score": -9} | keys)
    return RewardSet([cfg], Letters(), delimiter).score([0], answers, TrainerState(0, 1))[0].verdicts


@pytest.mark.parametrize(
    ("keys", "logit", "score"),
    [
        ({}, -3.25, -3.25),
        ({}, 2, 2.0),
        ({"activation": "sigmoid"}, math.log(3), 0.75),
        ({"activation": "sigmoid"}, -1000.0, 0.0),
        ({"clamp": [-2, 5]}, -3.25, -2.0),
        ({"clamp": [-2, 5]}, 7.5, 5.0),
        ({"activation": "sigmoid", "clamp": [0.2, 0.5]}, 1.5, 0.5),
    ],
)
def test_the_score_is_the_logit(keys, logit, score):
    with serving(lambda body, earlier: (200, classification(logit))) as served:
        [verdict] = verdicts(served.url, answer("so</think>2"), **keys)
    assert verdict.score == pytest.approx(score)
    turns = [*CHAT, {"role": "assistant", "content": "2"}]
    assert served.bodies == [{"model": "m", "messages": turns, "use_activation": False}]
    assert served.paths == ["/classify"]


def test_a_question_that_is_text_is_a_turn_of_the_user():
    with serving(lambda body, earlier: (200, classification(1.0))) as served:
        verdicts(served.url, answer("2", question="1 + 1 ="), delimiter="")
    assert served.bodies[0]["messages"] == [
        {"role": "user", "content": "1 + 1 ="},
        {"role": "assistant", "content": "2"},
    ]


def test_unfinished_answers_have_the_configured_score():
    with serving(lambda body, earlier: (200, classification(1.0))) as served:
        given = verdicts(served.url, answer("so</think>2", "length"), answer("so"), answer("so</think>2"))
    assert given == [Verdict(-9.0, "cut by the length budget"), Verdict(-9.0, "no </think>"), Verdict(1.0)]
    assert len(served.bodies) == 1


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (classification(0.5, 0.5), "the model has 2 classes, but a reward model has one"),
        (classification("0.5"), "data.0.probs.0: Input should be a valid number"),
        ({"data": []}, "data: List should have at least 1 item"),
        ('{"data": [{"probs": [1e308]}]}', "the logit 1e+308, but no score may be above 3.4e+38"),
        ('{"data": [{"probs": [NaN]}]}', "data.0.probs.0: Input should be a finite number"),
        (["data"], "Input should be"),
        ("{", "a reply that makes no sense: Expecting property name"),
    ],
)
def test_what_is_no_score_fails(reply, reason, monkeypatch):
    monkeypatch.setattr(service, "BACKOFF_S", 0.01)
    with serving(lambda body, earlier: (200, reply)) as served:
        [verdict] = verdicts(served.url, answer("so</think>2"), attempts=2)
    assert verdict.failed and verdict.score is None and reason in verdict.reason
    assert "request 2 about an answer: a reply that makes no sense" in verdict.reason


def test_what_has_no_meaning_is_refused():
    with pytest.raises(ValidationError, match="unfinished_score\n  Field required"):
        RewardModelReward(url="http://rm:8000", model="m")
    with pytest.raises(ValidationError, match=r"clamp: \[1.0, 0.0\]"):
        RewardModelReward(url="http://rm:8000", model="m", unfinished_score=0, clamp=[1, 0])
