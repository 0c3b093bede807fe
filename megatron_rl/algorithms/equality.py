"""When two rewards are equal: one rule for every estimator, for active sampling, and for what is reported.

A reward is often a sum, and sums round: .1 + .2 is not .3. Taken exactly, a group of such rewards has a signal, and a
division by their deviation makes an advantage of a million out of nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import overload

import numpy as np

RESOLUTION = 2.0**-22
"""Rewards differ if their difference is more than this part of the larger one: two units in the last place of float32,
the precision of reward models and many functions."""
RESIDUE = 1e-10
"""A difference up to this is rounding, too: it is what is left of terms that should cancel, whose sum is near 0."""


@overload
def differ(a: float, b: float) -> bool: ...
@overload
def differ(a: np.ndarray, b: np.ndarray) -> np.ndarray: ...
def differ(a: float | np.ndarray, b: float | np.ndarray) -> bool | np.ndarray:
    """Whether two rewards differ by more than rounding, elementwise.

    Example:
        differ(.1 + .2, .3) and differ(1e-17, 0.) are False; differ(.3, .30001) and differ(1000., 1000.5) are True.
    """
    apart: bool | np.ndarray = np.abs(a - b) > RESOLUTION * np.maximum(np.abs(a), np.abs(b)) + RESIDUE
    return apart


def all_equal(rewards: Iterable[float]) -> bool:
    """Whether no two of these rewards differ; True for one, and for none."""
    given = list(rewards)
    return not given or not differ(min(given), max(given))
