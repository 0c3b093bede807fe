"""Spans, and the trace that is made of them."""

from __future__ import annotations

import json
import threading
import tracemalloc
from concurrent.futures import Future

import pytest

from megatron_rl import spans
from megatron_rl.observe.trace import ProcessSpans, chrome_trace, offset_ns, with_other
from megatron_rl.spans import PHASES, REQUESTS, TimeSpan


@pytest.fixture
def kept():
    spans.keep(True)
    yield
    spans.keep(False)


def complete(trace: dict) -> list[dict]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def threads(trace: dict) -> dict[int, str]:
    named = [event for event in trace["traceEvents"] if event["name"] == "thread_name"]
    return {event["tid"]: event["args"]["name"] for event in named}


def test_off_keeps_nothing_and_allocates_nothing():
    def many() -> None:
        for _ in range(1000):
            with spans.span("forward", 3):
                pass

    many()
    tracemalloc.start()
    many()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1000, "less than a byte a span"
    assert spans.span("a") is spans.span("b") and spans.keep(False) == []


def test_spans_nest_and_name_their_thread(kept):
    with spans.span("update", 0), spans.span("forward", 7):
        pass
    thread = threading.Thread(target=spans.spanned("backward", lambda: None), name="other")
    thread.start()
    thread.join()
    inner, outer, other = spans.keep(True)
    assert (inner.name, inner.about, inner.track) == ("forward", "7", threading.current_thread().name)
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns and outer.about == "0"
    assert (other.name, other.track, other.about) == ("backward", "other", "")
    assert spans.keep(True) == [], "they are taken once"


def test_an_error_ends_a_span_and_goes_on(kept):
    with pytest.raises(KeyError), spans.span("post"):
        raise KeyError
    assert [span.name for span in spans.keep(True)] == ["post"]


def test_a_ring_that_is_full_keeps_the_newest(kept, monkeypatch):
    monkeypatch.setattr(spans, "CAPACITY", 3)
    spans.keep(True)
    for number in range(5):
        spans.record(str(number), number, number, PHASES)
    assert [span.name for span in spans.keep(True)] == ["2", "3", "4"]


def test_requests_are_followed_to_their_ends(kept):
    done, failed, under_way = Future(), Future(), Future()
    spans.follow("request", [done, failed, under_way])
    done.set_result(None)
    failed.set_exception(ValueError())
    found = spans.keep(True)
    assert [(span.track, span.about) for span in found] == [(REQUESTS, ""), (REQUESTS, "failed")]
    assert all(span.end_ns >= span.start_ns for span in found)
    under_way.cancel()
    assert [span.about for span in spans.keep(True)] == ["cancelled"]


def test_ranges_are_shown_without_being_kept():
    shown: list[str] = []
    spans.show(spans.Ranges(shown.append, lambda: shown.append("end")))
    try:
        with spans.span("update", 1), spans.span("optimizer"):
            pass
    finally:
        spans.show(None)
    assert shown == ["update 1", "optimizer", "end", "end"]
    assert spans.span("update") is spans.span("other")


def test_clocks_of_other_nodes_are_set_right():
    """The driver asks at 100 and has the answer at 120; the other clock shows 5110 in the middle."""
    assert offset_ns(100, 5110, 120) == 5000
    driver = ProcessSpans("driver", [TimeSpan("update", 1000, 9000, PHASES, "")])
    rank = ProcessSpans("trainer rank 0", [TimeSpan("forward", 7000, 8000, "main", "0")], offset_ns=5000)
    update, forward = complete(chrome_trace([driver, rank]))
    assert (update["ts"], update["dur"], update["pid"]) == (0, 8, 1)
    assert (forward["ts"], forward["dur"], forward["pid"], forward["args"]) == (1, 1, 2, {"about": "0"})


def test_every_event_has_what_the_format_asks_for():
    process = ProcessSpans("engine 0", [TimeSpan("engine step", 5, 3, "vLLM", "")])  # a clock that was set back
    trace = json.loads(json.dumps(chrome_trace([process])))
    for event in trace["traceEvents"]:
        assert event.keys() >= {"ph", "name", "ts", "dur", "pid", "tid"} and event["dur"] >= 0 and event["ts"] >= 0
    names = {event["name"]: event["args"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names["process_name"] == {"name": "engine 0"} and names["thread_name"] == {"name": "vLLM"}


def test_requests_at_the_same_time_are_on_tracks_of_their_own():
    """The third begins when the first has ended; the second lies inside the first in time."""
    times = [(0, 10), (2, 5), (10, 12)]
    process = ProcessSpans("engine 0", [TimeSpan("request", *time, REQUESTS, "") for time in times])
    trace = chrome_trace([process])
    assert [threads(trace)[event["tid"]] for event in complete(trace)] == ["requests 1", "requests 1", "requests 2"]


def test_spans_of_a_thread_that_cross_are_divided():
    """Coroutines share a thread. Events of one thread must be disjoint or inside each other."""
    times = [(0, 10), (2, 4), (3, 12), (10, 11)]
    process = ProcessSpans("engine 0", [TimeSpan(str(time), *time, "main", "") for time in times])
    trace = chrome_trace([process])
    found = {event["name"]: threads(trace)[event["tid"]] for event in complete(trace)}
    assert found == {"(0, 10)": "main", "(2, 4)": "main", "(10, 11)": "main", "(3, 12)": "main 2"}


def test_phases_and_other_are_the_step():
    phases = [("step 3", 0, 100), ("sync", 10, 30), ("generate", 30, 70), ("update", 80, 100)]
    driver = [TimeSpan(name, start, end, PHASES, "") for name, start, end in phases]
    found = [span for span in with_other(driver) if not span.name.startswith("step")]
    assert sum(span.end_ns - span.start_ns for span in found) == 100
    assert [(span.start_ns, span.end_ns) for span in found if span.name == "other"] == [(0, 10), (70, 80)]
