"""A test that hangs is ended by its own deadline and named. (pytest plugin)

The deadline raises in the test, whose fixtures then take down what it started. If it hangs in a call that no signal
interrupts, its process ends with the stacks of all threads, and pytest-xdist names the test and goes on in another one.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time

import patience
import pytest

DEFAULT_S = 300.0
"""Seconds of the reference machine, setup and teardown included. `@pytest.mark.deadline(900)` gives a test others."""
LAST_S = 60.0
"""How long a test may take to end after its deadline."""
SIGNAL = signal.SIGRTMIN + 7
"""No test, and nothing that tests start in their process, uses it."""


class DeadlineExceeded(BaseException):
    """No `except Exception` of the code under test catches it."""


class Watch:
    """Watches one test from a thread of its own."""

    def __init__(self, name: str, seconds: float) -> None:
        self._name, self._seconds, self._start = name, seconds, time.monotonic()
        self._ended = threading.Event()
        signal.signal(SIGNAL, self._raise)
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        self._ended.set()
        self._timer.cancel()

    def _raise(self, number, frame) -> None:
        if not self._ended.is_set():
            raise DeadlineExceeded(f"{self._name} has not ended by its deadline of {self._seconds:.0f} s")

    def _end(self) -> None:
        # A machine that has become slow meanwhile moves the deadline.
        while (left := self._seconds * patience.measure() - (time.monotonic() - self._start)) > 0:
            if self._ended.wait(left):
                return
        signal.pthread_kill(threading.main_thread().ident, SIGNAL)
        if not self._ended.wait(LAST_S * patience.measure()):
            os.write(sys.__stderr__.fileno(), f"\n{self._name} hangs, and its process is ended\n".encode())
            faulthandler.dump_traceback(file=sys.__stderr__)
            os._exit(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    marker = item.get_closest_marker("deadline")
    watch = Watch(item.nodeid, marker.args[0] if marker else DEFAULT_S)
    try:
        return (yield)
    finally:
        watch.stop()
