r"""The mathematics verifier: 1 if the final answer of a text is equivalent to the ground truth, else 0.

Texts that differ in type, case and white space alone are equivalent. Otherwise the first rule decides that applies:

1. A plain number (72, 1,234.50, $5, 12.5%, 3 \times 10^4, 72 clips) is compared exactly with another plain number,
   without sympy: see `same_number`.
2. A ground truth that is no mathematics (Monday, \text{yes}) is equivalent to no other text.
3. A time of day (2:30 p.m.), a number with its base (101_2), the letters or circled numbers of a choice, or a formula
   of sets by their names (A \cap B), is compared with another one of its kind. A time is equal to no ratio, quotient
   or number.
4. Everything else is read by latex2sympy2-extended and compared by Math-Verify (https://github.com/huggingface/Math-Verify).

Invariants: the verdict is a pure function of the three arguments; no signal and no thread is used, so it works in any
thread of any process; a ground truth that cannot be read is an abstention for every answer, so that a row never keeps
only its right answers; so is one with inequalities that sympy cannot solve. An answer that cannot be read or compared,
that is beyond the limits below, or that only restates the problem as an integral, a derivative, a limit, a sum or a
product, scores 0. It is not a final answer, and an abstention would let a policy escape the score 0 with nonsense.

Units are not compared: 5 km is 5 and also 5 m. The limits keep almost every comparison below a second. What remains
for the deadline of the caller's process: equations and inequalities that sympy solves slowly, expressions with
variables that are equal at our sample point and that sympy simplifies slowly, and ground truths that are integrals,
limits or sums themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
from latex2sympy2_extended.sets import FiniteSet

from megatron_rl.types import Verdict
from megatron_rl.verifiers.mathematics.equivalence import refuse_unsolvable, same_expression
from megatron_rl.verifiers.mathematics.final_answer import Mode, final_answer
from megatron_rl.verifiers.mathematics.formula import MAX_CHARACTERS, UNEVALUATED, Unreadable, clean, has, parse
from megatron_rl.verifiers.mathematics.notations import (
    choice,
    circled,
    clock,
    congruence,
    digits_and_base,
    is_words,
    plain_text,
    region,
    right_side,
    same_choices,
    same_remainder,
    set_names,
    with_empty_set,
)
from megatron_rl.verifiers.mathematics.plain_number import PlainNumber, plain_number, same_number


def verify(text: str, truth: str, mode: Mode) -> Verdict:
    r"""Whether the final answer of a text is equivalent to the ground truth.

    Args:
        text: the part of an answer after the thought.
        truth: the ground truth: LaTeX, a number, or a text. It may be boxed, or have any of the forms that the strict
            mode finds.
        mode: which final answers count: see `final_answer`.

    Returns:
        1.0 or 0.0 with what was found. An abstention with `failed` if the ground truth cannot be read, or not be
        compared.
    """
    expected = with_empty_set(clean(final_answer(truth, "strict") or truth))
    try:
        reference = _Reference.read(expected)
    except Unreadable as error:
        return Verdict(None, f"the ground truth {_short(truth)} {error}; correct or remove the row", failed=True)
    found = final_answer(text, mode)
    if found is None:
        return Verdict(0.0, "no final answer")
    details = {"final_answer": _vote(clean(found))}
    try:
        equal = reference.equals(with_empty_set(clean(found)))
    except Unreadable as error:
        return Verdict(0.0, f"found {_short(found)}, which {error}", details=details)
    except Exception as error:  # sympy raises errors of many classes
        raised = f"{type(error).__name__}: {_short(str(error))}"
        return Verdict(0.0, f"found {_short(found)}, whose comparison raised {raised}", details=details)
    return Verdict(float(equal), f"found {_short(found)}", details=details)


def _vote(found: str) -> str:
    """The final answer in the form that a majority vote counts. Plain numbers are equal as numbers (to
    28 digits), everything else as text."""
    number = plain_number(found)
    if number is None:
        return plain_text(found)[:MAX_CHARACTERS]
    return f"{number.value.normalize()}{'%' if number.percent else ''}"


@dataclass(frozen=True, slots=True)
class _Reference:
    """The ground truth, read once for each comparison."""

    text: str
    number: PlainNumber | None
    expression: Any | None
    """None if the ground truth is a plain number, a time of day, sets by their names (A \\cap B), circled numbers, a
    congruence or no mathematics."""

    @classmethod
    def read(cls, text: str) -> _Reference:
        """Raises Unreadable."""
        if not text:
            raise Unreadable("is empty")
        number = plain_number(text)
        is_read = number is not None or is_words(text) or (":" in text and clock(text) is not None)
        is_read = is_read or region(text, set_names(text)) is not None or circled(text) is not None
        is_read = is_read or congruence(text) is not None
        expression = None if is_read else parse(text)
        try:
            refuse_unsolvable(expression)
        except Exception as error:
            raise Unreadable(f"cannot be solved by sympy ({type(error).__name__})") from error
        return cls(text, number, expression)

    def equals(self, found: str) -> bool:
        """Raises Unreadable if `found` cannot be read as mathematics, or is beyond the limits."""
        if plain_text(found) == plain_text(self.text):
            return True
        if ":" in found:  # a:b = 1:2
            found = right_side(found)
        if (are_same := same_choices(self.text, found)) is not None:
            return are_same
        if (are_same := same_remainder(self.text, found)) is not None:
            return are_same
        time, other_time = clock(self.text), clock(found)
        if time is not None and (other_time is not None or ":" in self.text):
            return other_time is not None and time.is_same(other_time)
        if other_time is not None and other_time.is_sure and ":" in found and ":" not in self.text:
            return False
        if self.number is None and self.expression is None:
            names = set_names(self.text, found)
            area = region(self.text, names)
            return area is not None and area == region(found, names)
        if self.number is not None:
            number = plain_number(right_side(found))
            if number is not None:
                return same_number(self.number, number)
        for notation in (digits_and_base, choice):
            ours, theirs = notation(self.text), notation(found)
            if ours is not None and theirs is not None:
                return ours == theirs
        expression = parse(self.text) if self.expression is None else self.expression
        other = parse(found)
        if has(other, UNEVALUATED) and not has(expression, UNEVALUATED):
            raise Unreadable("only restates the problem")
        for ours, theirs, text in ((expression, other, found), (other, expression, self.text)):
            if isinstance(ours, sympy.Tuple | sympy.Interval) and isinstance(theirs, FiniteSet) and _in_braces(text):
                return False  # Math-Verify takes some sets for tuples
        return same_expression(expression, other)


def _in_braces(text: str) -> bool:
    return text.startswith(r"\{") and text.endswith(r"\}")


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
