"""What the rewards that compare texts take as a row's ground truth."""

from __future__ import annotations

import math
import unicodedata
from typing import Any

# Dashes stay as they are: they stand between words, and a hyphen is part of one.
_TYPOGRAPHIC = str.maketrans(
    dict.fromkeys("’‘ʼ＇‛", "'")
    | dict.fromkeys("“”„‟＂", '"')
    | dict.fromkeys("\u2010\u2011\u2012\u2212\ufe63\uff0d", "-")
    | dict.fromkeys("\u00a0\u2007\u2009\u202f", " ")
    | dict.fromkeys("\u200b\u2060\ufeff\u00ad", None)
)


PANDAS_MISSING = {"nan", "NaN", "<NA>", "NaT"}
"""What `astype(str)` makes of a missing value."""


def texts_of(truth: Any, reward: str) -> list[str]:
    """The ground truth, or the several that are right, as texts.

    Raises:
        ValueError: it is neither text nor a number, nor a list of these; or one of them is missing (NaN, or empty).
    """
    truths = list(truth) if isinstance(truth, list | tuple) and truth else [truth]
    if any(one is not None and is_missing(one) for one in truths):
        raise ValueError("the row has no ground truth: it is NaN, with which pandas writes that a value is missing")
    if not all(isinstance(one, str | int | float) for one in truths):
        needs = "a `ground_truth` that is text or a number, or a list of these"
        raise ValueError(f"the {reward} reward needs {needs}, but it is {truth!r}")
    # pandas makes floats of whole numbers in a column that lacks one: 72.0.
    texts = [str(int(one)) if isinstance(one, float) and one.is_integer() else str(one) for one in truths]
    if found := next((text for text in texts if text.strip() in PANDAS_MISSING), None):
        raise ValueError(f"the row has no ground truth: it is {found!r}, which pandas writes for a missing value")
    if not all(composed(text).strip() for text in texts):  # else an empty answer would be right
        raise ValueError("the row has no ground truth: it is empty")
    return texts


def is_missing(value: Any) -> bool:
    """Whether a value of a row is None or NaN."""
    return value is None or isinstance(value, float) and math.isnan(value)


def composed(text: str) -> str:
    """The text with one code for what looks alike: accents composed (NFC), quotation marks and apostrophes straight,
    one hyphen, one space, and no characters without width."""
    return text if text.isascii() else unicodedata.normalize("NFC", text).translate(_TYPOGRAPHIC)
