"""A formula in LaTeX as a sympy expression, within limits that keep its evaluation short.

latex2sympy2-extended reads it, after the spellings that it does not know or misreads have been replaced.
"""

from __future__ import annotations

import math
import re
from typing import Any

import mpmath
import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from sympy.core.relational import Relational

from megatron_rl.verifiers.mathematics.final_answer import group
from megatron_rl.verifiers.mathematics.plain_number import FUNCTION_NAMES, NOT_A_UNIT, TEXT_COMMAND, TYPE_NAMES, UNIT
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
UNEVALUATED = (sympy.Integral, sympy.Derivative, sympy.Limit, sympy.Sum, sympy.Product)


class Unreadable(ValueError):
    """The message continues a sentence whose subject is the ground truth or the answer."""


def clean(text: str) -> str:
    """Without what only changes how a formula looks, and in the characters that the parser knows."""
    text = _CIRCLED_ALONE.sub(
        r"\1", _NAMED_SPACING.sub(lambda name: _SPACES.get(name[1], r"\ "), in_latex(text.strip()))
    )
    text = _MINUS.sub(lambda word: ("" if word[2] else word[1] or "") + "-", text)
    text = _TANGENT.sub(lambda name: rf"\{name[1] or ''}{'cot' if name[2] else 'tan'} ", text)
    text = _THOUSANDS.sub("", _TIMES_TEN.sub(r"\\times ", text))
    text = _LOOK.sub("", _PYTHON_POWER.sub("^", text)).replace("**", "")  # the other ** are bold type
    text = _SPACING.sub(" ", _FIRST_TEXT.sub("", text)).strip('"` ').rstrip(".").strip()
    if not _ENUMERATED.search(text) and not _GROUPED.fullmatch(text) and "," not in _GROUPED.sub("", text):
        text = _GROUPED.sub(lambda number: number[0].replace(",", ""), text)
    while text.startswith("{") and len(text) <= MAX_CHARACTERS and group(text, 0) == (text[1:-1].strip(), len(text)):
        text = text[1:-1].strip()
    return text


_CIRCLED_ALONE = re.compile(r"^\$?\\textcircled\{([0-9]+)\}\.?\$?$")
_MINUS = re.compile(r"^(\\text\s*\{)?\s*(?:minus|negative)(?![A-Za-z])(\s*\})?\s*(?=[0-9.\\])", re.IGNORECASE)
_PYTHON_POWER = re.compile(r"(?<=[\w)}])\*\*(?=[\w(-])")
_TANGENT = re.compile(r"(?<![\\A-Za-z])(?:\\operatorname\*?\s*\{\s*)?\\?(arc)?(c)?tg(?![A-Za-z])(?:\s*\})?")
_TIMES_TEN = re.compile(r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)")
_SPACES = {"thinspace": r"\,", "negthinspace": r"\!"}
_NAMED_SPACING = re.compile(
    r"\\((?:neg)?thinspace|medspace|thickspace|enspace|enskip|space|nobreakspace|hfill)(?![A-Za-z])"
    r"|\\[hm](?:space\*?\s*\{[^{}]*\}|skip\s*[0-9.]+\s*(?:cm|mm|em|ex|pt|mu))"
)
# `{,}`, `_`, `\,` and `\!`, with or without a comma, separate thousands. After a comma, other spaces separate the parts
# of a list, and other spacing commands are spaces.
_THOUSANDS = re.compile(r"(?<=[0-9])(?!,[0-9])(?:\{,\}|,|\\?_|\\[!,]\s*)+(?=[0-9]{3}(?![0-9]))")
# Commas alone do so if the text has no others: in 2,500x, but not in (1,200), and 100,200 may be a list.
_GROUPED = re.compile(r"(?<![0-9,.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
_ENUMERATED = re.compile(r"(?:\(|\[|\\\{)[^()\[\]{}]*,")
# Commands for type are dropped without the braces of what they are for.
_LOOK = re.compile(
    r"\\(?:display|text|script)style(?![A-Za-z])|\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])|\\?\$"
    r"|\\(?:(?:text)?color|colorbox)\s*(?:\[\w+\])?\s*\{[^{}]*\}"
    r"|\\(?:boldsymbol|bm|pmb|underline|uline|emph|ensuremath|mathop|(?:un)?boldmath|(?:math)?strut|null|relax|bf|it|rm|sf|"
    r"tt|sc|sl|em|bfseries|(?:rm|sf|tt)family|(?:it|sc|sl|up)shape|normalfont|tiny|small|normalsize|large|Large|LARGE|"
    r"huge|Huge)(?![A-Za-z])|\\[hv]?phantom\s*\{[^{}]*\}"
    rf"|\\(?:{TYPE_NAMES})\s*(?=\{{[^{{}}]*\{{)"
)
_SPACING = re.compile(r"(?<!\\)\\(?:[,;:! ]|$)|\\q?quad(?![A-Za-z])|~|\s+")
_FIRST_TEXT = re.compile(rf"^\\(?:{TYPE_NAMES})\s*\{{[^{{}}]*(?:\b(?:is|are|be|equals?)|[:=])\s*\}}(?=.*\S)", re.DOTALL)

_REPEATING = re.compile(
    r"(?<![0-9])([0-9]*)\.([0-9]*)(?:\\(?:overline|bar)\s*\{([0-9]+)\}|\(([0-9]+)\)"
    r"|\\dot\s*\{?\s*([0-9])\s*\}?(?:([0-9]*)\\dot\s*\{?\s*([0-9])\s*\}?)?)"
)
# A text at the end is a unit, unless it begins with a word that makes the value another one, or has a number of its own
# (digits that do not follow a letter as in cm2, outside of brackets). Such a text stays as a symbol.
_LAST_TEXT = re.compile(
    r"(?<=\S)(?:\s*(?:\\cdot\s*|/\s*)?\\(?:(?:text[a-z]{0,6}|mathrm|mbox)\s*\{|math[a-z]{2,6}\s*\{(?=[a-z]{3}))"
    rf"\s*+(?!(?i:{'|'.join(NOT_A_UNIT)})s?\b)(?:[^{{}}0-9(]|(?<=[A-Za-z^-])[0-9]|\([^{{}}()]*\))*+\}}"
    r"(?:\^\{?-?[0-9]\}?)?)+$"
)
_CHANGING_TEXT = re.compile(
    r"(?<=\S)\s*\\(?:text[a-z]{0,6}|mathrm|mbox|math[a-z]{2,6})\s*\{([^{}]*[a-z]{2}[^{}]*)\}\s*$"
)
_LAST_UNIT = re.compile(rf"(?<=[0-9)}}i])\s*{UNIT}(?:[\s.]|\^\{{?[23]\}}?|/|per\b|{UNIT})*$", re.IGNORECASE)
_BARE_NAME = re.compile(rf"(?<![\\A-Za-z])({'|'.join(FUNCTION_NAMES)})(?![A-Za-z])")
_MIXED_NUMBER = re.compile(r"(?<![0-9.,/^_])([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)(?![0-9])")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z0-9])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]+)(?![A-Za-z0-9])")
_DOUBLE_FACTORIAL = re.compile(r"(?<![0-9.!^])([0-9]{1,3})!!(?!!)")
_QUOTED = re.compile(r"'([^']+)'")
_ONE_PRIME = re.compile(r"\\prime(?![A-Za-z])|'")
_PRIME_COMMAND = re.compile(r"\^\s*(?:\{(?:\s*(?:\\prime(?![A-Za-z])|'))+\s*\}|\\prime(?![A-Za-z]))")
_PRIMED = re.compile(
    r"(\\[A-Za-z]+|[A-Za-z])\s*(?:_\s*\{?\s*([A-Za-z0-9]+)\s*\}?\s*)?('+)(?:\s*_\s*\{?\s*([A-Za-z0-9]+)\s*\}?)?"
)
_PRIMED_GROUP = re.compile(r"([)}\]])\s*('+)")
_ONE_TERM = r"(?:[^{}+-]|\{[^{}]*\})+"
# What the parser does not know or misreads, and how it is written for the parser.
_SPELLINGS = (
    (re.compile(r"\\varnothing|\\O(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\(?:nice|[sx]|flat)frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\?sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"^([^{}]*\\choose(?![A-Za-z])[^{}]*)$"), r"{\1}"),
    (re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}"), r"\\binom{\1}{\2}"),
    # An odd root of a negative number is negative.
    (re.compile(rf"\\sqrt\s*\[\s*([0-9]*[13579])\s*\]\s*\{{\s*-\s*({_ONE_TERM})\}}"), r"(-\\sqrt[\1]{\2})"),
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
# Ends of intervals that are open are turned outwards in some languages: ]1, 2[ is (1, 2).
_INTERVAL = re.compile(r"([\[\]])([^\[\]]*,[^\[\]]*)([\[\]])")
# C_5^2 is 5 over 2 in some languages, and A_5^2 the number of arrangements, if the text has no other letters.
_COUNT = re.compile(r"([CA])\s*_\s*(?:\{\s*([0-9]{1,4})\s*\}|([0-9]))\s*\^\s*(?:\{\s*([0-9]{1,4})\s*\}|([0-9]))")
_LETTER_ALONE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_E_OR_I = re.compile(r"\\(?:mathrm|text)\s*\{\s*([ei])\s*\}")
_TRIGONOMETRIC = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)")
# The parser evaluates these at once, and a power among their arguments could take forever.
_EVALUATED_BY_PARSER = re.compile(r"binom|gcd|lcm")
_LARGE_ARGUMENT = re.compile(r"[0-9]{5}|!|\^\s*\{?\s*[0-9]{3}|\^[^a-z]*\^")
_SIDE_BY_SIDE = re.compile(r"(?<!frac)(?<!frac )(?<![_^])[0-9]\s+[0-9]")
_I = sympy.Symbol("i", real=True)


def parse(text: str) -> Any:
    """The sympy expression of a text in LaTeX, with i as the imaginary unit. Raises Unreadable."""
    if len(text) > MAX_CHARACTERS:
        raise Unreadable(f"has more than {MAX_CHARACTERS} characters")
    if max(_depth(text), text.count("|") // 2) > MAX_DEPTH:
        raise Unreadable(f"nests more than {MAX_DEPTH} brackets")
    if 1 < text.count(":") < MAX_DEPTH:  # the ratio of three or more
        *parts, last = map(parse, text.split(":"))
        if not all(isinstance(part, sympy.Expr) for part in (*parts, last)):
            raise Unreadable("is not a formula that can be read")
        return _checked(sympy.Tuple(sympy.Symbol(":"), *(part / last for part in parts)))
    whole = TEXT_COMMAND.fullmatch(text)
    text = _LAST_TEXT.sub("", _E_OR_I.sub(r"\1", whole[1] if whole else text))
    text = _CHANGING_TEXT.sub(_symbol, text)
    text = _REPEATING.sub(_fraction, _LAST_UNIT.sub("", text))
    text = _DOUBLE_FACTORIAL.sub(lambda number: str(math.prod(range(int(number[1]), 1, -2))), text)
    text = _own_primes(text)
    text = _INTERVAL.sub(lambda ends: f"{'[('[ends[1] == ']']}{ends[2]}{'])'[ends[3] == '[']}", text)
    if not _LETTER_ALONE.search(_COUNT.sub("", text)):
        text = _COUNT.sub(_counted, text)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    if r"\pm" in text and r"\mp" not in text:  # the parser knows it only at the top of an expression
        text = text.replace(r"\pm", "+") + ", " + text.replace(r"\pm", "-")
    if _SIDE_BY_SIDE.search(text):  # the parser would multiply them
        raise Unreadable("has two numbers side by side")
    if _EVALUATED_BY_PARSER.search(text) and _LARGE_ARGUMENT.search(text):
        raise Unreadable("has too large a binomial coefficient or divisor")
    degrees = r"\circ" in text and _TRIGONOMETRIC.search(text) is not None
    try:
        expression = latex2sympy(
            normalize_latex(text, _NORMALIZATION), is_real=True, convert_degrees=degrees, normalization_config=None
        )
    # The parser raises Exception itself for most texts that are no LaTeX formula, and many classes for the others.
    except Exception as error:
        raise Unreadable("is not a formula that can be read") from error
    if not isinstance(expression, sympy.Basic | sympy.MatrixBase):  # the parser decides some relations of sets
        raise Unreadable("is not a formula that can be read")
    _checked(expression)
    if isinstance(expression, sympy.Intersection):
        expression = expression.doit()
    if _I in expression.free_symbols and not has(expression, UNEVALUATED):
        expression = expression.subs(_I, sympy.I)
    return expression


def _symbol(match: re.Match[str]) -> str:
    r"""The 5 \text{ dozen} of 5\text{ dozen} as the product of 5 and a symbol."""
    return rf"\cdot u_{{{re.sub('[^A-Za-z0-9]', '', match[1])}}}"


def _counted(match: re.Match[str]) -> str:
    """The number that C_5^2 or A_5^2 stands for; the text itself if the lower number is the smaller one."""
    n, k = (int(match[i] or match[i + 1]) for i in (2, 4))
    return match[0] if n < k else str((math.comb if match[1] == "C" else math.perm)(n, k))


def _own_primes(text: str) -> str:
    """The formula with a name of its own for each letter that has primes, because f'(x) is not f(x)."""
    quoted = _QUOTED.fullmatch(text)
    text = _PRIME_COMMAND.sub(lambda run: "'" * len(_ONE_PRIME.findall(run[0])), quoted[1] if quoted else text)
    text = _PRIMED.sub(lambda name: f"{name[1]}_{{{name[2] or name[4] or ''}prime{len(name[3])}}}", text)
    return _PRIMED_GROUP.sub(lambda run: rf"{run[1]}\cdot u_{{prime{len(run[2])}}}", text)


def _checked(expression: Any) -> Any:
    """The expression, if it is within the limits and defined. Raises Unreadable."""
    _refuse_costly(expression)
    if has(expression, (type(sympy.nan), type(sympy.zoo))):
        raise Unreadable("is undefined")
    return expression


def _fraction(match: re.Match[str]) -> str:
    """0.1(6), also written with a line or dots over the 6, as (16 - 1) / 90."""
    whole, fixed, *repeated_forms = match.groups(default="")
    repeated = "".join(repeated_forms)
    numerator = int((whole + fixed + repeated) or "0") - int((whole + fixed) or "0")
    return rf"\frac{{{numerator}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def nodes(expression: Any) -> list[Any]:
    """All parts of an expression. A matrix counts as the list of its entries."""
    parts, pending = [], [expression]
    while pending:
        part = pending.pop()
        parts.append(part)
        pending.extend(part.flat() if isinstance(part, sympy.MatrixBase) else getattr(part, "args", ()))
    return parts


def has(expression: Any, classes: tuple[type, ...]) -> bool:
    return any(isinstance(part, classes) for part in nodes(expression))


def _refuse_costly(expression: Any) -> None:
    """Raises Unreadable if evaluating, expanding or solving the expression could take very long."""
    if _bits(expression) > MAX_BITS:
        raise Unreadable("is too large a number to be evaluated")
    parts = nodes(expression)
    is_relation = any(isinstance(part, Relational) for part in parts)
    for part in parts:
        if not (isinstance(part, sympy.Pow) and part.base.free_symbols and part.exp.is_number):
            continue
        if part.base.is_Add and _bits(part.exp) > 7 and abs(part.exp) > MAX_EXPONENT:
            raise Unreadable(f"has a sum to a power above {MAX_EXPONENT}")
        if is_relation and _bits(part.exp) > 4 and abs(part.exp) > MAX_DEGREE:
            raise Unreadable(f"is an equation or inequality of a degree above {MAX_DEGREE}")


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
