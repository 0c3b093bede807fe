r"""Finds the last formula or number that stands in a text without signs around it.

Invariant: a number comes with everything that is joined to it: 6 is not found in \frac{17}{6}, 3^6, 5:6, AZ6 or
`5 or 6`. If a word changes the number (minus 6, 6 dozen, not 6), or if it is unclear what is meant (6!, 5-6), there is
no answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_rl.verifiers.mathematics.plain_number import FUNCTION_NAMES, NOT_A_UNIT, SCALES

NAME_AND_EQUALS = (
    r"\\?[A-Za-z](?:(?<=\\.)[a-z]+)?(?:_(?:[A-Za-z0-9]|\{[A-Za-z0-9]+\}))?'?(?:\([A-Za-z0-9]{1,3}\))?\s{0,3}&?\s{0,3}="
)
"""The pattern of `x =`, `x_1 =`, `\\alpha =` or `f(x) =`."""
LIST_SIGN = re.compile(r"\s*(?:[,;]\s*(?:(?:and|or)\b)?|\b(?:and|or)\b)\s*")
"""What separates several answers."""

# GSM8K's notes of calculations, signs of type, and a currency before a space.
_NOT_SEEN = re.compile(r"<<[^<>\n]*>>|\*\*|`|\\?\$(?=\s+[0-9])")
_FORMULA_SIGN = re.compile(r"[0-9]|\\(?!text|mathrm|mbox|quad|qquad)[A-Za-z]+")
# What stands between braces may have spaces.
_WORD = re.compile(r"(?:\\[^A-Za-z\s]|\{(?:[^{}\n]|\{(?:[^{}\n]|\{[^{}\n]*\})*+\})*+\}|\S)++")
_BULLET = re.compile(r"\s*(?:[-*+>#]+|[0-9]{1,2}[.)])\s+")
_OPERATOR = re.compile(r"(?:[-+*/^=<>|&:!]|\\(?:times|cdot|div|pm|mp|leq?|geq?|neq?|[lg]t|approx|in|mod|c[au]p))+")
_FUNCTION = re.compile(rf"[^A-Za-z]*(?:{'|'.join(FUNCTION_NAMES)}|sqrt)(?![A-Za-z]).*", re.IGNORECASE)
_LETTER = re.compile(r"\W*[b-zB-HJ-Z]\W*")  # a, A and I are words of English
_ASSIGNED = re.compile(rf"{NAME_AND_EQUALS}[^=<>]+")
_RANGE = re.compile(r"[$0-9.,]+(?:-[$0-9.,]+)+")
_CHANGED_BEFORE = re.compile(
    r"(?:\b(?:not|no longer|never|neither|nor|minus|negative|plus|times|over|mod|choose|twice|than|to the)|n't"
    r"|(?:[0-9}]|\b(?:root|square|cube|half|thirds?|quarters?|reciprocal|power)) of"
    r"|[0-9] (?:hours?|minutes?|feet|foot|ft|pounds?|degrees?|dollars?|years?|weeks?|days?),?(?: and)?)\s*$",
    re.IGNORECASE,
)
_CHANGED_AFTER = re.compile(rf"\s+(?:{'|'.join({*NOT_A_UNIT} - {'and', 'or', 'to'} - {*SCALES})})s?\b", re.IGNORECASE)
_UNIT = re.compile(rf"\s*(?:\\?%|(?:percent|{'|'.join(SCALES)})\b|[ap]\.?m\b\.?)", re.IGNORECASE)
_PUNCTUATION = " ,;:?'\"*_#"


def last_bare_formula(text: str) -> tuple[int, str | None]:
    """Where the text's last number or command ends (-1 if there is none), and the formula that it belongs to."""
    text = _NOT_SEEN.sub(lambda match: " " * len(match[0]), text)
    end = max((match.end() for match in _FORMULA_SIGN.finditer(text)), default=-1)
    if end < 0:
        return end, None
    line_start, line_end = text.rfind("\n", 0, end) + 1, text.find("\n", end)
    if (bullet := _BULLET.match(text, line_start)) and bullet.end() < end:
        line_start = bullet.end()
    words = list(_WORD.finditer(text, line_start, line_end if line_end >= 0 else len(text)))
    first = last = next(index for index, word in enumerate(words) if word.end() >= end)
    texts = [word[0] for word in words]
    while first > 0 and _are_joined(texts, first - 1):
        first -= 1
    while last + 1 < len(words) and _are_joined(texts, last):
        last += 1
    start, stop = words[first].start(), words[last].end()
    if _CHANGED_BEFORE.search(text, line_start, start) or _CHANGED_AFTER.match(text, stop):
        return end, None
    unit = _UNIT.match(text, stop)
    formula = " ".join(text[start : unit.end() if unit else stop].split())
    formula = re.sub(r"\^(-?[0-9]+)", r"^{\1}", re.sub(r"^[A-Za-z]{2,}:|(?<=[0-9])/[a-z]{3,}$", "", formula))
    formula = one_answer(re.split("[,;] (?:(?:and|or) )?| (?:and|or) ", formula))
    return end, None if formula.endswith("!") or _RANGE.fullmatch(formula) else formula


def one_answer(formulas: Sequence[str]) -> str:
    """Several formulas in a list as one answer: all of them if each is `x = 5`, or if none has an equals sign.
    Otherwise they are steps, and what the last one is equal to counts."""
    formulas = [formula.rstrip(_PUNCTUATION + ".").lstrip(_PUNCTUATION) for formula in formulas]
    if len(formulas) > 1 and (all(map(_ASSIGNED.fullmatch, formulas)) or not any("=" in one for one in formulas)):
        return ", ".join(formulas)
    formula = formulas[-1]
    if formula.count(")") > formula.count("("):  # the end of a remark in brackets
        formula = formula.rstrip(")")
    right = formula.rpartition("=")[2]
    return (right if right.count(")") <= right.count("(") else formula).strip()  # P(X=3) is not 3


def _are_joined(words: Sequence[str], index: int) -> bool:
    """Whether a word and the next one are parts of one formula or list: with an operator between them, or side by side
    as in 3 1/2 and 2 x."""
    left, right = words[index : index + 2]
    for at in (index, index + 1):
        if words[at] in ("and", "or"):
            return 0 < at < len(words) - 1 and _is_operand(words[at - 1]) and _is_operand(words[at + 1])
    if _OPERATOR.fullmatch(right):
        return index + 2 < len(words) and _is_operand(words[index + 2])
    if _OPERATOR.fullmatch(left):
        return True
    return left[-1] not in ".:?!" and _is_operand(left) and _is_operand(right)


def _is_operand(word: str) -> bool:
    return bool(_FORMULA_SIGN.search(word) or _LETTER.fullmatch(word) or _FUNCTION.match(word))
