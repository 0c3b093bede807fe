"""A test that hangs is ended by its own deadline and named. (pytest plugin)

The deadline raises in the test, whose fixtures then take down what it started; a test that swallows it fails. If it
hangs in a call that no signal interrupts, its process ends with the stacks of all threads. pytest-xdist then gives the
file to another process; a test that has ended a process is not run again there, and fails.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from hashlib import sha256
from pathlib import Path

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

    def __init__(self, name: str, seconds: float, tell) -> None:
        self._name, self._seconds, self._start, self._tell = name, seconds, time.monotonic(), tell
        self.has_raised = False
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
            self.has_raised = True
            raise DeadlineExceeded(f"{self._name} has not ended by its deadline of {self._seconds:.0f} s")

    def _end(self) -> None:
        # A machine that has become slow meanwhile moves the deadline.
        while (left := self._seconds * patience.measure() - (time.monotonic() - self._start)) > 0:
            if self._ended.wait(left):
                return
        signal.pthread_kill(threading.main_thread().ident, SIGNAL)
        if not self._ended.wait(LAST_S * patience.measure()):
            self._tell()
            os.write(sys.__stderr__.fileno(), f"\n{self._name} hangs, and its process is ended\n".encode())
            faulthandler.dump_traceback(file=sys.__stderr__)
            os._exit(1)


_watch = pytest.StashKey[Watch]()
_ended_a_process = pytest.StashKey[bool]()


def seconds_of(item) -> float:
    marker = item.get_closest_marker("deadline")
    if marker is None:
        return DEFAULT_S
    given = [*marker.args, *marker.kwargs.values()]
    if len(given) != 1 or not isinstance(given[0], int | float):
        raise pytest.UsageError(f"{item.nodeid}: write @pytest.mark.deadline(SECONDS), with one number")
    return given[0]


def pytest_itemcollected(item):
    seconds_of(item)


def begun(item) -> Path | None:
    """The file that says that a worker of pytest-xdist has begun a test, and not ended it."""
    run = getattr(item.config, "workerinput", {}).get("testrunuid")
    name = sha256(f"{run} {item.nodeid}".encode()).hexdigest()[:32]
    return Path(tempfile.gettempdir(), f"begun_{name}") if run else None


def stop_capture(config) -> None:
    """Let what is written now reach the terminal."""
    if capture := config.pluginmanager.getplugin("capturemanager"):
        capture.suspend_global_capture()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    file = begun(item)
    item.stash[_ended_a_process] = file is not None and file.exists()
    if file:
        file.touch()
    item.stash[_watch] = watch = Watch(item.nodeid, seconds_of(item), lambda: stop_capture(item.config))
    try:
        return (yield)
    finally:
        watch.stop()
        if file:
            file.unlink(missing_ok=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if item.stash[_ended_a_process]:
        pytest.fail(f"{item.nodeid} has ended the process in which it ran, and is not run again", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.passed and item.stash[_watch].has_raised:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} has gone on after its deadline of {seconds_of(item):.0f} s"
    return report
