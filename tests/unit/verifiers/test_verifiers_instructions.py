from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from megatron_rl.types import Verdict
from megatron_rl.verifiers.instructions.checks import KINDS, verify

IFEVAL = Path(__file__).with_name("data") / "ifeval.jsonl.gz"


def ifeval_rows() -> list[dict]:
    with gzip.open(IFEVAL, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_all_541_prompts_of_ifeval_can_be_judged():
    rows = ifeval_rows()
    used = {name for row in rows for name in row["ground_truth"][0]["instruction_id"]}
    assert len(rows) == 541 and len(used) == 25 and used < set(KINDS)
    for row in rows:
        verdict = verify("My answer is yes.", row["ground_truth"], "share")
        assert verdict.score is not None, verdict


def test_a_real_row():
    row = ifeval_rows()[0]
    follows = "*Early life* He was born in 1140.\n*War* He fought.\n*Death* Died in 1187.\n" + "He ruled. " * 143
    assert verify(follows, row["ground_truth"], "all") == Verdict(1.0)  # 300 words
    one_less = follows.removesuffix("ruled. ")
    assert verify(one_less, row["ground_truth"], "share") == Verdict(
        2 / 3, "not followed: length_constraints:number_words"
    )
    broken = one_less + ", *"
    both = "not followed: punctuation:no_comma, length_constraints:number_words"
    assert verify(broken, row["ground_truth"], "share") == Verdict(1 / 3, both)
    assert verify(broken, row["ground_truth"], "all") == Verdict(0.0, both)


PAIR = {
    "instruction_id": ["detectable_format:title", "last_word:last_word_answer", "punctuation:no_comma"],
    "kwargs": [None, {"last_word": "brief", "phrase": None}, {}],
}


@pytest.mark.parametrize(
    "truth", [PAIR, [PAIR], json.dumps(PAIR), json.dumps([PAIR]), str(PAIR), str([PAIR]), [json.dumps(PAIR)]]
)
def test_the_forms_of_a_ground_truth(truth):
    assert verify("<<Colours>>\nIn brief.", truth, "all") == Verdict(1.0)
    assert verify("In brief.", truth, "share") == Verdict(2 / 3, "not followed: detectable_format:title")
    assert verify("In brief.", truth, "all").score == 0.0


def test_instructions_without_arguments_need_no_kwargs():
    assert verify("a", {"instruction_id": ["punctuation:no_comma"]}, "all") == Verdict(1.0)
    assert verify("a", {"instruction_id": ["punctuation:no_comma"], "kwargs": None}, "all") == Verdict(1.0)


WORDS = "length_constraints:number_words"


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("count:pronouns", {}, "no instruction of the kind 'count:pronouns' is known"),
        (WORDS, {"num_words": 3}, f"the arguments of {WORDS} are wrong: relation: Missing"),
        (WORDS, None, "num_words: Missing"),
        (WORDS, {"num_words": None, "relation": "at least"}, "num_words: Missing"),
        (WORDS, {"num_words": -1, "relation": "at least"}, "num_words: Input should be greater than or equal to 0"),
        (WORDS, {"num_words": 2.5, "relation": "at least"}, "num_words: Input should be a valid integer"),
        (WORDS, {"num_words": 3, "relation": "at most"}, "relation: Input should be 'at least' or 'less than'"),
        (WORDS, {"num_words": 3, "relation": "at least", "text": "a"}, "text: Unexpected"),
        (WORDS, [3], "must be a mapping by name, but they are [3]"),
        ("detectable_format:title", {"keyword": "a"}, "keyword: Unexpected"),
        ("keywords:existence", {"keywords": []}, "keywords: List should have at least 1 item"),
        ("keywords:existence", {"keywords": ["a", " "]}, "keywords: 1: String should have at least 1 character"),
        ("keywords:existence", {"keywords": "a"}, "keywords: Input should be a valid list"),
        ("keywords:word_once", {"keyword": ["a", "b"]}, "keyword: Input should be a valid string"),
        ("keywords:letter_frequency", {"letter": "ab", "let_frequency": 1, "let_relation": "at least"}, "letter: "),
        ("language:response_language", {"language": "klingon"}, "language: 'klingon' is none of af, ar"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"},
            "nth_paragraph is 3, but num_paragraphs is 2",
        ),
        ("first_word:first_word_answer", {"first_word": "!"}, "'!' has no letter and no digit"),
        ("new:copy_span_idx", {"prompt_to_repeat": "abc", "n_start": 1, "n_end": 3}, "not a span of the 3 characters"),
        ("new:copy_span_idx", {"prompt_to_repeat": "abc", "n_start": 2, "n_end": 1}, "not a span of the 3 characters"),
        ("copy:repeat_phrase", {"phrase": "two words", "small_n": 1}, "no word between its first and its last"),
    ],
)
@pytest.mark.parametrize("answer", ["", "Some answer"])
def test_an_instruction_that_cannot_be_judged_is_named_and_never_scored(kind, arguments, message, answer):
    truth = {"instruction_id": ["punctuation:no_comma", kind], "kwargs": [None, arguments]}
    verdict = verify(answer, truth, "share")
    assert verdict.score is None and verdict.failed
    assert message in verdict.reason and kind in verdict.reason


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        (None, "must be a mapping"),
        ("not JSON", "neither JSON nor a Python literal"),
        ('"text"', "it is the text 'text'"),
        ("[" * 100_000, "neither JSON nor a Python literal"),
        ([], "must be a mapping"),
        ([PAIR, PAIR], "must be a mapping"),
        ({"kwargs": []}, "must be a mapping"),
        ({"instruction_id": [], "kwargs": []}, "must be a mapping"),
        ({"instruction_id": ["punctuation:no_comma"], "kwargs": []}, "one entry for each"),
        ({"instruction_id": [3], "kwargs": [None]}, "it holds 3"),
    ],
)
def test_a_ground_truth_of_another_form_is_a_failed_verdict(truth, message):
    verdict = verify("a", truth, "all")
    assert verdict.score is None and verdict.failed and message in verdict.reason


def test_integral_numbers_may_have_the_form_of_floats():
    """Tables with empty cells turn whole numbers into floats."""
    truth = {"instruction_id": [WORDS], "kwargs": [{"num_words": 3.0, "relation": "at least"}]}
    assert verify("a b c", truth, "all") == Verdict(1.0)


@pytest.mark.parametrize(
    ("kind", "arguments", "text", "score"),
    [
        ("keywords:forbidden_words", {"forbidden_words": ["caf\u00e9"]}, "le cafe\u0301", 0.0),
        ("keywords:forbidden_words", {"forbidden_words": ["don't"]}, "I don\u2019t", 0.0),
        ("keywords:existence", {"keywords": ["cafe\u0301"]}, "le caf\u00e9", 1.0),
        ("keywords:existence", {"keywords": ["well-known"]}, "a well\u2011known b", 1.0),
        ("keywords:forbidden_words", {"forbidden_words": ["yes"]}, "ye\u200bs", 0.0),
        ("startend:quotation", {}, "\u201ca\u201d", 1.0),
        ("startend:end_checker", {"end_phrase": "that\u2019s all"}, "and that's all", 1.0),
    ],
)
def test_accents_hyphens_and_quotation_marks_are_found_however_they_are_written(kind, arguments, text, score):
    assert verify(text, {"instruction_id": [kind], "kwargs": [arguments]}, "share").score == score
