"""What the rewards that compare texts take as a row's ground truth."""

from __future__ import annotations

import math
import unicodedata
from typing import Any

_TYPOGRAPHIC = str.maketrans({"’": "'", "‘": "'", "ʼ": "'", "＇": "'"})


def texts_of(truth: Any, reward: str) -> list[str]:
    """The ground truth, or the several that are right, as texts.

    Raises:
        ValueError: it is neither text nor a number, nor a list of these.
    """
    truths = list(truth) if isinstance(truth, list | tuple) and truth else [truth]
    if any(one is not None and is_missing(one) for one in truths):
        raise ValueError("the row has no ground truth: it is NaN, with which pandas writes that a value is missing")
    if not all(isinstance(one, str | int | float) for one in truths):
        needs = "a `ground_truth` that is text or a number, or a list of these"
        raise ValueError(f"the {reward} reward needs {needs}, but it is {truth!r}")
    return [str(one) for one in truths]


def is_missing(value: Any) -> bool:
    """Whether a value of a row is None or NaN."""
    return value is None or isinstance(value, float) and math.isnan(value)


def composed(text: str) -> str:
    """The text with one code for what looks alike: accents composed (NFC), apostrophes straight."""
    return unicodedata.normalize("NFC", text).translate(_TYPOGRAPHIC)
