r"""Finds the final answer in the text of an answer.

Invariants: a text has one final answer or none; if it holds several answers of one kind, the last one counts; a kind
that comes first in the list below always goes before one that comes later, wherever they are in the text.

1. A box: `\boxed{...}`, `\fbox{...}` or `\boxed x`, as in lm-evaluation-harness for MATH and in verl's math reward.
   Boxes with nothing but `,`, `and`, `or` or `x =` between them are one answer with several parts, as in Math-Verify.
2. `#### 72`, the form of GSM8K's solutions. Four number signs also begin a heading in Markdown, so what follows them
   counts only if it is a number, or if nothing follows its line.
3. `The answer is 72`, `Final answer: 72` and the like, as in Minerva (Lewkowycz et al. 2022, appendix D) and DAPO.
4. In lenient mode alone, the formula or the number that ends last in the text, as in Math-Verify.

Math-Verify itself lets "the final answer is" go before a box; here the box is first, because most prompts ask for one.
"""

from __future__ import annotations

import re
from typing import Literal

from megatron_rl.verifiers.exact_answer import NUMBER

Mode = Literal["strict", "lenient"]

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BETWEEN_BOXES = re.compile(
    r"(?:[\s,;$]|[A-Za-z](?:_[0-9])?\s*=|\\\(|\\\)|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)*"
)
_END_OF_BARE_BOX = re.compile(r"\$|\\\)|\\\]|\n|\Z")

_NUMBER_SIGNS = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_NUMBER_ALONE = re.compile(rf"\$?\s*(?:{NUMBER.pattern})\s*(?:\\?%)?\s*\$?\.?")

# Between the phrase and the answer there may be a colon, signs of bold or italic type, and a new line.
_PHRASE = re.compile(r"\banswers?[*_]*(?:\s+(?:is|are)\b|\s*[:=])[\s*_:]*", re.IGNORECASE)
# The bound on a formula's length bounds the time for a text that opens many formulas and closes none.
_FORMULA = re.compile(
    r"\$\$(.{1,500}?)\$\$|\\\[(.{1,500}?)\\\]|\\\((.{1,500}?)\\\)"
    # A dollar sign before a space or a digit that follows a formula is a currency, by pandoc's rule.
    r"|(?<!\\)\$(?!\s)([^$\n]+?)(?<![\s\\])\$(?!\d)",
    re.DOTALL,
)
_JOIN = re.compile(r"\s*(?:,\s*(?:and|or)\b|,|;|and\b|or\b)\s*")
_PERCENT = re.compile(r"\s*(?:\\?%|percent\b)")
# A full stop ends a sentence if a space follows it; the full stop of 3.5 does not.
_END_OF_SENTENCE = re.compile(r"[.!?](?=\s|$)|\n")
_NUMBER_IN_TEXT = re.compile(rf"{NUMBER.pattern}(?:\s*/\s*[0-9]+)?(?:\s*\\?%)?")


def final_answer(text: str, mode: Mode) -> str | None:
    r"""The final answer of a text, without the command, the phrase or the dollar signs around it.

    Args:
        text: the part of an answer after the thought.
        mode: `strict` accepts the kinds 1 to 3 of this module's list, `lenient` also the last formula or number.

    Returns:
        The final answer; None if there is none, or if its box is empty or is not closed, because then the answer was
        cut.
    """
    found = _boxed(text) if _BOX.search(text) else _after_number_signs(text) or _after_phrase(text)
    if found is None and mode == "lenient" and not _BOX.search(text):
        found = _last_formula_or_number(text)
    return found.strip() or None if found is not None else None


def _boxed(text: str) -> str | None:
    parts: dict[str, None] = {}  # an answer that is boxed twice is one answer
    next_start = -1
    for match in reversed(list(_BOX.finditer(text))):
        content, end = _box_content(text, match.end())
        if parts and (end > next_start or not _BETWEEN_BOXES.fullmatch(text, end, next_start)):
            break
        if content is None:
            return None
        parts[content] = None
        next_start = match.start()
    return ", ".join(reversed(parts))


def _box_content(text: str, start: int) -> tuple[str | None, int]:
    """What a box holds, and where the box ends; None if its brace is not closed."""
    if text[start : start + 1] != "{":
        end_match = _END_OF_BARE_BOX.search(text, start)
        assert end_match is not None  # the pattern matches the end of the text
        return text[start : end_match.start()].strip().rstrip("."), end_match.start()
    depth, position = 0, start
    while position < len(text):
        character = text[position]
        if character == "\\":  # the braces of \{ and \} group nothing
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : position].strip(), position + 1
        position += 1
    return None, len(text)


def _after_number_signs(text: str) -> str | None:
    for match in reversed(list(_NUMBER_SIGNS.finditer(text))):
        line = match[1].strip().strip("*").strip()
        if line and (_NUMBER_ALONE.fullmatch(line) or not text[match.end() :].strip()):
            return _without_dollars(line)
    return None


def _after_phrase(text: str) -> str | None:
    matches = list(_PHRASE.finditer(text))
    if not matches:
        return None
    rest = text[matches[-1].end() :]
    formulas: list[str] = []
    position = 0
    while match := _FORMULA.match(rest, position):
        percent = _PERCENT.match(rest, match.end())
        position = percent.end() if percent else match.end()
        formulas.append(_content(match) + (r"\%" if percent else ""))
        joint = _JOIN.match(rest, position)
        if joint is None:
            break
        position = joint.end()
    if formulas:
        return ", ".join(formulas)
    end = _END_OF_SENTENCE.search(rest)
    return _without_dollars(rest[: end.start()] if end else rest).strip().strip("*_").strip()


def _last_formula_or_number(text: str) -> str | None:
    formula = number = None
    for formula in _FORMULA.finditer(text):
        pass
    for number in _NUMBER_IN_TEXT.finditer(text):
        pass
    if formula and (number is None or formula.end() > number.end()):
        return _content(formula)
    return number[0] if number else None


def _content(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip().rstrip(".")


def _without_dollars(text: str) -> str:
    """Removes the signs around formulas. They mean nothing in a text that is one formula, or one price."""
    return re.sub(r"\\?\$|(?<!\\)\\[()\[\]]", "", text).strip().rstrip(".")
