"""Texts that are compared, and the form and the length of answers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from answering import answered
from hypothesis import given
from hypothesis import strategies as st
from patience import deadline

from megatron_rl.config.rewards import ExactAnswerReward, FormatReward, LengthReward, TextReward
from megatron_rl.types import Prompt, Verdict
from megatron_rl.verifiers import RewardSet, TrainerState
from megatron_rl.verifiers.answer import Answer
from megatron_rl.verifiers.columns import fault_of_row, required_columns
from megatron_rl.verifiers.ground_truth import GroundTruthVerifier, fault_of_ground_truth
from megatron_rl.verifiers.text import f1, form_of, verify


class Letters:
    """Token i is the character with this code; 0 is the special end of the sequence."""

    def decode(self, ids, *, skip_special_tokens):
        return "".join(chr(i) if i else "<eos>" for i in ids if i or not skip_special_tokens)


def answer(text: str, finish: str = "stop", **columns: object) -> Answer:
    ids = [*map(ord, text), *([0] if finish == "stop" else [])]
    return answered(Prompt("rows.jsonl:7", (1,), "question", columns), ids, finish)


CHOICES = {"A": 1.0, "a": 1.0, "(A)": 1.0, "A.": 1.0, "": 0.0, ".": 0.0, "B": 0.0, "The": 0.0, "an": 0.0}
THE = {"the": 1.0, "'The'": 1.0, "": 0.0, "a": 0.0, "!": 0.0}
"""Texts and scores where normalisation as in SQuAD leaves no word of the ground truth."""


@pytest.mark.parametrize(
    ("compare", "text", "truth", "score"),
    [
        ("exact", "\n Paris \n", "Paris", 1.0),
        ("exact", "paris", "Paris", 0.0),
        ("exact", "Lyon", ["Paris", "Lyon"], 1.0),
        ("exact", "7", 7, 1.0),
        ("normalised", "The U.S.  of a \n America!", "us of america", 1.0),
        ("normalised", "there", "re", 0.0),
        ("normalised", "Lyon", ["Paris", "the lyon."], 1.0),
        ("f1", "the big red dog", "A red dog ran", 2 * (2 / 3) * (2 / 3) / (4 / 3)),
        ("f1", "dog dog dog", "dog cat", 2 * (1 / 3) * (1 / 2) / (5 / 6)),
        ("f1", "dog", ["cat", "red dog", "big red dog"], 2 / 3),
        ("f1", "the", "cat", 0.0),
        *((compare, text, "A", score) for compare in ("normalised", "f1") for text, score in CHOICES.items()),
        *((compare, text, "The", score) for compare in ("normalised", "f1") for text, score in THE.items()),
        ("normalised", "?!", "?!", 1.0),
        ("normalised", ".", "?!", 0.0),
        ("exact", "caf\u00e9", "cafe\u0301", 1.0),
        ("normalised", "He doesn\u2019t", "he doesn't", 1.0),
        *(
            (compare, text, truth, 1.0)
            for compare in ("exact", "normalised", "f1")
            for text, truth in (
                ("\u201cyes\u201d", '"yes"'),
                ("well\u2010known", "well-known"),
                ("well\u2011known", "well-known"),
                ("\ufeffye\u200bs", "yes"),
                ("two\u00a0words", "two words"),
            )
        ),
        ("regex", "cafe\u0301", "caf\u00e9", 1.0),
        *(
            ("normalised", text, truth, 1.0)
            for text, truth in (("北京。", "北京"), ("«oui»", "oui"), ("¿Qué?", "qué"), ("1939–1945", "1939-1945"))
        ),
        ("f1", "wait…", "wait...", 1.0),
        ("exact", "72", 72.0, 1.0),  # pandas writes whole numbers so if the column lacks one
        ("f1", "72", [72.0], 1.0),
        ("exact", "72.5", 72.5, 1.0),
        ("regex", " 2024-05-06\n", r"\d{4}-\d\d-\d\d", 1.0),
        ("regex", "on 2024-05-06", r"\d{4}-\d\d-\d\d", 0.0),
        ("regex", "yes", ["no", "(?i)YES"], 1.0),
    ],
)
def test_scores_by_hand(compare, text, truth, score):
    assert verify(TextReward(compare=compare), text, truth).score == pytest.approx(score)


@given(st.text(), st.text())
def test_f1_is_symmetric_and_1_for_equal_words_alone(one, other):
    form = form_of(other)
    assert 0 <= f1(one, other) <= 1 and (form_of(one) is not form or f1(one, other) == f1(other, one))
    assert (f1(one, other) == 1) == (sorted(form(one).split()) == sorted(form(other).split()))


@pytest.mark.parametrize(
    ("compare", "truth", "reason"),
    [
        ("exact", None, "the text reward needs a `ground_truth` that is text or a number, or a list of these, but it"),
        ("f1", [], "the text reward needs"),
        ("exact", ["a", None], "the text reward needs"),
        ("exact", math.nan, "the row has no ground truth: it is NaN"),
        ("exact", "nan", "the row has no ground truth: it is 'nan', which pandas writes"),
        ("f1", "<NA>", "the row has no ground truth: it is '<NA>'"),
        ("f1", ["a", math.nan], "the row has no ground truth: it is NaN"),
        *(
            (compare, "", "the row has no ground truth: it is empty")
            for compare in ("exact", "normalised", "f1", "regex")
        ),
        ("exact", [" ", "a"], "the row has no ground truth: it is empty"),
        ("f1", "\ufeff\n", "the row has no ground truth: it is empty"),
        ("regex", "(", "ground_truth '(' is no pattern of Python's re: missing )"),
        ("regex", ["a", "a{99999999999}"], "is no pattern of Python's re"),
    ],
)
def test_a_row_without_a_usable_text_fails(compare, truth, reason):
    cfg = TextReward(compare=compare)
    assert reason in fault_of_ground_truth(cfg, truth)
    assert reason in fault_of_row(cfg, {"ground_truth": truth})
    verdict = verify(cfg, "a", truth)
    assert verdict.failed and verdict.score is None


@pytest.mark.deep
def test_a_pattern_that_takes_for_ever_costs_only_its_own_verdict():
    cfg = TextReward(compare="regex", answer_timeout_s=1)
    verifier = GroundTruthVerifier(cfg, Letters(), "", 1)
    [hung] = verifier.score([answer("a" * 60 + "b", ground_truth="(a+)+c")])
    assert hung.failed and hung.reason.startswith("rows.jsonl:7: no verdict within")
    verifier.close()
    patient = GroundTruthVerifier(cfg.model_copy(update={"answer_timeout_s": deadline(10)}), Letters(), "", 1)
    assert patient.score([answer("aa", ground_truth="(a+)+")]) == [Verdict(1.0)]
    patient.close()


def scores(cfg, answers, delimiter="</think>") -> list[Verdict]:
    return RewardSet([cfg], Letters(), delimiter).score([0], answers, TrainerState(0, 1))[0].verdicts


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<think>so</think>2", None),
        (" <think>\nso\n</think>\n\n2\n", None),
        ("so</think>2", None),
        ("so 2", "0 times </think>"),
        ("so</think>2</think>3", "2 times </think>"),
        ("</think>2", "no reasoning"),
        ("<think> \n</think>2", "no reasoning"),
        ("so</think> \n", "an empty text"),
        ("<think>a<think>b</think>2", "<think> inside the answer"),
        ("x<think>a</think>2", "<think> inside the answer"),
        ("a</think>2<think>", "<think> inside the answer"),
    ],
)
def test_the_format_is_one_thought_and_one_text(text, fault):
    assert scores(FormatReward(), [answer(text)]) == [Verdict(1.0) if fault is None else Verdict(0.0, fault)]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("2", None),
        ("so</think>2", "1 times </think>"),
        ("<think>2", "<think> inside the answer"),
        (" \n", "an empty text"),
    ],
)
def test_the_format_after_a_closed_thought_is_one_text(text, fault):
    closed = replace(answer(text).prompt, token_ids=tuple(map(ord, "<think></think>\n")))
    after = answered(closed, answer(text).response_ids)
    assert scores(FormatReward(), [after]) == [Verdict(1.0) if fault is None else Verdict(0.0, fault)]


def test_the_format_of_a_cut_answer_is_wrong_and_any_delimiter_will_do():
    assert scores(FormatReward(), [answer("so</think>2", "length")]) == [Verdict(0.0, "cut by the length budget")]
    assert scores(FormatReward(), [answer("so====2"), answer("so2")], "====") == [
        Verdict(1.0),
        Verdict(0.0, "0 times ===="),
    ]


@pytest.mark.parametrize(("num", "score"), [(0, 0.0), (50, 0.5), (100, 1.0), (125, 0.75), (200, 0.0), (300, 0.0)])
def test_the_score_of_a_length_falls_on_both_sides_of_the_target(num, score):
    given = [answer("x" * num, "length", ground_truth=100, wanted=200)]
    assert scores(LengthReward(), given) == [Verdict(score)]
    assert scores(LengthReward(target=100), given) == [Verdict(score)]
    assert scores(LengthReward(target="wanted"), given) == [Verdict(max(0.0, 1 - abs(num - 200) / 200))]


@pytest.mark.parametrize("target", [None, 0, -3, 1.5, "100", True, [100]])
def test_a_row_without_a_target_fails(target):
    [verdict] = scores(LengthReward(target="wanted"), [answer("a", wanted=target)])
    assert verdict.failed and verdict.score is None
    assert verdict.reason == fault_of_row(LengthReward(target="wanted"), {"wanted": target})
    assert f"above 0 in the column 'wanted', but it is {target!r}" in verdict.reason


def test_the_columns_that_rows_must_have():
    configs = [LengthReward(target="wanted"), TextReward(), ExactAnswerReward(), FormatReward()]
    assert required_columns(configs) == ("wanted", "ground_truth")
    assert required_columns([FormatReward(), LengthReward(target=5)]) == ()
    assert required_columns([LengthReward(datasets=("a",))]) == ()
