"""The exact_answer reward: 1 if the text after the thought equals the row's `ground_truth`, else 0.

Invariant (tests/unit/verifiers): it fails only if a row has no ground truth that can be compared.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from megatron_rl.config.rewards import ExactAnswerReward
from megatron_rl.types import Verdict
from megatron_rl.verifiers.truth import composed, texts_of

MAX_CHARACTERS = 400
"""The number of characters of an answer that are kept to count majorities."""
# A minus sign belongs to a number if no digit is before it (the last number of 7-3 is 3), a comma or a space if it
# separates thousands, and a full stop before the digits if no word or other full stop ends there.
NUMBER = re.compile(
    r"(?<![0-9])(-\$?|\$-)?"
    r"((?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?:[ \u00a0\u2009\u202f][0-9]{3})+)(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
    r"|(?<![\w.])\.[0-9]+)([eE][+-]?[0-9]{1,3}(?!\w))?"
)
# The minus signs and the full-width forms of Unicode. Raised digits are left out: 5 m² is 5.
_ASCII = str.maketrans("−–－．，０１２３４５６７８９", "---.,0123456789")


def last_number(text: str) -> Decimal | None:
    """The last number of a text; None if there is none. It may have the forms 72, 72.0, .5, 1,234, 1 234, $1,234.50,
    6.02e23 and -3. The last number of a fraction is its denominator."""
    match = None
    for match in NUMBER.finditer(text.translate(_ASCII)):  # noqa: B007
        pass
    if match is None:
        return None
    sign, digits, exponent = match.groups()
    number = Decimal(re.sub(r"[,\s]", "", digits) + (exponent or ""))
    return number.copy_negate() if sign else number


def verify(cfg: ExactAnswerReward, text: str, truth: Any) -> Verdict:
    """With `answer="last_number"` the last number of the text is compared with the last number of the ground truth."""
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
