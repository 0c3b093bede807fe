r"""Finds the final answer in the text of an answer.

Invariants: a text has one final answer or none; if it holds several answers of one kind, the last one counts; a kind
that comes first in the list below always goes before one that comes later, wherever they are in the text.

1. A box: `\boxed{...}`, `\fbox{...}` or `\boxed x`, as in lm-evaluation-harness for MATH and in verl's math reward.
   Boxes with nothing but spaces, `,`, `and`, `or`, `x =` or the signs of a list between them are one answer with
   several parts, as in Math-Verify.
2. `#### 72`, the form of GSM8K's solutions. Four number signs also begin a heading in Markdown, so what follows them
   counts only if it is a number, or if nothing follows its line.
3. `The answer is 72`, `Final answer: 72` and the like, as in Minerva (Lewkowycz et al. 2022, appendix D) and DAPO.
4. In lenient mode alone, the formula or the number that ends last in the text, as in Math-Verify, or in the sentence
   after the phrase, if that is more than the answer. A number in prose counts only if its sentence has no other. No
   answer is better than a guess: see `bare_formula`.

Math-Verify itself lets "the final answer is" go before a box; here the box is first, because most prompts ask for one.
"""

from __future__ import annotations

import re
from typing import Literal

from megatron_rl.verifiers.exact_answer import NUMBER
from megatron_rl.verifiers.mathematics.bare_formula import (
    LIST_SIGN,
    NAME_AND_EQUALS,
    is_changed,
    last_bare_formula,
    one_answer,
)
from megatron_rl.verifiers.mathematics.plain_number import FUNCTION_NAMES, TEXT_COMMAND
from megatron_rl.verifiers.mathematics.spelling import in_latex

Mode = Literal["strict", "lenient"]

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BETWEEN_BOXES = re.compile(
    rf"(?:[\s,;$&*~]|\\\\|\\[()\[\],;:! ]|\\[a-z]*(?:quad|space|skip)(?![A-Za-z])\*?(?:\{{[^{{}}]*\}})?"
    rf"|{NAME_AND_EQUALS}"
    r"|\b(?:and|or)\b|\b[Pp]art\s+\(?[A-Za-z0-9]{1,3}\)?\s*:|\([a-z0-9]{1,3}\)|(?<=\n)[ \t]*(?:[-•]|[0-9]{1,2}[.)])\s"
    r"|\\(?:text|textrm|mathrm|mbox)\s*\{[\s,;]*(?:(?:and|or)\s*)?\})*+"
)
_END_OF_BARE_BOX = re.compile(r"\$|\\\)|\\\]|\n|\Z")

_NUMBER_SIGNS = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_NUMBER_ALONE = re.compile(rf"\$?\s*(?:{NUMBER.pattern})\s*(?:\\?%)?\s*\$?\.?")

# Between the phrase and the answer there may be a colon, signs of bold or italic type, quotes, a new line, and words
# that say nothing.
_PHRASE = re.compile(
    r"(?:\banswers?[*_]*(?:\s+(?:to|for|of)\s[^.:\n]{1,80}?)?"
    r"(?:\s+(?:is|are|equals|(?:must|should|will|would)\s+be)\b|\s*[:=])|\bfinal\s+answers?[*_ ]*\n|答案[是为]?:?)"
    r"(?:[\s*_:,`\"]+|(?:therefore|thus|hence|then|so|simply|just|clearly|indeed|exactly|about|approximately|actually|"
    r"now|only|always|also|still|again|really|in\s+fact|of\s+course|equal\s+to|given\s+by)\b"
    r"|(?!(?:hard|bare|scarce|near|unlike)ly)[a-z]{3,}ly(?=[\s*_:,`\"(]+[-+$\\]*[0-9$\\]))*+",  # a name ends so, too
    re.IGNORECASE,
)
# The bound on a formula's length bounds the time for a text that opens many formulas and closes none.
_FORMULA = re.compile(
    r"\$\$(.{1,500}?)\$\$|\\\[(.{1,500}?)\\\]|\\\((.{1,500}?)\\\)"
    # A dollar sign before a space or a digit that follows a formula is a currency, by pandoc's rule.
    r"|(?<!\\)\$(?!\s)([^$\n]+?)(?<![\s\\(\[])\$(?!\d)"
    # Where spaces and new lines are inside of the signs, no word may be that only prose has.
    r"|(?<![\\$])\$((?:\\(?:text[a-z]*|mathrm|mbox|begin|end)\s*\{[^{}$]*\}|\\[A-Za-z]+|\\[^A-Za-z$]"
    r"|[A-Za-z]{1,2}(?![A-Za-z])|\n(?!\s*\n)|[^A-Za-z\\$\n]){1,300}+)\$(?!\s*\d|[\w\\({\[$])",
    re.DOTALL,
)
_ASKED = re.compile(r"(?:[^.!?\n]|\.(?=\S)){0,200}\?")
_PERCENT = re.compile(r"\s*(?:\\?%|percent\b)")
# A full stop ends a sentence if a space follows it; the full stop of 3.5 does not.
_END_OF_SENTENCE = re.compile(r"[.!?](?=\s|$)|\n")
# What may follow the answer in its sentence: a reason; after a number also a remark in brackets, or a clause. These
# words say that the answer goes on.
_GOES_ON = (
    r"(?:and|or|plus|minus|times|but|maybe|perhaps|possibly|then|if|when|unless|except|otherwise|instead|rather"
    r"|no|wait|sorry|mod(?:ulo)?|adding|followed|giving|(?:we )?(?:add|subtract|multipl[yi]|divide|get)[a-z]*)\b"
)
_FORMULA_GOES_ON = re.compile(rf"\s*(?:[-+*/^]\s*[0-9]|[,;]\s*(?!(?:and|or|if|when|no)\b){_GOES_ON})", re.IGNORECASE)
_FUNCTIONS = "|".join((*FUNCTION_NAMES, "sqrt"))
_REASON = re.compile(r"(?:,? (?:because|since)\b| \((?:because|since|as|i\.e\.)[ ,]).*$", re.DOTALL)
_REMARK = re.compile(
    r"(?: ?\([^()0-9]{0,80}[A-Za-z]{3}[^()0-9]{0,80}\)|,? (?:as|which)\b.*"
    rf"|(?:[,;]| -+| —) (?!(?i:{_GOES_ON})|(?:{_FUNCTIONS})\b)[A-Za-z]{{2,}}\b.*)$",
    re.DOTALL,
)
_SENTENCE = re.compile(rf"(?!(?:{_FUNCTIONS}|option|choice)\b)[A-Za-z]{{2,}}\s+[A-Za-z$\\]")


def final_answer(text: str, mode: Mode) -> str | None:
    r"""The final answer of a text, without the command, the phrase or the dollar signs around it.

    Args:
        text: the part of an answer after the thought.
        mode: `strict` accepts the kinds 1 to 3 of this module's list, `lenient` also the last formula or number.

    Returns:
        The final answer; None if there is none, or if its box is empty or is not closed, because then the answer was
        cut.
    """
    text = in_latex(text)
    found = _boxed(text) if _BOX.search(text) else _after_number_signs(text) or _after_phrase(text, mode)
    if found is None and mode == "lenient" and not _BOX.search(text):
        found = _last_formula_or_number(text)
    return found.strip() or None if found is not None else None


def _boxed(text: str) -> str | None:
    parts: dict[str, None] = {}  # an answer that is boxed twice is one answer
    next_start = -1
    for match in reversed(list(_BOX.finditer(text))):
        content, end = group(text, match.end())
        if parts and (end > next_start or not _BETWEEN_BOXES.fullmatch(text, end, next_start)):
            break
        if content is None:
            return None
        parts[_without_phrase(content)] = None
        next_start = match.start()
    return ", ".join(reversed(parts))


def _without_phrase(content: str) -> str:
    r"""13 for \text{The answer is }13."""
    plain = TEXT_COMMAND.sub(r"\1", content)
    return _after_phrase(plain, "strict") or content if re.search("[0-9]", plain) else content


def group(text: str, start: int) -> tuple[str | None, int]:
    """What the braces that open here hold, or else the text up to the formula's end, and where it ends; None if the
    brace is not closed."""
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


def _after_phrase(text: str, mode: Mode) -> str | None:
    matches = reversed(list(_PHRASE.finditer(text)))
    phrase = next((match for match in matches if not _ASKED.match(text, match.end())), None)
    if phrase is None:
        return None
    rest = text[phrase.end() :]
    formulas: list[str] = []
    position = last_end = 0
    while match := _FORMULA.match(rest, position):
        formulas.append(_content(match))
        percent = _PERCENT.match(rest, match.end())
        last_end = percent.end() if percent else match.end()
        joint = LIST_SIGN.match(rest, last_end)
        if joint is None:
            break
        position = joint.end()
    end = _END_OF_SENTENCE.search(rest)
    sentence = rest[: end.start()] if end else rest
    if formulas:
        return _without_dollars(sentence) if _FORMULA_GOES_ON.match(rest, last_end) else ", ".join(formulas)
    if mode == "lenient" and _SENTENCE.match(sentence) and re.search("[0-9$]", sentence):
        return _last_formula_or_number(sentence) or ""
    sentence = _REASON.sub("", sentence)
    answer = _REMARK.sub("", sentence)
    return _without_dollars(answer if re.search("[0-9]", answer) else sentence).strip().strip('*_`"').strip()


def _last_formula_or_number(text: str) -> str | None:
    formulas: list[re.Match[str]] = []
    for formula in _FORMULA.finditer(text):
        is_next = formulas and LIST_SIGN.fullmatch(text, formulas[-1].end(), formula.start())
        formulas = [*formulas, formula] if is_next else [formula]
    end, found = last_bare_formula(text)
    if formulas and formulas[-1].end() > end:
        if is_changed(text, formulas[0].start(), formulas[-1].end()):
            return None
        contents = list(map(_content, formulas))
        return one_answer(contents) if len(contents) > 1 else contents[0]
    return None if found is None else _without_dollars(found)


def _content(formula: re.Match[str]) -> str:
    """What stands between the signs, with the percent sign that follows them."""
    content = next(group for group in formula.groups() if group is not None).strip().rstrip(".")
    return content + (r"\%" if _PERCENT.match(formula.string, formula.end()) else "")


def _without_dollars(text: str) -> str:
    """Removes the signs around formulas. They mean nothing in a text that is one formula, or one price."""
    return re.sub(r"\\?\$|(?<!\\)\\[()\[\]]", "", text).strip().rstrip(".")
