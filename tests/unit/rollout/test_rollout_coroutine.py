"""Coroutines, with futures that the test ends."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from megatron_rl.rollout.coroutine import begin, resolve


class Requests:
    """Futures by the names with which they were asked for."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[str]] = {}

    def ask(self, name: str) -> Future[str]:
        self.futures[name] = Future()
        return self.futures[name]

    def end(self, name: str) -> None:
        self.futures[name].set_result(name.upper())

    def thought_and_answer(self, name: str):
        [thought] = yield [self.ask(f"{name} thinks")]
        [answer] = yield [self.ask(f"{name} says")]
        return [thought, answer]

    def group(self, *names: str):
        return (yield [begin(self.thought_and_answer(name)) for name in names])


@pytest.fixture
def requests():
    return Requests()


def test_each_routine_goes_on_as_soon_as_its_own_future_has_ended(requests):
    whole = begin(requests.group("a", "b"))
    requests.end("b thinks")
    assert list(requests.futures) == ["a thinks", "b thinks", "b says"], "b does not wait for a"
    requests.end("b says")
    requests.end("a thinks")
    assert not whole.done()
    requests.end("a says")
    assert whole.result(0) == [["A THINKS", "A SAYS"], ["B THINKS", "B SAYS"]]


def test_a_routine_may_wait_for_nothing_and_for_what_has_ended():
    ended: Future[int] = Future()
    ended.set_result(3)

    def coroutine():
        assert (yield []) == []
        first = yield [ended, ended]
        second = yield from inner()
        return [*first, second]

    def inner():
        [value] = yield [ended]
        return value + 1

    assert begin(coroutine()).result(0) == [3, 3, 4]


def test_an_error_ends_a_routine_when_the_others_have_ended_too(requests):
    whole = begin(requests.group("a", "b"))
    requests.futures["a thinks"].set_exception(RuntimeError("the group was cancelled"))
    assert not whole.done(), "its requests are still under way"
    requests.end("b thinks")
    requests.end("b says")
    with pytest.raises(RuntimeError, match="the group was cancelled"):
        whole.result(0)


def test_what_a_routine_raises_is_the_error_of_its_future():
    def coroutine():
        yield []
        raise ValueError("no such token")

    with pytest.raises(ValueError, match="no such token"):
        begin(coroutine()).result(0)


def test_a_routine_that_nobody_waits_for_any_more_asks_for_nothing(requests):
    whole = begin(requests.thought_and_answer("a"))
    assert whole.cancel()
    requests.end("a thinks")
    assert list(requests.futures) == ["a thinks"]


def test_a_future_is_ended_once():
    future: Future[int] = Future()
    resolve(future, 1)
    resolve(future, error=RuntimeError("too late"))
    assert future.result(0) == 1
