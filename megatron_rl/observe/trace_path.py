"""What the phases of a traced step wait for: of each phase the process that works longest in it.

The driver's phases follow each other, so a step gets shorter only if the process that a phase waits for gets faster, or
if the time without any work goes away. Invariant (tests/unit/observe): spans of a process that overlap count once, and
waits are no work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.observe.step_times import SMALL
from megatron_rl.observe.trace import OTHER, STEP
from megatron_rl.spans import PHASES

WAIT = "wait"
"""Spans whose names begin with this are no work."""


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """A phase of the step. Times are in seconds."""

    phase: str
    seconds: float
    process: str
    """The process that works longest in it, such as `engine 1`; empty if none but the driver has a span in it."""
    busy_s: float
    """How long this process works."""
    nobody_s: float
    """How long no process has a span. The driver's own work in a phase has none."""


def work_of_phases(trace: Mapping[str, Any]) -> list[PhaseWork]:
    """The long phases of the last step in a trace, in their order; a phase that comes twice is there twice.

    Args:
        trace: the value of `chrome_trace`.
    """
    told = trace.get("traceEvents", ())
    events = [event for event in told if event["ph"] == "X"]
    names = {event["pid"]: event["args"]["name"] for event in told if event["name"] == "process_name"}
    of_driver = [event for event in events if event["cat"] == PHASES]
    steps = [event for event in of_driver if event["name"].startswith(STEP)]
    if not steps:
        return []
    step = max(steps, key=lambda event: event["ts"])
    work: dict[str, list[tuple[float, float]]] = {}
    drivers = {event["pid"] for event in of_driver}
    for event in events:
        if event["pid"] not in drivers and not event["name"].startswith(WAIT):
            name = names[event["pid"]].partition(" (")[0]
            work.setdefault(name, []).append((event["ts"], event["ts"] + event["dur"]))
    everybody = [span for spans in work.values() for span in spans]
    found = []
    for phase in sorted(of_driver, key=lambda event: event["ts"]):
        begin, end = phase["ts"], phase["ts"] + phase["dur"]
        is_inside = step["ts"] <= begin and end <= step["ts"] + step["dur"]
        if phase is step or phase["name"] == OTHER or not is_inside or phase["dur"] < SMALL * step["dur"]:
            continue
        busy = {name: _covered(spans, begin, end) for name, spans in work.items()}
        longest = max(busy, key=lambda name: busy[name], default="")
        nobody = phase["dur"] - _covered(everybody, begin, end)
        own = busy.get(longest, 0.0)
        found.append(PhaseWork(phase["name"], phase["dur"] / 1e6, longest if own else "", own / 1e6, nobody / 1e6))
    return found


def _covered(spans: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """The part of an interval that spans cover."""
    covered = 0.0
    for start, stop in sorted(spans):
        start, stop = max(start, begin), min(stop, end)
        if stop > start:
            covered += stop - start
            begin = stop
    return covered
