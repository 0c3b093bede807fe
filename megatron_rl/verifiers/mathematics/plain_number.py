r"""Plain numbers, as GSM8K's answers write them: with separated thousands, a currency, a percent sign or a unit.

Invariants: a number is exact, for any number of digits; no sympy is needed; a text with another digit or an
operator after the number is no plain number, because that may change the value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

TYPE_NAMES = "text(?:bf|it|rm|sf|tt|sc|sl|md|up|normal)?|math(?:rm|bf|it|sf|tt|normal)|[mh]box"
"""The pattern of the names of LaTeX's commands for text and type."""
TEXT_COMMAND = re.compile(rf"\\(?:{TYPE_NAMES}|operatorname)\s*\{{([^{{}}]*)\}}")
"""Text and upright or bold type in LaTeX."""
FUNCTION_NAMES = (
    "arcsin arccos arctan sinh cosh tanh sin cos tan cot sec csc log ln exp pi alpha beta gamma theta".split()
)
"""Words that are mathematics without a backslash, too."""
TOLERANCE = Decimal("1e-6")
"""Decimals are equal if they agree to six decimals, as in Math-Verify; below 1, if they agree to six digits."""

_UNITS = (
    "mm cm dm km in inch ft foot feet yd yard mi mile mph kph kmh sec second min minute hr hour day week month year mg "
    "kg lb pound oz ounce ton gram ml liter litre gallon meter metre centimeter kilometer dollar cent euro usd degree "
    "radian unit square cubic sq cu people point way"
).split()
UNIT = rf"(?:(?:{'|'.join(_UNITS)})(?:e?s)?(?![A-Za-z])|(?<=\s)[mgshL](?![A-Za-z]))"
"""The pattern of a unit after a formula. A single letter is a unit only after a space, because 2m may be a product."""
_DEGREE = r"\^\s*(?:\\circ|\{\s*\\circ\s*\})(?:\s*[CF](?![A-Za-z]))?"
_ORDINAL = r"(?:(?:st|nd|rd|th)(?![A-Za-z])|\^\s*\{\s*(?:st|nd|rd|th)\s*\})"
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Words that multiply the number before them by a power of ten."""
NOT_A_UNIT = (
    "dozen half halves third quarter fourth fifth sixth seventh eighth ninth tenth hundredth and or to plus minus "
    "times over mod choose squared cubed factorial pair couple gross lakh crore bn mn mio"
).split() + list(SCALES)
"""Words that follow a number and make it another one."""
# The same in German, French, Spanish and Russian, by their beginnings.
_NOT_A_UNIT_ELSEWHERE = (
    "dutzend hundert tausend million milliard mille\\b mil\\b docena douzaine und\\b oder\\b drittel viertel "
    "fünftel achtel zehntel тысяч миллион миллиард млн млрд тыс дюжин десятк сотен сотн половин трети четверти "
    "или\\b плюс минус"
).split()
_CURRENCY = r"(?:[€£¥₹₽¢]|\\(?:pounds|euro)(?![A-Za-z])|(?:Rs|INR|USD|EUR|GBP|CAD|AUD|CHF|JPY|CNY|RMB)\b\.?)"
# Chinese and Japanese measure words, which stand next to the number. More signs may follow, but none that changes it.
_MEASURE_WORD = (
    r"(?:平方(?:厘米|分米|千米|公里|米)|立方(?:厘米|分米|米)|厘米|分米|毫米|千米|公里|千克|公斤|毫升|小时|分钟|[元个個人名只隻条條本支枝张張辆輛棵"
    r"朵颗粒块塊角分秒时時天日周月年岁歳米克吨升度种種次组組位件台架头頭匹道题页頁层段根把杯瓶袋箱盒份家间座套つ円枚冊羽])"
    r"(?![^\s]*[半多余餘万萬亿億千百十打倍和或加减減乘除至到])[\u3041-\u30ff\u4e00-\u9fff]*"
)

_NUMERAL = re.compile(
    rf"\s*(?P<sign>[+-])?\s*{_CURRENCY}?\s*"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE](?P<exponent>[+-]?[0-9]{1,4})(?![0-9])"
    r"|\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*(?P<braced>[+-]?[0-9]{1,4})\s*\}|(?P<digit>[0-9])(?![0-9])))?"
    rf"(?:\s*(?P<scale>{'|'.join(SCALES)})\b)?(?P<percent>\s*(?:\\?%|(?:percent|percentage|pct)\b))?",
    re.IGNORECASE,
)
_CYRILLIC_UNIT = "(?:см|мм|км|кг|мг|мл|шт|м|г|л|ч)"
# The letters of Europe's languages.
_LETTER = "[A-Za-zÀ-ÖØ-öø-ʯЀ-ӿ]"
# A unit, or any word of three letters after a space; then more words, but no digits and no operators.
_UNIT_TEXT = re.compile(
    rf"\s*(?:{UNIT}|{_DEGREE}|{_ORDINAL}|{_CURRENCY}|{_MEASURE_WORD}|{_CYRILLIC_UNIT}(?!{_LETTER})|\\mu\s*[mgsLlAFHV](?![A-Za-z])"
    rf"|(?<=\s)(?!(?:{'|'.join([*NOT_A_UNIT, *FUNCTION_NAMES])})s?\b|{'|'.join(_NOT_A_UNIT_ELSEWHERE)}){_LETTER}{{3,}})"
    rf"(?:[\s.,;:!/()'-]|\^\s*(?:[23]|\{{\s*[23]\s*\}})|{_LETTER})*",
    re.IGNORECASE,
)
_UNIT_LETTER = re.compile(r"\\(?:text|mathrm|mbox)\s*\{\s*[mgshlLVAWJNKCF]\s*\}")


@dataclass(frozen=True, slots=True)
class PlainNumber:
    value: Decimal
    """The number that is written: 50 for 50%."""
    percent: bool


def plain_number(text: str) -> PlainNumber | None:
    """A plain number like 72, 1,234.50, 5e3, 2 million, 12.5% or 72 clips; None if the text is something else."""
    text = " ".join(TEXT_COMMAND.sub(r" \1", _UNIT_LETTER.sub(" unit", text)).split())  # long spaces take long to match
    match = _NUMERAL.match(text)
    if match is None or (text[match.end() :].strip(" .") and not _UNIT_TEXT.fullmatch(text, match.end())):
        return None
    exponent = int(match["exponent"] or match["braced"] or match["digit"] or "0")
    exponent += SCALES[match["scale"].lower()] if match["scale"] else 0
    digits = re.sub("[, ]", "", match["digits"]).rstrip(".")
    return PlainNumber(Decimal(f"{match['sign'] or ''}{digits}E{exponent}"), match["percent"] is not None)


def same_number(expected: PlainNumber, found: PlainNumber) -> bool:
    """Whether two plain numbers are equal.

    Integers are compared exactly, and decimals within TOLERANCE. The percent sign may be left out or added like any
    other unit (12.5% is 12.5), or be calculated (12.5% is 0.125).
    """
    if _close(expected.value, found.value):
        return True
    if expected.percent == found.percent:
        return False
    return _close(expected.value.scaleb(-2 * expected.percent), found.value.scaleb(-2 * found.percent))


def _close(a: Decimal, b: Decimal) -> bool:
    if a == b:  # exact for any number of digits
        return True
    if a == a.to_integral_value() and b == b.to_integral_value():
        return False
    return abs(a - b) <= TOLERANCE * min(Decimal(1), abs(a))
