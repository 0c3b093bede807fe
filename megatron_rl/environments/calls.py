"""Calls of foreign code under a time limit, while everything else continues.

Invariants (tests/unit/environments): a call ends within its limit, even if the code hangs in its thread or ignores its
cancellation; every exception is an error of the call, `SystemExit` too.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import Any

MAX_THREADS = 256
"""The largest number of calls that wait in threads at the same time. A call that has exceeded its limit no longer
counts, although its thread may go on."""


class OutOfTime(Exception):
    """A call has exceeded its limit."""


class Calls:
    """
    Args:
        limit_s: the longest time of a call, in seconds. The time that it waits for a thread does not count.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._slots = asyncio.Semaphore(MAX_THREADS)

    async def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The result of a function, which runs in a thread of its own, or of a coroutine function, which runs here.

        Raises:
            OutOfTime: the limit was exceeded. A coroutine is cancelled; a thread is left alone.
            Exception: what the function raised.
        """
        whole = partial(function, *arguments, **named)
        if inspect.iscoroutinefunction(function):
            return await self._within_limit(asyncio.ensure_future(_awaited(whole)))
        async with self._slots:
            return await self._within_limit(asyncio.wrap_future(_in_thread(whole)))

    async def _within_limit(self, future: asyncio.Future[Any]) -> Any:
        try:
            done, _ = await asyncio.wait([future], timeout=self._limit_s)
            if not done:
                raise OutOfTime(f"no result after {self._limit_s:g} s")
            return future.result()
        finally:
            future.cancel()


async def _awaited(function: Callable[[], Any]) -> Any:
    try:
        return await function()
    except SystemExit as error:  # it would end the event loop
        raise RuntimeError(f"it called sys.exit({error.code})") from error


def _in_thread(function: Callable[[], Any]) -> Future[Any]:
    """A thread of a pool could not be given up: a few calls that hang would block the pool, and then the exit."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except SystemExit as error:
            future.set_exception(RuntimeError(f"it called sys.exit({error.code})"))
        except BaseException as error:  # it belongs to the caller
            future.set_exception(error)

    Thread(target=run, name="environment", daemon=True).start()
    return future
