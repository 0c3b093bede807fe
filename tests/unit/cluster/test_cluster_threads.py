"""Threads of the driver that call Ray: they return results and errors, and all of them leave when they are asked to."""

from __future__ import annotations

import threading

import pytest

from megatron_rl.cluster.waiting import in_thread, leave, pause


def test_a_thread_gives_its_result_or_its_error():
    assert in_thread(lambda: threading.current_thread().name, "score").result() == "score"
    with pytest.raises(ZeroDivisionError):
        in_thread(lambda: 1 / 0, "score").result()


def test_threads_leave_what_they_wait_for_and_later_ones_can_wait_again():
    begun = threading.Barrier(3)

    def wait_for_ever() -> None:
        begun.wait()
        while True:
            pause(60.0)

    waiting = [in_thread(wait_for_ever, "verify") for _ in range(2)]
    begun.wait()
    leave(10.0)
    assert all(future.cancelled() for future in waiting)
    assert "verify" not in {thread.name for thread in threading.enumerate()}
    assert in_thread(lambda: pause(0.01), "score").result() is None
