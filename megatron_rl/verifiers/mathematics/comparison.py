r"""The mathematics verifier: 1 if the final answer of a text is equivalent to the ground truth, else 0.

Texts that differ in type, case and white space alone are equivalent. Otherwise the first rule decides that applies:

1. A plain number (72, 1,234.50, $5, 12.5%, 3 \times 10^4, 72 clips) is compared exactly with another plain number,
   without sympy: see `same_number`.
2. A ground truth that is no mathematics (Monday, \text{yes}) is equivalent to no other text.
3. A time of day (2:30 p.m.), a number with its base (101_2), or the letter of a choice, is compared with another one of
   its kind. A time is equal to no ratio, quotient or number.
4. Everything else is read by latex2sympy2-extended and compared by Math-Verify (https://github.com/huggingface/Math-Verify).

Invariants: the verdict is a pure function of the three arguments; no signal and no thread is used, so it works in any
thread of any process; a ground truth that cannot be read is an abstention for every answer, so that a row never keeps
only its right answers; an error that ends the comparison is an abstention, never the score 0; an answer that cannot be
read, that is beyond the limits below, or that only restates the problem as an integral, a derivative, a limit, a sum or
a product, scores 0. It is not a final answer, and an abstention would let a policy escape the score 0 with nonsense.

Math-Verify tries several comparisons one after another, and an error in one of them only means that it found no
equality. Its own functions for whole texts also turn the errors of the parser into False, so they are not used.

Units are not compared: 5 km is 5 and also 5 m. The limits keep almost every comparison below a second. What remains
for the deadline of the caller's process: equations and inequalities that sympy solves slowly, expressions with
variables that are equal at our sample point and that sympy simplifies slowly, and ground truths that are integrals,
limits or sums themselves.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import mpmath
import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.sets import FiniteSet
from math_verify.grader import sympy_expr_eq
from sympy.core.relational import Relational

from megatron_rl.types import Verdict
from megatron_rl.verifiers.mathematics.final_answer import Mode, final_answer, group
from megatron_rl.verifiers.mathematics.plain_number import (
    FUNCTION_NAMES,
    NOT_A_UNIT,
    TEXT_COMMAND,
    TYPE_NAMES,
    UNIT,
    PlainNumber,
    plain_number,
    same_number,
)
from megatron_rl.verifiers.mathematics.spelling import in_latex

MAX_CHARACTERS = 400
"""The longest expression that is parsed. The longest ground truth of MATH-500 has 159 characters, and the parser needs
about a second for 400."""
MAX_DEPTH = 10
"""The deepest nesting of brackets. The parser's time grows with its square or faster."""
MAX_BITS = 100_000
"""The size of the largest integer that may arise during a comparison."""
MAX_EXPONENT = 100
"""The largest exponent of a sum that contains variables, because sympy may expand it."""
MAX_DEGREE = 12
"""The largest exponent of a variable in an equation or an inequality, because sympy may solve it."""
_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_UNEVALUATED = (sympy.Integral, sympy.Derivative, sympy.Limit, sympy.Sum, sympy.Product)


def verify(text: str, truth: str, mode: Mode) -> Verdict:
    r"""Whether the final answer of a text is equivalent to the ground truth.

    Args:
        text: the part of an answer after the thought.
        truth: the ground truth: LaTeX, a number, or a text. It may be boxed, or have any of the forms that the strict
            mode finds.
        mode: which final answers count: see `final_answer`.

    Returns:
        1.0 or 0.0 with what was found. An abstention with `failed` if the ground truth cannot be read, or if the
        comparison raised.
    """
    expected = _clean(final_answer(truth, "strict") or truth)
    try:
        reference = _Reference.read(expected)
    except _Unreadable as error:
        return Verdict(None, f"the ground truth {_short(truth)} {error}; correct or remove the row", failed=True)
    found = final_answer(text, mode)
    if found is None:
        return Verdict(0.0, "no final answer")
    details = {"final_answer": _vote(_clean(found))}
    try:
        equal = reference.equals(_clean(found))
    except _Unreadable as error:
        return Verdict(0.0, f"found {_short(found)}, which {error}", details=details)
    # sympy raises errors of many classes; none of them says anything about the answer.
    except Exception as error:
        reason = f"comparing {_short(found)} with {_short(truth)} raised {type(error).__name__}: {_short(str(error))}"
        return Verdict(None, reason, failed=True)
    return Verdict(float(equal), f"found {_short(found)}", details=details)


def _vote(found: str) -> str:
    """The final answer in the form that a majority vote counts. Plain numbers are equal as numbers (to
    28 digits), everything else as text."""
    number = plain_number(found)
    if number is None:
        return _plain_text(found)[:MAX_CHARACTERS]
    return f"{number.value.normalize()}{'%' if number.percent else ''}"


class _Unreadable(ValueError):
    """The message continues a sentence whose subject is the ground truth or the answer."""


@dataclass(frozen=True, slots=True)
class _Reference:
    """The ground truth, read once for each comparison."""

    text: str
    number: PlainNumber | None
    expression: Any | None
    """None if the ground truth is a plain number, a time of day or no mathematics."""

    @classmethod
    def read(cls, text: str) -> _Reference:
        """Raises _Unreadable."""
        if not text:
            raise _Unreadable("is empty")
        number = plain_number(text)
        is_read = number is not None or _is_words(text) or (":" in text and _clock(text) is not None)
        return cls(text, number, None if is_read else _parse(text))

    def equals(self, found: str) -> bool:
        """Raises _Unreadable if `found` cannot be read as mathematics, or is beyond the limits."""
        if _plain_text(found) == _plain_text(self.text):
            return True
        clock, other_clock = _clock(self.text), _clock(found)
        if clock is not None and (other_clock is not None or ":" in self.text):
            return other_clock is not None and clock.is_same(other_clock)
        if other_clock is not None and other_clock.is_sure and ":" in found and ":" not in self.text:
            return False
        if self.number is None and self.expression is None:
            return False
        if self.number is not None:
            number = plain_number(_right_side(found))
            if number is not None:
                return same_number(self.number, number)
        for notation in (_digits_and_base, _choice):
            ours, theirs = notation(self.text), notation(found)
            if ours is not None and theirs is not None:
                return ours == theirs
        expression = _parse(self.text) if self.expression is None else self.expression
        other = _parse(found)
        if _has(other, _UNEVALUATED) and not _has(expression, _UNEVALUATED):
            raise _Unreadable("only restates the problem")
        for ours, theirs, text in ((expression, other, found), (other, expression, self.text)):
            if isinstance(ours, sympy.Tuple | sympy.Interval) and isinstance(theirs, FiniteSet) and _in_braces(text):
                return False  # Math-Verify takes some sets for tuples
        return _same_expression(expression, other)


def _in_braces(text: str) -> bool:
    return text.startswith(r"\{") and text.endswith(r"\}")


def _clean(text: str) -> str:
    """Without what only changes how a formula looks, and in the characters that the parser knows."""
    text = _THOUSANDS.sub("", in_latex(text.strip()))
    text = _LOOK.sub("", _PYTHON_POWER.sub("^", text)).replace("**", "")  # the other ** are bold type
    text = _SPACING.sub(" ", text).strip('"` ').rstrip(".").strip()
    while text.startswith("{") and len(text) <= MAX_CHARACTERS and group(text, 0) == (text[1:-1].strip(), len(text)):
        text = text[1:-1].strip()
    return text


_PYTHON_POWER = re.compile(r"(?<=[\w)}])\*\*(?=[\w(-])")
# `{,}`, `\,` and `\!`, with or without a comma, separate thousands. After a comma, other spaces separate the parts of a
# list, and other spacing commands are spaces.
_THOUSANDS = re.compile(r"(?<=[0-9])(?!,[0-9])(?:\{,\}|,|\\[!,]\s*)+(?=[0-9]{3}(?![0-9]))")
# Commands for type are dropped without the braces of what they are for.
_LOOK = re.compile(
    r"\\(?:display|text|script)style(?![A-Za-z])|\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])|\\?\$"
    r"|\\(?:(?:text)?color|colorbox)\s*(?:\[\w+\])?\s*\{[^{}]*\}"
    r"|\\(?:boldsymbol|bm|pmb|underline|uline|emph|ensuremath|mathop|bf|it|rm|sf|tt|bfseries|itshape|tiny|small|normalsize|"
    r"large|Large|LARGE|huge|Huge)(?![A-Za-z])"
    rf"|\\(?:{TYPE_NAMES})\s*(?=\{{[^{{}}]*\{{)"
)
_SPACING = re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad(?![A-Za-z])|~|\s+")


_WORDS = re.compile(r"[^\W\d_]+(?:[ '\".,;:!?/()-]+[^\W\d_]+)*[ .!?)]*")
_LONG_WORD = re.compile(r"[^\W\d_]{3,}")
_OTHER_NAMES = ("sqrt", "infinity", "inf")


def _plain_text(text: str) -> str:
    """The text without commands for type, white space, case and the final full stop."""
    return " ".join(TEXT_COMMAND.sub(r"\1", text).replace('"', "").split()).strip().rstrip(".").casefold()


def _is_words(text: str) -> bool:
    r"""Whether a text is no mathematics: words of three letters or more that name no function, `no`, or `\text{...}`
    alone. Shorter words may be products of variables."""
    plain = _plain_text(text)
    if not _WORDS.fullmatch(plain):
        return False
    long_words = [word for word in _LONG_WORD.findall(plain) if word not in (*FUNCTION_NAMES, *_OTHER_NAMES)]
    return bool(long_words) or plain == "no" or (len(plain) > 1 and TEXT_COMMAND.fullmatch(text) is not None)


_CHOICE = re.compile(
    r"(?:(?i:option|choice|answer)\s+)?(?:\(([A-J])\)(?:\s+[\w\\].*)?|([A-J])[).:](?:\s+[\w\\].*)?|([A-Ja-j]))",
    re.DOTALL,
)


def _choice(text: str) -> str | None:
    """The letter of a choice, as in A, (A), or (A) 5 km."""
    match = _CHOICE.fullmatch(TEXT_COMMAND.sub(r"\1", text).strip())
    return next(letter for letter in match.groups() if letter).upper() if match else None


_CLOCK = re.compile(
    r"([0-9]{1,2})(?:\s*:\s*([0-5][0-9]))?(?::([0-5][0-9]))?"
    r"\s*(?:([ap])\.?\s?m\b\.?|(noon|midnight)\b|hours?\b|hrs\b|o'clock)?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class _Clock:
    times: frozenset[int]
    """The seconds since midnight: of two times if only the halves of the day tell them apart."""
    is_marked: bool
    is_sure: bool
    """Whether it is no ratio: marked with a half of the day, or not in lowest terms."""

    def is_same(self, other: _Clock) -> bool:
        """The half of the day may be left out, like any other unit."""
        if self.is_marked or other.is_marked:
            return bool(self.times & other.times)
        return self.times == other.times


def _clock(text: str) -> _Clock | None:
    """A time of day, as in 2:30, 14:30:05 or 3 p.m."""
    match = _CLOCK.fullmatch(TEXT_COMMAND.sub(r" \1", text).replace("{:}", ":").strip())
    if match is None or int(match[1]) > 24:
        return None
    hour, minute, second = (int(part or 0) for part in match.groups()[:3])
    half = match[4] or match[5]
    if half is None and (match[2] is None or (match[3] is not None and "0" not in (match[2][0], match[3][0]))):
        return None  # a number, or a ratio of three
    start = (minute + 60 * (hour % 12)) * 60 + second
    if hour > 12 or (hour == 0 and half is None):
        times = frozenset({start + 12 * 3600 * (12 < hour < 24)})
    elif half is None:
        times = frozenset({start, start + 12 * 3600})
    else:
        times = frozenset({start + 12 * 3600 * (half.lower() in ("p", "noon"))})
    return _Clock(times, half is not None, half is not None or match[2][0] == "0" or math.gcd(hour, minute) > 1)


_REPEATING = re.compile(r"(?<![0-9])([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*\{([0-9]+)\}")
_BASE = re.compile(r"([0-9][0-9A-Za-z]*)\s*_\s*\{?\s*([0-9]{1,2})\s*\}?")


def _right_side(text: str) -> str:
    """What follows the equals sign in `x = 5` or `total cost = 5`; the text itself if it is no single equation."""
    left, sign, right = text.rpartition("=")
    return right if sign and not re.search(r"[<>,;!\\]|=|\b(?:and|or)\b", left + right.replace(",", "")) else text


def _digits_and_base(text: str) -> tuple[str, str] | None:
    match = _BASE.fullmatch(text)
    return (match[1].upper().lstrip("0"), match[2]) if match else None


_LAST_TEXT = re.compile(
    r"(?<=\S)(?:\s*(?:\\cdot\s*|/\s*)?\\(?:text(?:bf|it|rm|normal)?|mathrm|mbox)"
    rf"\s*\{{\s*(?!(?:{'|'.join(NOT_A_UNIT)})\b)[^{{}}]*\}}(?:\^\{{?-?[0-9]\}}?)?)+$"
)
_LAST_UNIT = re.compile(rf"(?<=[0-9)}}i])\s*{UNIT}(?:[\s.]|\^\{{?[23]\}}?|/|per\b|{UNIT})*$", re.IGNORECASE)
_BARE_NAME = re.compile(rf"(?<![\\A-Za-z])({'|'.join(FUNCTION_NAMES)})(?![A-Za-z])")
_MIXED_NUMBER = re.compile(r"(?<![0-9.,/^_])([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)(?![0-9])")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z0-9])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]+)(?![A-Za-z0-9])")
# What the parser does not know or misreads, and how it is written for the parser.
_SPELLINGS = (
    (re.compile(r"\\varnothing|\\O(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\?sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\\langle"), "("),
    (re.compile(r"\\rangle"), ")"),
    (re.compile(r"\^\s*(-[0-9]+)"), r"^{\1}"),
    (re.compile(r"^\s*\\approx"), ""),
    (re.compile(r"^\\\{\s*[a-z](?:\s*\\in\s*\\mathbb\s*\{?R\}?)?\s*(?:\\mid|\||:)(.*)\\\}$"), r"\1"),
    (re.compile(r"[\[(]?\\begin\{array\}\{[^}]*\}(.*?)\\end\{array\}[\])]?"), r"\\begin{bmatrix}\1\\end{bmatrix}"),
    (_MIXED_NUMBER, r"\1\\frac{\2}{\3}"),
    (_SCIENTIFIC, r"\1 \\times 10^{\2}"),
    (_BARE_NAME, r"\\\1 "),
)
_E_OR_I = re.compile(r"\\(?:mathrm|text)\s*\{\s*([ei])\s*\}")
_TRIGONOMETRIC = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)")
# The parser evaluates these at once, and a power among their arguments could take forever.
_EVALUATED_BY_PARSER = re.compile(r"binom|gcd|lcm")
_LARGE_ARGUMENT = re.compile(r"[0-9]{5}|!|\^\s*\{?\s*[0-9]{3}|\^[^a-z]*\^")
_SIDE_BY_SIDE = re.compile(r"(?<!frac)(?<!frac )(?<![_^])[0-9]\s+[0-9]")
_I = sympy.Symbol("i", real=True)


def _parse(text: str) -> Any:
    """The sympy expression of a text in LaTeX, with i as the imaginary unit. Raises _Unreadable."""
    if len(text) > MAX_CHARACTERS:
        raise _Unreadable(f"has more than {MAX_CHARACTERS} characters")
    if max(_depth(text), text.count("|") // 2) > MAX_DEPTH:
        raise _Unreadable(f"nests more than {MAX_DEPTH} brackets")
    if 1 < text.count(":") < MAX_DEPTH:  # the ratio of three or more
        *parts, last = map(_parse, text.split(":"))
        return _checked(sympy.Tuple(sympy.Symbol(":"), *(part / last for part in parts)))
    whole = TEXT_COMMAND.fullmatch(text)
    text = _LAST_TEXT.sub("", _E_OR_I.sub(r"\1", whole[1] if whole else text))
    text = _REPEATING.sub(_fraction, _LAST_UNIT.sub("", text))
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    if r"\pm" in text and r"\mp" not in text:  # the parser knows it only at the top of an expression
        text = text.replace(r"\pm", "+") + ", " + text.replace(r"\pm", "-")
    if _SIDE_BY_SIDE.search(text):  # the parser would multiply them
        raise _Unreadable("has two numbers side by side")
    if _EVALUATED_BY_PARSER.search(text) and _LARGE_ARGUMENT.search(text):
        raise _Unreadable("has too large a binomial coefficient or divisor")
    degrees = r"\circ" in text and _TRIGONOMETRIC.search(text) is not None
    try:
        expression = latex2sympy(
            normalize_latex(text, _NORMALIZATION), is_real=True, convert_degrees=degrees, normalization_config=None
        )
    # The parser raises Exception itself for most texts that are no LaTeX formula, and many classes for the others.
    except Exception as error:
        raise _Unreadable("is not a formula that can be read") from error
    if not isinstance(expression, sympy.Basic | sympy.MatrixBase):  # the parser decides some relations of sets
        raise _Unreadable("is not a formula that can be read")
    _checked(expression)
    if _I in expression.free_symbols and not _has(expression, _UNEVALUATED):
        expression = expression.subs(_I, sympy.I)
    return expression


def _checked(expression: Any) -> Any:
    """The expression, if it is within the limits and defined. Raises _Unreadable."""
    _refuse_costly(expression)
    if _has(expression, (type(sympy.nan), type(sympy.zoo))):
        raise _Unreadable("is undefined")
    return expression


def _fraction(match: re.Match[str]) -> str:
    """0.1(6) as (16 - 1) / 90."""
    whole, fixed, repeated = match.groups()
    numerator = int((whole + fixed + repeated) or "0") - int((whole + fixed) or "0")
    return rf"\frac{{{numerator}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _nodes(expression: Any) -> list[Any]:
    """All parts of an expression. A matrix counts as the list of its entries."""
    parts, pending = [], [expression]
    while pending:
        part = pending.pop()
        parts.append(part)
        pending.extend(part.flat() if isinstance(part, sympy.MatrixBase) else getattr(part, "args", ()))
    return parts


def _has(expression: Any, classes: tuple[type, ...]) -> bool:
    return any(isinstance(part, classes) for part in _nodes(expression))


def _refuse_costly(expression: Any) -> None:
    """Raises _Unreadable if evaluating, expanding or solving the expression could take very long."""
    if _bits(expression) > MAX_BITS:
        raise _Unreadable("is too large a number to be evaluated")
    parts = _nodes(expression)
    is_relation = any(isinstance(part, Relational) for part in parts)
    for part in parts:
        if not (isinstance(part, sympy.Pow) and part.base.free_symbols and part.exp.is_number):
            continue
        if part.base.is_Add and _bits(part.exp) > 7 and abs(part.exp) > MAX_EXPONENT:
            raise _Unreadable(f"has a sum to a power above {MAX_EXPONENT}")
        if is_relation and _bits(part.exp) > 4 and abs(part.exp) > MAX_DEGREE:
            raise _Unreadable(f"is an equation or inequality of a degree above {MAX_DEGREE}")


def _bits(expression: Any) -> float:
    """An upper bound of log2 of the largest number that evaluating the expression can give, with variables as 1."""
    if isinstance(expression, sympy.Float):
        return float(abs(mpmath.mag(expression._to_mpmath(53)))) if expression else 1.0
    if isinstance(expression, sympy.Rational):
        return float(max(abs(expression.p).bit_length(), expression.q.bit_length()))
    parts = expression.flat() if isinstance(expression, sympy.MatrixBase) else getattr(expression, "args", ())
    bits = [_bits(part) for part in parts] or [1]
    if isinstance(expression, sympy.Pow | sympy.exp):
        base = bits[0] if isinstance(expression, sympy.Pow) else 2
        return base * _power_of_two(_magnitude(expression.args[-1], bits[-1]))
    if isinstance(expression, sympy.factorial | sympy.gamma | sympy.cosh | sympy.sinh):
        return bits[0] * _power_of_two(bits[0])
    return sum(bits) if isinstance(expression, sympy.Mul) else max(bits) + len(bits).bit_length()


def _magnitude(expression: Any, bits: float) -> float:
    """The bits of the integer part of an exponent: few for 1/1000000, though its own size is larger."""
    if isinstance(expression, sympy.Rational):
        return float(max(0, abs(expression.p).bit_length() - expression.q.bit_length() + 1))
    return bits


def _power_of_two(bits: float) -> float:
    return 2**bits if bits < 64 else float("inf")


def _same_expression(expected: Any, found: Any) -> bool:
    """Whether two expressions are equivalent, by Math-Verify's rules and a few more. May raise what sympy raises."""
    if _same_where_roots_are_real(expected, found):
        return True
    return not _differ_at_a_point(expected, found) and _same_by_math_verify(expected, found)


def _same_by_math_verify(expected: Any, found: Any) -> bool:
    """What `_same_expression` says about expressions whose values do not tell them apart."""
    if isinstance(expected, sympy.Ne) and isinstance(found, Relational):  # Math-Verify raises for this relation
        if not isinstance(found, sympy.Ne):
            return False
        expected, found = sympy.Eq(*expected.args, evaluate=False), sympy.Eq(*found.args, evaluate=False)
    if sympy_expr_eq(expected, found, 6, 15, allow_set_relation_comp=True):
        if _have_other_values(expected, found):
            return False
        # Math-Verify takes all equations without real solutions for equal.
        both_equations = isinstance(expected, sympy.Eq) and isinstance(found, sympy.Eq)
        return not both_equations or _multiples(expected, found) or bool(sympy.solve(expected))
    if _has(expected, (sympy.log,)) and isinstance(expected, sympy.Expr) and isinstance(found, sympy.Expr):
        difference = sympy.expand_log(expected - found, force=True)  # ln(ab) is ln a + ln b: a and b are then positive
        if sympy.simplify(difference) == 0:
            return True
    sets = _solutions(expected), _solutions(found)
    if expected.free_symbols == found.free_symbols or isinstance(expected, sympy.Set) or isinstance(found, sympy.Set):
        return bool(None not in sets and sets != (expected, found) and sympy_expr_eq(*sets, 6, 15))
    return False


def _multiples(a: sympy.Eq, b: sympy.Eq) -> bool:
    """Whether one equation is the other one times a number, as 2x = 4 is x = 2 times 2."""
    ratio = sympy.simplify((a.lhs - a.rhs) / (b.lhs - b.rhs))
    return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)


def _solutions(expression: Any) -> Any:
    """The real numbers that satisfy inequalities of one variable; a set itself; None for anything else.

    x > 1, x < -1 is a union, because Math-Verify reads `or` as a comma, and an intersection would be one chain.
    """
    if isinstance(expression, FiniteSet) and len(expression.free_symbols) == 1:
        parts = [_solutions(part) for part in expression.args if isinstance(part, Relational | And)]
        return sympy.Union(*parts) if len(parts) == len(expression.args) and None not in parts else expression
    if isinstance(expression, Relational | And) and not isinstance(expression, sympy.Eq):
        return expression.as_set() if len(expression.free_symbols) == 1 else None
    return expression if isinstance(expression, sympy.Set) else None


def _differ_at_a_point(a: Any, b: Any) -> bool:
    """Whether two expressions have different values where their variables are 1/2 + 1/7, 1/2 + 2/7, ...

    This saves the time that sympy would need to simplify a difference that is not 0. It decides nothing if a value
    is not finite, or if the difference could be rounding. It also keeps apart what Math-Verify would round to 0,
    however small the values are.
    """
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return False
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    if symbols and (a.is_Symbol or b.is_Symbol):  # Math-Verify compares abc with the product of a, b and c
        return False
    point = {symbol: sympy.Rational(1, 2) + sympy.Rational(n, 7) for n, symbol in enumerate(symbols, 1)}
    value, other = a.evalf(30, subs=point), b.evalf(30, subs=point)
    if not (value.is_number and other.is_number and value.is_finite and other.is_finite):
        return False
    difference = abs(value - other).evalf(30)
    if a.has(sympy.Float) or b.has(sympy.Float):  # decimals may be rounded to six digits
        return bool(difference > 1e-5 * min(1, abs(value)))
    if _has(a, _UNEVALUATED) or _has(b, _UNEVALUATED):  # found by quadrature
        return bool(difference > max(1e-10 * max(abs(value), abs(other)), 1e-25))
    # sympy evaluates a difference with more and more digits, and marks by a precision of one bit what may be 0.
    parts = (a - b).evalf(5, subs=point).as_real_imag()
    return any(part.is_Float and part and part._prec > 1 for part in parts)


def _values(expression: Any) -> list[Any]:
    """The formulas that a list, a set, an interval, a matrix, or relations like x = 5 and 0 < x consist of."""
    if isinstance(expression, Relational):
        sides = expression.args if expression.lhs.is_Symbol or expression.rhs.is_Symbol else ()
        return [side for side in sides if not side.is_Symbol]
    if isinstance(expression, sympy.Interval):
        return [expression.start, expression.end]
    if isinstance(expression, sympy.MatrixBase):
        return list(expression.flat())
    if isinstance(expression, sympy.Tuple | sympy.Set | And):
        return [value for part in expression.args for value in _values(part)]
    return [expression] if isinstance(expression, sympy.Expr) else []


def _have_other_values(a: Any, b: Any) -> bool:
    """Whether a value of the one expression is none of the other's. Math-Verify rounds to six decimals."""
    ours, theirs = _values(a), _values(b)
    return bool(ours and theirs) and any(
        all(_differ_at_a_point(value, other) for other in others)
        for values, others in ((ours, theirs), (theirs, ours))
        for value in values
    )


def _same_where_roots_are_real(a: Any, b: Any) -> bool:
    r"""Whether two expressions are equal where each factor under a root is positive, so that \sqrt{2/k} is
    \sqrt{2} / \sqrt{k}. A factor to an even power may have any sign: \sqrt{x^2} is not x."""
    if not all(isinstance(one, sympy.Expr | sympy.Tuple | sympy.Eq) for one in (a, b)):
        return False
    if isinstance(a, sympy.Tuple) != isinstance(b, sympy.Tuple):
        return False
    if isinstance(a, sympy.Eq) and isinstance(b, sympy.Eq) and a.lhs != b.lhs:
        return False
    roots = [
        part.base
        for part in (*_nodes(a), *_nodes(b))
        if isinstance(part, sympy.Pow) and part.exp.is_Rational and not part.exp.is_Integer
    ]
    factors = {
        factor
        for base in roots
        for factor, exponent in base.as_powers_dict().items()
        if factor.free_symbols and exponent.is_odd
    }
    if not factors:
        return False
    for signs in ({f for f in factors if f.is_Symbol}, factors):
        positive = {factor: sympy.Dummy(positive=True) for factor in signs}
        ours, theirs = ([value.xreplace(positive).doit() for value in _values(one)] for one in (a, b))
        if len(ours) == len(theirs) > 0 and all(
            not _differ_at_a_point(x, y) and sympy.simplify(x - y) == 0 for x, y in zip(ours, theirs, strict=True)
        ):
            return True
    return False


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
