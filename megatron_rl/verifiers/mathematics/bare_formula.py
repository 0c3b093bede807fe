r"""Finds the last formula or number that stands in a text without signs around it.

Invariant: a number comes with everything that is joined to it: 6 is not found in \frac{17}{6}, 3^6, 5:6, AZ6 or `5 or
6`. If a word changes the number (minus 6, 6 dozen, not 6, factorial of 6), if it is a name (step 6, in 2026), an
assumption (let x = 6) or a question (is it 6?), if it is unclear what is meant (6!, 5-6), or if another number stands
in its sentence (1 out of 6; 5 apples and 6 pears), there is no answer. A formula with an equals sign may have other
numbers around it: it says itself what the result is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_rl.verifiers.mathematics.plain_number import FUNCTION_NAMES, NOT_A_UNIT, SCALES, UNIT

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
_NUMBERED = re.compile(r"\s*#*+\s*+([0-9]{1,2})[.)]\s+\S")
_BULLET = re.compile(r"\s*(?:[-*+>#]+|[0-9]{1,2}[.)])\s+")
_OPERATOR = re.compile(r"(?:[-+*/^=<>|&:!]|\\(?:times|cdot|div|pm|mp|leq?|geq?|neq?|[lg]t|approx|in|mod|c[au]p))+")
_FUNCTION = re.compile(rf"[^A-Za-z]*(?:{'|'.join(FUNCTION_NAMES)}|sqrt)(?![A-Za-z]).*", re.IGNORECASE)
_LETTER = re.compile(r"\W*[b-zB-HJ-Z]\W*")  # a, A and I are words of English
_ASSIGNED = re.compile(rf"{NAME_AND_EQUALS}[^=<>]+")
_RANGE = re.compile(r"\$?[0-9][0-9.,]*(?:-\$?[0-9][0-9.,]*)+")
_CHANGED_BEFORE = re.compile(
    r"(?:\b(?:minus|negative|plus|times|over|mod|base|choose|twice|than|to the|at (?:most|least)|up to|between|under"
    r"|above|below|within|nearly|almost|versus|vs\.?|(?<!given )by|from|modulo"
    r"|(?:round|accurate|correct)[a-z]* to)|[0-9$)}\]] (?:to|in|out of))\s*$",
    re.IGNORECASE,
)
# Words that a number after them names, and a year.
_NAMES_NUMBER = re.compile(
    r"\b(?:step|(?:sub)?case|part|fig(?:ure|s?\.)?|eqn?s?\.?|equations?|inequality|theorem|lemma|corollary|proposition"
    r"|definition|claim|example|exercise|problem|question|chapter|section|page|line|table|row|column|item|method|option"
    r"|approach|attempt|phase|stage|level|grade|version|day|refer to)\s*+(?:no\.?|number)?+[\s$#(*_]*$",
    re.IGNORECASE,
)
_NAME = re.compile(r"[\s$(]*[0-9]+(?:\.[0-9]+)*[\s$).:,*]*")
_BEFORE_YEAR = re.compile(r"\b(?:in|since|until|year)\s*$", re.IGNORECASE)
_YEAR = re.compile(r"(?:1[5-9]|20)[0-9]{2}\W*")
# A formula after these is assumed or tried. The first ones say so anywhere, the others at a clause's beginning.
_ASSUMED = re.compile(
    r"(?:\b(?:let(?:'?s| me| us)?|suppos(?:e|ing)|assum(?:e|ing)|try(?:ing)?|check(?:ing)?|consider(?:ing)?)"
    r"|(?:^|[,;:(])\W{0,5}(?:(?:and|but|now|so|then|thus|hence|also|again|next|first|therefore)\b,?\s*){0,4}"
    r"(?:if|when|whenever|for|given|setting|substituting|plugging|taking|putting|using|with|say|test(?:ing)?|verify(?:ing)?))\b"
    r"(?:\s+(?:that|the|a|an|value|case|now|first|it|is|we|have|had|get|in|for|try|check|consider|say|take|set|instead|there"
    r"|are|all)){0,8}[\s:$(]*$",
    re.IGNORECASE,
)
_ASKED = re.compile(r"[^.!?\n]*\?")
_OF = re.compile(r"(\w*) of\s*$", re.IGNORECASE)
_AMOUNTS = frozenset(
    "total amount number count answer result price cost profit revenue salary balance area perimeter volume length "
    "width height distance radius speed rate weight mass age time probability chance score remainder maximum "
    "minimum".split()
)
"""Words before `of` that name the number after it. Any other may change the number, as `factorial of 5` does."""
_CHANGED_AFTER = re.compile(
    rf"\s+(?:(?:{'|'.join({*NOT_A_UNIT} - {'and', 'or', 'to'} - {*SCALES})})s?|divided|out of|if|unless|otherwise"
    r"|and (?:an? )?(?:half|third|quarter)|(?:more|less|fewer|[a-z]+er)(?: [a-z]+)? than"
    r"|(?:[a-z]+ )?to (?:consider|check|examine|try|analy[sz]e|distinguish)"
    rf"|(?!{UNIT}|pm)[b-df-hj-np-tv-z]{{2,3}})\b",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"\b(?:not|cannot|never|neither|nor|no|wait|wrong|incorrect|mistake|maybe|perhaps|possibly|either|unless)\b|n't\b",
    re.IGNORECASE,
)
_JOINED_BY_TEXT = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s*\{\s*(and|or)\s*\}")
# A full stop ends a sentence if a capital letter follows: not in `1 vs. 2` and `i.e. 5`.
_END_OF_SENTENCE = re.compile(r"[.!?](?=\s+[A-Z])")
_ASIDE = re.compile(r"\([^()0-9]*\)|\bi\.e\..*|, (?:which|as|because|since)\b[^0-9]*$", re.DOTALL)
_QUANTITY = re.compile(
    r"[0-9]|\\(?:[a-z]*frac|sqrt|pi|infty)\b|\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
    r"|(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|half|halves|thirds?|quarters?"
    rf"|dozen|double|{'|'.join(SCALES)})s?\b",
    re.IGNORECASE,
)
_UNIT = re.compile(rf"\s*(?:\\?%|(?:percent|{'|'.join(SCALES)})\b|[ap]\.?m\b\.?)", re.IGNORECASE)
_PUNCTUATION = " ,;:?'\"*_#"


def last_bare_formula(text: str) -> tuple[int, str | None]:
    """The end of the text's last number or command (-1 if there is none), and the formula that it belongs to."""
    text = _NOT_SEEN.sub(lambda match: " " * len(match[0]), text)
    text = _JOINED_BY_TEXT.sub(lambda match: match[1].center(len(match[0])), text)
    end = max((match.end() for match in _FORMULA_SIGN.finditer(text)), default=-1)
    if end < 0:
        return end, None
    line_start, line_end = text.rfind("\n", 0, end) + 1, text.find("\n", end)
    if (number := _NUMBERED.match(text, line_start)) and number.end(1) == end:  # 2. Then
        return end, None
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
    unit = _UNIT.match(text, stop)
    if is_changed(text, start, stop) or not ("=" in text[start:stop] or _is_alone(text, start, stop)):
        return end, None
    formula = " ".join(text[start : unit.end() if unit else stop].split())
    formula = re.sub(r"\^(-?[0-9]+)", r"^{\1}", re.sub(r"^[A-Za-z]{2,}:|(?<=[0-9])/[a-z]{3,}$", "", formula))
    formula = one_answer(re.split("[,;] (?:(?:and|or) )?| (?:and|or) ", formula))
    return end, None if formula.endswith("!") or _RANGE.fullmatch(formula) else formula


def is_changed(text: str, start: int, stop: int) -> bool:
    """Whether the words next to a formula, or a denial in its sentence or after it, make it something else: the
    name of a step, an assumption or a question."""
    before = _sentence_before(text, start)
    if _ASSUMED.search(before) or "?" in text[start:stop] or _ASKED.match(text, stop):
        return True
    if _NAME.fullmatch(text, start, stop) and _NAMES_NUMBER.search(before):
        return True
    if _YEAR.fullmatch(text, start, stop) and _BEFORE_YEAR.search(before):
        return True
    if _CHANGED_BEFORE.search(before) or _CHANGED_AFTER.match(text, stop) or _DENIED.search(before + text[stop:]):
        return True
    of = _OF.search(before)
    return of is not None and (of[1].lower() not in _AMOUNTS or bool(re.search(" (?:and|or) ", text[start:stop])))


def _is_alone(text: str, start: int, stop: int) -> bool:
    """Whether the sentence has no other number, and neither `and` nor `or` stands before this one."""
    before, line = _sentence_before(text, start), text[stop:].partition("\n")[0]
    unit = _UNIT.match(line)
    after = _END_OF_SENTENCE.split(line[unit.end() if unit else 0 :])[0]
    others = (_QUANTITY.search(_ASIDE.sub("", part)) for part in (before, after))
    return not re.search(r"\b(?:and|or)\s*$", before) and not any(others)


def _sentence_before(text: str, start: int) -> str:
    line = text[text.rfind("\n", 0, start) + 1 : start]
    bullet = _BULLET.match(line)
    return _END_OF_SENTENCE.split(line[bullet.end() if bullet else 0 :])[-1]


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
