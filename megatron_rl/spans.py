"""Spans: what this process does, from when to when. The driver collects the spans of all processes for a trace
(observe/trace.py).

Off, which is the rule, `span` is one `if` and allocates nothing. On, spans go into a ring of limited size. Times are
nanoseconds of `time.perf_counter_ns`: all processes of a node have the same clock. They are times of the host: a kernel
that a span has only started may run after the span's end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from types import TracebackType
from typing import NamedTuple, ParamSpec, TypeVar

CAPACITY = 100_000
"""The number of spans that a process keeps; older ones are dropped."""
PHASES, REQUESTS = "phases", "requests"
"""Tracks that are no threads: the driver's step and its phases, and the requests of an engine."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class TimeSpan(NamedTuple):
    name: str
    start_ns: int
    end_ns: int
    track: str
    """The thread, or one of the tracks above."""
    about: str
    """What it was about, such as the number of a micro-batch; empty if there is nothing to say."""


class Ranges(NamedTuple):
    """Where spans are shown, too, such as NVTX ranges."""

    push: Callable[[str], object]
    pop: Callable[[], object]


_is_on = False
"""Whether spans are kept or shown."""
_ring: deque[TimeSpan] | None = None
_ranges: Ranges | None = None
_OFF = nullcontext()


def keep(on: bool) -> list[TimeSpan]:
    """Keep spans from now on, or do not. Returns the ones that have ended since spans are kept, or since the last call:
    the newest CAPACITY ones."""
    global _ring, _is_on
    found = list(_ring or ())
    _ring = deque(maxlen=CAPACITY) if on else None
    _is_on = _ring is not None or _ranges is not None
    return found


def show(ranges: Ranges | None) -> None:
    """Show spans from now on; None: do not."""
    global _ranges, _is_on
    _ranges = ranges
    _is_on = _ring is not None or _ranges is not None


def span(name: str, about: object = "") -> AbstractContextManager[None]:
    """The body of the `with` statement is a span.

    Args:
        about: its text is `TimeSpan.about`.
    """
    return _Running(name, about) if _is_on else _OFF


def spanned(name: str, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The same function, whose calls are spans."""

    @wraps(function)
    def call(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        with span(name):
            return function(*arguments, **options)

    return call


def record(name: str, start_ns: int, end_ns: int, track: str, about: object = "") -> None:
    """Keep a span that was measured elsewhere, if spans are kept."""
    ring = _ring  # another thread may stop it
    if ring is not None:
        ring.append(TimeSpan(name, start_ns, end_ns, track, str(about)))


def follow(name: str, futures: Iterable[Future[Result]]) -> None:
    """Each future is a span, from now until it ends, on the track of requests."""
    if _ring is None:
        return
    start_ns = time.perf_counter_ns()
    for future in futures:
        future.add_done_callback(partial(_ended, name, start_ns))


def _ended(name: str, start_ns: int, future: Future[Result]) -> None:
    how = "cancelled" if future.cancelled() else "failed" if future.exception() is not None else ""
    record(name, start_ns, time.perf_counter_ns(), REQUESTS, how)


class _Running(AbstractContextManager[None]):
    __slots__ = ("_about", "_name", "_ranges", "_start_ns")

    def __init__(self, name: str, about: object) -> None:
        self._name, self._about, self._ranges = name, about, _ranges

    def __enter__(self) -> None:
        if self._ranges is not None:
            self._ranges.push(f"{self._name} {self._about}".rstrip())
        self._start_ns = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        record(self._name, self._start_ns, time.perf_counter_ns(), threading.current_thread().name, self._about)
        if self._ranges is not None:
            self._ranges.pop()
