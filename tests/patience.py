"""Deadlines that hold on slow and on busy machines: they end a hang, and no test is about their length."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TypeVar

T = TypeVar("T")

REFERENCE_S = 0.45
"""What `_work` takes on one quiet core of the machine on which the deadlines of the tests were chosen."""


def deadline(seconds: float) -> float:
    """`seconds` of the reference machine in seconds of this one."""
    return seconds * patience()


@cache
def patience() -> float:
    """How many times slower than the reference this machine was when this process first asked."""
    return measure()


def measure() -> float:
    """How many times slower than the reference this machine is now, at least 1."""
    start = time.perf_counter()
    _work()
    return max(1.0, (time.perf_counter() - start) / REFERENCE_S)


def _work() -> int:
    return sum(i * i % 7 for i in range(10_000_000))


def patiently(start: Callable[[], T]) -> T:
    """Start Ray's nodes. Ray itself gives a node 30 s, which a busy machine may exceed."""
    for _ in range(4):
        with suppress(Exception):
            return start()
    return start()
