"""Work in the engine's thread that continues as soon as the futures that it waits for have ended: between two decode
steps, without a switch to another thread, and without waiting for anything else.

Invariants (tests/unit/rollout): a coroutine continues in the thread where the last of its futures ended, and in the
order of their ends; if one of them ends with an error, the coroutine ends with it once all of them have ended.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")

Coroutine = Generator[Sequence[Future[Any]], list[Any], Result]
"""A generator that yields the futures that it waits for, is sent their results, and returns a result of its own.

    def answered(prompt: list[int]) -> Coroutine[list[int]]:
        [thought] = yield [ask(prompt)]
        [answer] = yield [ask(prompt + thought)]
        return thought + answer

Coroutines wait for others that go on at the same time with `yield [begin(one), begin(other)]`, and carry out one in
their own place with `yield from`."""


def begin(coroutine: Coroutine[Result]) -> Future[Result]:
    """Carry out a coroutine as far as it goes now. The future has its result, or the error that ended it."""
    whole: Future[Result] = Future()
    _go_on(coroutine, None, whole)
    return whole


def _go_on(coroutine: Coroutine[Result], results: list[Any] | None, whole: Future[Result]) -> None:
    futures: Sequence[Future[Any]] = ()
    while not futures:
        try:
            futures = coroutine.send(results)  # type: ignore[arg-type]  # the first value sent to a generator is None
        except StopIteration as end:
            return resolve(whole, end.value)
        except Exception as error:
            return resolve(whole, error=error)
        results = []

    waiting = set(futures)

    def ended(future: Future[Any]) -> None:
        waiting.discard(future)
        if waiting:
            return
        error = next(filter(None, (future.exception() for future in futures)), None)
        if error is not None:
            # Another thread may have ended the futures, so the generator is left alone.
            resolve(whole, error=error)
        elif not whole.done():
            _go_on(coroutine, [future.result() for future in futures], whole)

    for future in tuple(waiting):
        future.add_done_callback(ended)


def resolve(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Set a future's result or error, unless it has one or nobody waits for it any more."""
    with suppress(InvalidStateError):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
