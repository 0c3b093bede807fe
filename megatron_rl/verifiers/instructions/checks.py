"""Verifiable instructions: the share of a row's instructions that an answer follows.

`CHECKERS` is the table of all kinds: the 25 of IFEval (arXiv:2311.07911) and the 29 training kinds of IF-RLVR
(arXiv:2507.02833), by their public names. `kinds.py` defines them, and lists how they differ from the
published checkers.

Invariants: the same text and the same instructions have the same verdict in every process; an unknown kind, or
arguments that do not fit its kind, are a failed verdict that names the kind, never the score 0; an empty answer follows
no instruction.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import ValidationError, validate_call

from megatron_rl.types import Verdict
from megatron_rl.verifiers.instructions import kinds
from megatron_rl.verifiers.truth import composed

CHECKERS: dict[str, Callable[..., bool]] = {
    # IFEval
    "keywords:existence": kinds.existence,
    "keywords:frequency": kinds.frequency,
    "keywords:forbidden_words": kinds.forbidden_words,
    "keywords:letter_frequency": kinds.letter_frequency,
    "language:response_language": kinds.response_language,
    "length_constraints:number_sentences": kinds.number_sentences,
    "length_constraints:number_paragraphs": kinds.number_paragraphs,
    "length_constraints:number_words": kinds.number_words,
    "length_constraints:nth_paragraph_first_word": kinds.nth_paragraph_first_word,
    "detectable_content:number_placeholders": kinds.number_placeholders,
    "detectable_content:postscript": kinds.postscript,
    "detectable_format:number_bullet_lists": kinds.number_bullet_lists,
    "detectable_format:constrained_response": kinds.constrained_response,
    "detectable_format:number_highlighted_sections": kinds.number_highlighted_sections,
    "detectable_format:multiple_sections": kinds.multiple_sections,
    "detectable_format:json_format": kinds.json_format,
    "detectable_format:title": kinds.title,
    "combination:two_responses": kinds.two_responses,
    "combination:repeat_prompt": kinds.repeat_prompt,
    "startend:end_checker": kinds.end_checker,
    "startend:quotation": kinds.quotation,
    "change_case:capital_word_frequency": kinds.capital_word_frequency,
    "change_case:english_capital": kinds.english_capital,
    "change_case:english_lowercase": kinds.english_lowercase,
    "punctuation:no_comma": kinds.no_comma,
    # IFTrain
    "copy:repeat_phrase": kinds.repeat_phrase,
    "copy:copy": kinds.is_copy,
    "copy:copying_simple": kinds.is_copy,
    "copy:copying_multiple": kinds.copying_multiple,
    "new:copy_span_idx": kinds.copy_span_idx,
    "detectable_format:sentence_hyphens": kinds.sentence_hyphens,
    "detectable_format:square_brackets": kinds.square_brackets,
    "detectable_format:bigram_wrapping": kinds.bigram_wrapping,
    "keywords:no_adjacent_consecutive": kinds.no_adjacent_consecutive,
    "keywords:word_once": kinds.word_once,
    "keywords:word_count_different_numbers": kinds.word_count_different_numbers,
    "keywords:exclude_word_harder": kinds.exclude_word_harder,
    "keywords:palindrome": kinds.palindrome,
    "keywords:keyword_specific_position": kinds.keyword_specific_position,
    "keywords:start_end": kinds.start_end,
    "paragraphs:paragraphs": kinds.two_paragraphs,
    "paragraphs:paragraphs2": kinds.two_paragraphs2,
    "first_word:first_word_sent": kinds.first_word_sent,
    "first_word:first_word_answer": kinds.first_word_answer,
    "last_word:last_word_sent": kinds.last_word_sent,
    "last_word:last_word_answer": kinds.last_word_answer,
    "punctuation:punctuation_dot": kinds.punctuation_dot,
    "punctuation:punctuation_exclamation": kinds.punctuation_exclamation,
    "count:lowercase_counting": kinds.lowercase_counting,
    "count:counting_composition": kinds.counting_composition,
    "count:count_unique": kinds.count_unique,
    "count:count_increment_word": kinds.count_increment_word,
    "letters:letter_counting": kinds.letter_counting,
    "letters:letter_counting2": kinds.letter_frequency,
}

KINDS: dict[str, Callable[..., bool]] = {name: validate_call(checker) for name, checker in CHECKERS.items()}
"""The name of each kind -> its checker (text, **arguments) -> bool, which first checks the arguments against its
annotations."""


AS_SAMPLED = {"detectable_format:json_format"}
"""The kinds that judge the text as it was sampled: in JSON a typographic quotation mark is no straight one."""


def verify(text: str, truth: object, score: Literal["share", "all"]) -> Verdict:
    """The verdict on an answer to a prompt with verifiable instructions. The reason names the instructions that are not
    followed.

    Args:
        text: the answer, without the thought.
        truth: {"instruction_id": names of kinds, "kwargs": the arguments of each}, or a list with one such mapping, or
            either as JSON or as a Python literal, which is the form of the public IF-RLVR rows. `kwargs`, and any of
            its entries, may be None; an argument that is None counts as not given.
        score: `share` is the share of the instructions that are followed; `all` is 1 if all are followed, else 0.
    """
    try:
        results = [
            (name, _follows(text if name in AS_SAMPLED else composed(text), name, _composed(arguments)))
            for name, arguments in _instructions(truth)
        ]
    except ValueError as error:
        return Verdict(None, str(error), failed=True)
    if not text.strip():
        return Verdict(0.0, "the answer is empty")
    broken = [name for name, follows in results if not follows]
    share = (len(results) - len(broken)) / len(results)
    reason = f"not followed: {', '.join(broken)}" if broken else ""
    return Verdict(share if score == "share" else float(not broken), reason)


def _composed(value: Any) -> Any:
    """The arguments, with every text in them composed as the answer's is."""
    if isinstance(value, str):
        return composed(value)
    if isinstance(value, Mapping):
        return {key: _composed(inner) for key, inner in value.items()}
    return [_composed(inner) for inner in value] if isinstance(value, list | tuple) else value


def _follows(text: str, name: str, arguments: Mapping[str, object]) -> bool:
    """
    Raises:
        ValueError: the kind is unknown, or the arguments do not fit it.
    """
    if name not in KINDS:
        raise ValueError(f"no instruction of the kind {name!r} is known; verifiers/instructions/kinds.py has the kinds")
    try:
        return KINDS[name](text, **arguments)
    except ValidationError as error:
        problems = [": ".join([*map(str, e["loc"]), e["msg"]]) for e in error.errors(include_url=False)]
        raise ValueError(f"the arguments of {name} are wrong: {'; '.join(problems)}") from None
    except ValueError as error:
        raise ValueError(f"the arguments of {name} are wrong: {error}") from None


def _instructions(truth: object) -> list[tuple[str, dict[str, object]]]:
    """The name and the arguments of each instruction of a row.

    Raises:
        ValueError: the truth has another form.
    """
    value = truth
    while isinstance(value, str) or isinstance(value, list) and len(value) == 1:
        value = _parsed(value) if isinstance(value, str) else value[0]
    names = value.get("instruction_id") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(names, list) or not names:
        raise ValueError(
            "the ground truth of a row with instructions must be a mapping with a list `instruction_id` and a list "
            f"`kwargs`, but it is {truth!r}"
        )
    given = value.get("kwargs")
    arguments = [None] * len(names) if given is None else given
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise ValueError(f"`kwargs` must be a list with one entry for each of {names}, but it is {given!r}")
    for name, entry in zip(names, arguments, strict=True):
        if not isinstance(name, str):
            raise ValueError(f"`instruction_id` must hold names, but it holds {name!r}")
        if not (entry is None or isinstance(entry, Mapping) and all(isinstance(key, str) for key in entry)):
            raise ValueError(f"the arguments of {name} must be a mapping by name, but they are {entry!r}")
    return [
        (name, {key: value for key, value in (entry or {}).items() if value is not None})
        for name, entry in zip(names, arguments, strict=True)
    ]


def _parsed(text: str) -> object:
    """The value of a JSON text or of a Python literal."""
    value: Any
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ValueError(f"the ground truth is neither JSON nor a Python literal: {text!r}") from None
    if isinstance(value, str):
        raise ValueError(f"the ground truth must hold instructions, but it is the text {value!r}")
    return value
