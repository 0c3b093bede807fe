from __future__ import annotations

from decimal import Decimal

import pytest
from answering import answered
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.rewards import ExactAnswerReward
from megatron_rl.types import Episode, Prompt, Verdict
from megatron_rl.verifiers.answer import BLOCK_TOKENS, judged_text, text_after
from megatron_rl.verifiers.exact_answer import last_number
from megatron_rl.verifiers.ground_truth import GroundTruthVerifier


def tokenizer_of(*words: str, special: tuple[str, ...] = ("<eos>",)) -> PreTrainedTokenizerFast:
    """Words where they match, characters elsewhere."""
    vocabulary = [*special, *words, *map(chr, range(32, 127)), "\n"]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=" "))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*words, "\n", "."])), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


ONE_WORD = tokenizer_of("</think>")
SPECIAL = tokenizer_of(special=("<eos>", "</think>"))
CHARACTERS = tokenizer_of()
ENDS_INSIDE = tokenizer_of("</think", ">\n\n1", ">\n\n")
ALL_TOKENIZERS = [ONE_WORD, SPECIAL, CHARACTERS, ENDS_INSIDE]


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("tokenizer", ALL_TOKENIZERS)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3+4</think>\n\n12<eos>", "12"),
        ("</think>12</think>13<eos>", "12</think>13"),
        ("3+4</think>", ""),
        ("3+4<eos>", None),
        ("", None),
    ],
)
def test_text_after_the_first_delimiter(tokenizer, text, expected):
    ids = ids_of(tokenizer, text)
    if tokenizer is SPECIAL and expected:  # there a second delimiter is a special token too, and dropped
        expected = expected.replace("</think>", "")
    found = text_after("</think>", ids, tokenizer)
    assert (found.strip() if found is not None else None) == expected


def test_the_delimiter_may_end_inside_a_token():
    ids = ids_of(ENDS_INSIDE, "4</think>\n\n12<eos>")
    assert ENDS_INSIDE.convert_ids_to_tokens(ids) == ["4", "</think", ">\n\n1", "2", "<eos>"]
    assert text_after("</think>", ids, ENDS_INSIDE) == "\n\n12"


@pytest.mark.parametrize("tokenizer", ALL_TOKENIZERS)
def test_the_delimiter_may_lie_anywhere_in_a_long_response(tokenizer):
    for num_before in range(BLOCK_TOKENS - 10, BLOCK_TOKENS + 3):
        ids = ids_of(tokenizer, "1" * num_before + "</think>" + "2" * BLOCK_TOKENS + "3<eos>")
        assert text_after("</think>", ids, tokenizer) == "2" * BLOCK_TOKENS + "3"


def test_without_a_delimiter_all_is_answer():
    assert text_after("", ids_of(ONE_WORD, "1406<eos>"), ONE_WORD) == "1406"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", "72"),
        ("72.0", "72"),
        ("so 1,234", "1234"),
        ("It costs $1,234.50.", "1234.5"),
        ("-3", "-3"),
        ("x = −3", "-3"),
        ("-$5 or $-6", "-6"),
        ("7-3", "3"),
        ("3 of 1,2,5", "5"),
        ("12,3456", None),
        ("50%", "50"),
        ("#### 1,000,000", "1000000"),
        ("0.1", "0.1"),
        ("It is .5", "0.5"),
        ("It is -.5.", "-0.5"),
        ("wait...5", "5"),
        ("version 1.2.3", "3"),
        ("It is 1e-3", "0.001"),
        ("6.02E23 of them", "6.02E23"),
        ("model 2e", "2"),
        ("1 234 567 apples", "1234567"),
        ("1\u202f234 apples", "1234"),
        ("12 34 apples", "34"),
        ("it is １３．５", "13.5"),
        ("it is –7", "-7"),
        ("5 m²", "5"),
        ("-" + "7" * 40, "-" + "7" * 40),
        ("no number", None),
        # the whole number, or none
        ("1e1000", "1e1000"),
        ("1e99999", "1e99999"),
        ("1e100000", None),
        ("1e" + "9" * 5000, None),
        ("5e3x", None),
        ("6.02x10^23", "6.02e23"),
        ("6.02 × 10²³ of them", "6.02e23"),
        (r"6.02 \times 10^{-23}", "6.02e-23"),
        ("it is 10^3", "1000"),
        ("it is 10⁻³", "0.001"),
        ("it is 2^10", None),
        ("it is 5²", None),
        ("3½ cups", "3.5"),
        ("3 ¾ cups", "3.75"),
        ("½", "0.5"),
        ("-1⅕", "-1.2"),
        ("1_000", "1000"),
        ("1_000_000.5", "1000000.5"),
        ("1'234", "1234"),
        ("3,5", None),
        ("-3,5", None),
        ("1.234,56 kg", None),
        ("1 234,5 kg", None),
        ("1,234.56 kg", "1234.56"),
        ("3, 5", "5"),
        ("0x1F", None),
        ("2 million people", "2000000"),
        # LaTeX's separators and signs
        ("1{,}000", "1000"),
        (r"1\,000", "1000"),
        (r"\boxed{12{,}345}", "12345"),
        (r"1,\!000", "1000"),
        (r"-\$5", "-5"),
        ("-€5", "-5"),
        # what multiplies a number is a part of it
        *((text, None) for text in ("5M", "5bn", "5万", "5 dozen", "5 and a half", "2**5", "1.234.567")),
        ("**5**", "5"),
        ("5!", "5"),
        # units and names
        ("5 km2", "5"),
        ("5 m^2", "5"),
        ("5 m^{2}", "5"),
        ("COVID-19", "19"),
        ("USD5", "5"),
        *((f"it is {minus}7", "-7") for minus in "‐‑‒–−﹣－⁻"),
        ("—7", "7"),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


def score(text: str, truth, finish: str = "stop", delimiter: str = "</think>", **cfg) -> Verdict:
    prompt = Prompt("rows.jsonl:3", (5,), "q", {"ground_truth": truth})
    answer = answered(prompt, ids_of(ONE_WORD, text), finish)
    [verdict] = GroundTruthVerifier(ExactAnswerReward(**cfg), ONE_WORD, delimiter, 1).score([answer])
    return verdict


def found(score: float, final: str, reason: str = "") -> Verdict:
    return Verdict(score, reason, details={"exact_answer/final_answer": final})


@pytest.mark.parametrize("tokenizer", ALL_TOKENIZERS)
@pytest.mark.parametrize(
    ("before", "text", "expected"),
    [
        ("q<think></think>\n\n", "12<eos>", "12"),
        ("q</think>", "12<eos>", "12"),
        ("q</think>", "3</think>12<eos>", "3</think>12"),
        ("</think>q", "12<eos>", None),
        ("q", "3</think>12<eos>", "12"),
    ],
)
def test_after_a_thought_that_the_prompt_has_closed_all_is_answer(tokenizer, before, text, expected):
    if tokenizer is SPECIAL and expected:  # there the delimiter is a special token, and dropped
        expected = expected.replace("</think>", "")
    prompt = Prompt("row", tuple(ids_of(tokenizer, before)), "q", {})
    for_turn = answered(  # what comes before the last turn of an episode
        Prompt("row", (), "q", {}),
        [*prompt.token_ids, *ids_of(tokenizer, text)],
        "stop",
        Episode(2, 7 + len(prompt.token_ids)),
        (),
        7,
    )
    size, ids = len(prompt.token_ids), ids_of(tokenizer, text)
    one_turn = answered(prompt, ids, "stop", Episode(1, size), (), size)
    for answer in (answered(prompt, ids, "stop"), for_turn, one_turn):
        found = judged_text(answer, True, "</think>", tokenizer)
        assert found == (Verdict(0.0, "no </think>") if expected is None else expected)


def test_verdicts():
    assert score("1406 is not it</think>1406<eos>", "1406") == found(1.0, "1406")
    assert score("1406</think>1407<eos>", "1406") == found(0.0, "1407", "other answer")
    assert score("1406<eos>", "1406") == Verdict(0.0, "no </think>")
    assert score("1406<eos>", 1406, delimiter="") == found(1.0, "1406")
    assert score("</think>1406", "1406", finish="length") == Verdict(0.0, "cut by the length budget")
    assert score("</think>1406", "1406", finish="length", require_stop=False) == found(1.0, "1406")
    assert score("</think>It is 1,406.00.<eos>", "#### 1406", answer="last_number") == found(1.0, "1406")
    assert score("</think>none<eos>", 1406, answer="last_number") == Verdict(0.0, "no number")


def test_a_row_that_cannot_be_scored_is_named():
    verdict = score("</think>1<eos>", None)
    assert verdict.score is None and verdict.failed
    assert verdict.reason.startswith("rows.jsonl:3: the exact_answer reward needs a `ground_truth`")
    verdict = score("</think>1<eos>", "x", answer="last_number")
    assert (
        verdict.score is None and verdict.failed and "rows.jsonl:3: ground_truth 'x' holds no number" in verdict.reason
    )
