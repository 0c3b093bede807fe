"""Calls of foreign code under a time limit, while everything else continues.

Invariants (tests/unit/environments): a call ends within its limit, even if the code hangs in its thread or ignores its
cancellation; all that it raises is an error of the call, also `SystemExit`, `KeyboardInterrupt` and `CancelledError`,
and also in a task that it has started.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from functools import partial
from threading import Thread
from typing import Any

from megatron_rl.config.exception_text import place, said

log = logging.getLogger(__name__)

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

    async def call(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """The result of a function, which runs in a thread of its own, or of a coroutine function, which runs here.

        Raises:
            OutOfTime: the limit was exceeded. A coroutine is cancelled; a thread is left alone.
            Exception: the function's error; a BaseException, such as SystemExit, becomes a RuntimeError.
        """
        whole = partial(function, *arguments, **named)
        if inspect.iscoroutinefunction(function):
            return await self._within_limit(_begun(whole))
        async with self._slots:
            return await self._within_limit(asyncio.wrap_future(_in_thread(whole)))

    async def _within_limit(self, future: asyncio.Future[Any]) -> Any:
        try:
            done, _ = await asyncio.wait([future], timeout=self._limit_s)
            if not done:
                raise OutOfTime(f"no result after {self._limit_s:g} s")
            try:
                return future.result()
            except Exception:
                raise
            except BaseException as error:  # a cancellation from outside comes out of `wait`
                raise _ordinary(error) from error
        finally:
            future.cancel()


def _ordinary(error: BaseException) -> Exception:
    """The error itself, or an Exception with its traceback that says what was raised. An event loop ends at SystemExit
    and KeyboardInterrupt, takes CancelledError for its own, and loses StopIteration."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    log.warning("an environment or a tool raised %s%s", said(error), place(error))
    what = f"called sys.exit({error.code})" if isinstance(error, SystemExit) else f"raised {said(error)}"
    return RuntimeError(f"it {what}").with_traceback(error.__traceback__)


IS_FOREIGN: ContextVar[bool] = ContextVar("IS_FOREIGN", default=False)
"""Whether foreign code runs. The tasks that it starts have its context."""


def _begun(function: Callable[[], Any]) -> asyncio.Task[Any]:
    """A task of foreign code. asyncio raises SystemExit and KeyboardInterrupt of any task in the event loop, too, which
    is Ray's. So from now on the loop makes these errors ordinary ones in all tasks of foreign code."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop.get_task_factory(), _TaskFactory):
        loop.set_task_factory(_TaskFactory(loop.get_task_factory()))
    context = copy_context()
    context.run(IS_FOREIGN.set, True)

    async def awaited() -> Any:
        return await function()

    return loop.create_task(_Contained(awaited()), context=context)


class _TaskFactory:
    """
    Args:
        before: the loop's factory until now.
    """

    def __init__(self, before: Any) -> None:
        self._make = before or (lambda loop, coroutine, **options: asyncio.Task(coroutine, loop=loop, **options))

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        return self._make(loop, _Contained(coroutine) if IS_FOREIGN.get() else coroutine, **options)


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine that raises ordinary errors in the place of errors that end an event loop."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        try:
            return self._coroutine.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise _ordinary(error) from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._coroutine.throw(*error)
        except (SystemExit, KeyboardInterrupt) as raised:
            raise _ordinary(raised) from raised

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # `cr_frame` and others, which tell where it is


def _in_thread(function: Callable[[], Any]) -> Future[Any]:
    """A thread of a pool could not be given up: a few calls that hang would block the pool, and then the exit."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # it belongs to the caller
            future.set_exception(_ordinary(error))

    Thread(target=run, name="environment", daemon=True).start()
    return future
