"""The spans of all processes as one trace in the JSON of Chrome's trace viewer, which Perfetto reads.

Invariants (tests/unit/observe): events of one thread of the trace are disjoint or inside each other; no duration is
negative; the driver's phases, with `other` between them, add up to the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron_rl.spans import PHASES, REQUESTS, TimeSpan

STEP = "step "
"""The name of the span of a step is this and its number."""
OTHER = "other"


@dataclass(frozen=True, slots=True)
class ProcessSpans:
    name: str
    """Such as `trainer rank 3`, with its place."""
    spans: Sequence[TimeSpan]
    offset_ns: int = 0
    """What its clock shows more than the driver's."""


def chrome_trace(processes: Sequence[ProcessSpans]) -> dict[str, Any]:
    """The trace, as a value of JSON.

    Each span is a complete event (`ph: X`) with its begin `ts` and duration `dur` in microseconds. `ts` counts from the
    first span. `pid` is the number of the process in the order given, from 1, because processes of several nodes may
    have the same id. Spans of a track that overlap otherwise than one inside the other are divided among several
    threads of the trace; so are the requests of an engine that run at the same time.
    """
    starts = [span.start_ns - process.offset_ns for process in processes for span in process.spans]
    base_ns = min(starts, default=0)
    events: list[dict[str, Any]] = []
    for pid, process in enumerate(processes, start=1):
        events += [
            _named("process_name", pid, 0, name=process.name),
            _named("process_sort_index", pid, 0, sort_index=pid),
        ]
        tid = 0
        for track, of_track in groupby(sorted(process.spans, key=lambda span: span.track), lambda span: span.track):
            for number, lane in enumerate(_lanes(of_track, nests=track != REQUESTS), start=1):
                tid += 1
                name = track if number == 1 and track != REQUESTS else f"{track} {number}"
                events.append(_named("thread_name", pid, tid, name=name))
                events += [_event(span, pid, tid, process.offset_ns + base_ns) for span in lane]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def with_other(spans: Sequence[TimeSpan]) -> list[TimeSpan]:
    """The driver's spans, with a span `other` for each time of a step that is in no phase."""
    found = list(spans)
    own = [span for span in spans if span.track == PHASES]
    steps = [span for span in own if span.name.startswith(STEP)]
    for step in steps:
        phases = sorted(
            (span for span in own if span not in steps and span.start_ns < step.end_ns and span.end_ns > step.start_ns),
            key=lambda span: span.start_ns,
        )
        ends = [step.start_ns, *(phase.end_ns for phase in phases)]
        starts = [*(phase.start_ns for phase in phases), step.end_ns]
        found += [TimeSpan(OTHER, a, b, PHASES, "") for a, b in zip(ends, starts, strict=True) if b > a]
    return found


def offset_ns(asked_ns: int, told_ns: int, answered_ns: int) -> int:
    """What another node's clock shows more than this one's, if it told its time in the middle between question and
    answer. The error is at most half of the time between the two."""
    return told_ns - (asked_ns + answered_ns) // 2


def _lanes(spans: Iterable[TimeSpan], nests: bool) -> list[list[TimeSpan]]:
    """The spans, divided so that the ones in a lane are disjoint or, if `nests`, inside each other."""
    lanes: list[list[TimeSpan]] = []
    ends: list[list[int]] = []
    """The ends of the spans that are open where the next one begins, for each lane."""
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        for still_open in ends:
            while still_open and still_open[-1] <= span.start_ns:
                still_open.pop()
        fitting = (i for i, still_open in enumerate(ends) if not still_open or nests and still_open[-1] >= span.end_ns)
        if (lane := next(fitting, None)) is None:
            lane = len(lanes)
            lanes.append([])
            ends.append([])
        lanes[lane].append(span)
        ends[lane].append(span.end_ns)
    return lanes


def _event(span: TimeSpan, pid: int, tid: int, zero_ns: int) -> dict[str, Any]:
    event = {
        "ph": "X",
        "name": span.name,
        "cat": span.track,
        "ts": (span.start_ns - zero_ns) / 1000,
        "dur": max(0, span.end_ns - span.start_ns) / 1000,
        "pid": pid,
        "tid": tid,
    }
    return event | {"args": {"about": span.about}} if span.about else event


def _named(kind: str, pid: int, tid: int, **arguments: Any) -> dict[str, Any]:
    """An event of metadata."""
    return {"ph": "M", "name": kind, "ts": 0, "dur": 0, "pid": pid, "tid": tid, "args": arguments}
