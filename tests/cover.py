"""How much of a large set of cases a test runs: with `--all` the whole set, otherwise a part that proves as much of
what can go wrong between two choices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

everything = False
"""Set by tests/conftest.py before a test is collected."""


def cases(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All combinations of one value of each axis; without `--all` so many of them that any two values of two axes are
    together in one (a pairwise cover, chosen greedily, always the same)."""
    whole = list(product(*(range(len(axis)) for axis in axes)))
    chosen = whole if everything else _pairwise(whole)
    return [tuple(axis[i] for axis, i in zip(axes, case, strict=True)) for case in chosen]


def examples(count: int) -> int:
    """How many examples of a property: `count` with `--all`, otherwise a quarter."""
    return count if everything else count // 4


def _pairwise(whole: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    def pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(case), 2))

    missing = set().union(*map(pairs, whole))
    chosen = []
    while missing:
        chosen.append(max(whole, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return chosen
