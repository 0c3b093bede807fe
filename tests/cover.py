"""How much of a large set of cases runs in which tier.

`make test` runs the cases without the mark `deep`, `make test-deep` those that have it, and `make test-all` (`--all`)
every combination where the other tiers run a part of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

everything = False
"""Set by tests/conftest.py before a test is collected."""


def essential(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """All cases, for `pytest.mark.parametrize`; those that are not chosen are deep.

    >>> essential(["tp2", "pp2", "cp2"], "pp2")  # "tp2" and "cp2" run in the deep tier
    """
    known = list(cases)
    for case in chosen:
        assert case in known, f"{case} is not one of the cases {known}"
    return [case if case in chosen else _deep(case) for case in known]


def _deep(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.deep)


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
