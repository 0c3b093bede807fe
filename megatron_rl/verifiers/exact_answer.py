"""The exact_answer reward: 1 if the text after the thought equals the row's `ground_truth`, else 0.

Invariant (tests/unit/verifiers): it fails only if a row has no ground truth that can be compared.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from typing import Any

from megatron_rl.config.rewards import ExactAnswerReward
from megatron_rl.types import Verdict
from megatron_rl.verifiers.mathematics.plain_number import SCALES
from megatron_rl.verifiers.truth import composed, texts_of

MAX_CHARACTERS = 400
"""Answers are cut to this number of characters before they are counted for majorities."""
# A minus sign belongs to a number if no digit and no letter is before it (the last number of 7-3 is 3, and of COVID-19
# 19), a comma or another sign if it separates thousands, and a full stop before the digits if no word or other full
# stop ends there. The digits of units (km2, m^2) are no numbers. Unreadable are a decimal comma, which may as well
# separate two numbers (3,5), full stops between thousands, powers, 0x1F, 5e3x, and what a letter or a word multiplies
# (5M, 5 dozen).
NUMBER = re.compile(
    r"(?<![0-9])(?:(?<!\w)(?P<sign>-[$€£¥₹]?|[$€£¥₹]-))?(?<![a-z])(?<![A-Za-z]\^)(?<![A-Za-z]\^\{)"
    r"(?:(?P<unreadable>(?<!\w)0[xXbBoO][0-9a-fA-F]+"
    r"|[0-9]+\*\*[0-9]+|(?<![,.])[0-9]{1,3}(?:\.[0-9]{3}){2,}(?![0-9])"
    r"|[0-9][0-9,.]*+(?:(?:[kKMB]|bn|mn)(?!\w)|\s?[万億亿千]|\s(?i:dozens?|and (?:a|one) half)\b)"
    r"|(?<![,.])[0-9]+(?:[. \u00a0\u2009\u202f][0-9]{3})*,(?!(?:[0-9]{3},)*[0-9]{3}(?![0-9]))[0-9]+(?![0-9,])"
    r"|[0-9]+(?:\.[0-9]+)?[eE][+-]?[0-9]++(?=\w)|(?!10\^)[0-9]+(?:\.[0-9]+)?\^\{?-?[0-9]+)"
    r"|(?P<power>10\^\{?(?P<ten>-?[0-9]+)\}?)"
    r"|(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?:[ \u00a0\u2009\u202f_'][0-9]{3})+)(?![0-9])(?:\.[0-9]+)?"
    r"|[0-9]+(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
    r"(?:[eE](?P<e>[+-]?[0-9]+)(?!\w)|\s*(?:[*xX×·⋅]|\\times|\\cdot)\s*10\^\{?(?P<times_ten>-?[0-9]+)\}?"
    rf"|\s+(?P<scale>(?i:{'|'.join(SCALES)}))\b|\s?(?P<part>[¼-¾⅐-⅞]))?"
    r"|(?P<fraction>[¼-¾⅐-⅞]))"
)
MAX_EXPONENT = 99_999
"""The largest power of ten that is read. Decimal itself gives up at 999,999."""
# The minus signs, hyphens and full-width forms of Unicode.
_ASCII = str.maketrans("−–－﹣\u2010\u2011\u2012．，０１２３４５６７８９’", "-------.,0123456789'")
# Raised digits are a power after a digit alone: 5 m² is 5. A raised minus sign before a digit is a sign.
_RAISED = re.compile("(?<=[0-9])(⁻?)([⁰¹²³⁴-⁹]+)")


def last_number(text: str) -> Decimal | None:
    """The last number of a text, read as a whole; None if there is none, or if it cannot be read. It may have the forms
    72, 72.0, .5, 1,234, 1 234, 1_234, $1,234.50, 6.02e23, 6.02 x 10^23, 2 million, 3½ and -3. The last number of a
    fraction is its denominator."""
    for spelling, plain in (("{,}", ","), (",\\!", ","), ("\\,", " "), ("\\$", "$")):  # LaTeX's
        text = text.replace(spelling, plain)
    text = _RAISED.sub(lambda run: f"^{'-' if run[1] else ''}{unicodedata.normalize('NFKC', run[2])}", text)
    match = None
    for match in NUMBER.finditer(text.translate(_ASCII).replace("⁻", "-")):  # noqa: B007
        pass
    if match is None or match["unreadable"]:
        return None
    exponent = match["ten"] or match["e"] or match["times_ten"] or "0"
    if len(exponent) > 6 or abs(int(exponent)) > MAX_EXPONENT:
        return None
    scale = SCALES[match["scale"].lower()] if match["scale"] else 0
    digits = "1" if match["power"] else re.sub(r"[,\s_']", "", match["digits"] or "0")
    number = Decimal(f"{digits}E{int(exponent) + scale}")
    if part := match["part"] or match["fraction"]:
        number += Decimal(str(unicodedata.numeric(part)))
    return number.copy_negate() if match["sign"] else number


def verify(cfg: ExactAnswerReward, text: str, truth: Any) -> Verdict:
    """The verdict on a text. With `answer="last_number"` its last number is compared with the ground truth's."""
    try:
        [given] = texts_of(truth, "exact_answer")
    except ValueError as error:
        several = f"the exact_answer reward needs one ground truth, but the row has {truth!r}"
        return Verdict(None, several if isinstance(truth, list | tuple) and len(truth) > 1 else str(error), failed=True)
    expected: str | Decimal | None = composed(given.strip()) if cfg.answer == "all" else last_number(given)
    if expected is None:
        fault = f"ground_truth {truth!r} holds no number; set the reward's answer to `all`"
        return Verdict(None, fault, failed=True)
    found = composed(text.strip()) if cfg.answer == "all" else last_number(text)
    if found is None:
        return Verdict(0.0, "no number")
    details = {"final_answer": str(found.normalize()) if isinstance(found, Decimal) else found[:MAX_CHARACTERS]}
    return Verdict(1.0, details=details) if found == expected else Verdict(0.0, "other answer", details=details)
