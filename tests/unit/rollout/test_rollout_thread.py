"""The thread that owns the engine: the order of its calls, and what happens to those who wait when vLLM fails. vLLM is
never asked for a step here; test_rollout_engine.py and test_rollout_tensor_parallel.py have steps and workers that
fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from megatron_rl.rollout.engine_thread import EngineThread
from megatron_rl.rollout.kv_budget import KvBudget
from megatron_rl.rollout.program import Call, Request
from megatron_rl.rollout.request_queue import RequestQueue


class IdleVllm:
    """Stands for vLLM, which has no requests and no batch under way."""

    def __init__(self) -> None:
        self.has_ended = False
        self.model_executor = SimpleNamespace(register_failure_callback=self._keep)
        self.engine_core = SimpleNamespace(shutdown=self._end, engine_core=SimpleNamespace(batch_queue=None))

    def _keep(self, failed: Callable[[], None]) -> None:
        self.lose_a_worker = failed

    def _end(self) -> None:
        self.has_ended = True


def with_thread(use) -> IdleVllm:
    """Start a thread, let `use` work with it, and end it."""
    vllm, thread = IdleVllm(), EngineThread(RequestQueue(lambda request: "", lambda output: output))

    async def run() -> None:
        await thread.start(lambda: vllm)
        try:
            await use(thread)
        finally:
            thread.close(timeout_s=60.0)

    asyncio.run(run())
    assert vllm.has_ended and not thread.alive
    return vllm


def test_calls_are_made_in_their_order_whether_they_wait_for_batches_or_not():
    seen: list[int] = []

    async def many(thread: EngineThread) -> None:
        await asyncio.gather(
            *(thread.call(lambda number=number: seen.append(number), drained=number % 3 == 0) for number in range(100))
        )
        assert thread.alive

    with_thread(many)
    assert seen == [*range(100)]


def test_in_a_pause_only_its_own_calls_are_made():
    """The others follow when it ends, in their order, and before those that come later."""
    seen: list[str] = []

    async def both(thread: EngineThread) -> None:
        def pause(paused: bool) -> None:
            seen.append("pause" if paused else "go on")
            thread.paused = paused

        calls = [thread.call(lambda: pause(True))]
        calls += [thread.call(lambda name=name: seen.append(name)) for name in "ab"]
        calls += [thread.call(lambda: seen.append("at once"), while_paused=True)]
        calls += [thread.call(lambda: pause(False), while_paused=True), thread.call(lambda: seen.append("c"))]
        await asyncio.gather(*calls)

    with_thread(both)
    assert seen == ["pause", "at once", "go on", "a", "b", "c"]


def test_calls_that_a_pause_holds_back_end_with_vllm():
    async def held_back(thread: EngineThread) -> None:
        await thread.call(lambda: setattr(thread, "paused", True))
        waiting = asyncio.create_task(thread.call(lambda: None))
        await thread.call(lambda: None, while_paused=True)  # the thread has put the other one aside
        thread._fail("vLLM is gone")
        with pytest.raises(RuntimeError, match="^vLLM is gone$"):
            await waiting

    with_thread(held_back)


def test_the_error_of_a_call_is_that_of_its_caller():
    async def both(thread: EngineThread) -> None:
        with pytest.raises(ZeroDivisionError):
            await thread.call(lambda: 1 / 0)
        assert await thread.call(lambda: 7) == 7 and thread.alive

    with_thread(both)


def test_a_worker_that_is_lost_ends_what_is_waited_for_and_all_that_comes_later():
    """vLLM says so in a thread of its own, while that of the engine may wait for the worker."""

    async def lost(thread: EngineThread) -> None:
        await thread.call(lambda: setattr(thread, "paused", True))
        waiting = asyncio.create_task(thread.call(lambda: None))
        await thread.call(lambda: None, while_paused=True)
        [future] = thread.requests.add([Request([5], Call(1), seed=0)])
        await asyncio.to_thread(thread.engine.lose_a_worker)
        with pytest.raises(RuntimeError, match="^a worker of vLLM has died$"):
            await waiting
        with pytest.raises(RuntimeError, match="^a worker of vLLM has died$"):
            await asyncio.wrap_future(future)
        with pytest.raises(RuntimeError, match="^a worker of vLLM has died$"):
            await thread.call(lambda: None)
        assert not thread.alive and thread.failure() == "a worker of vLLM has died"

    with_thread(lost)


@pytest.mark.parametrize("worker_died", [False, True])
def test_a_request_that_does_not_start_ends_alone_unless_a_worker_has_died(worker_died):
    """vLLM asks its workers at its first request; if one of them has died, its error is only `cancelled`."""

    def give(request: Request) -> str:
        if request.seed == 0:
            executor.is_failed = worker_died
            raise RuntimeError("cancelled")
        return str(request.seed)

    executor = SimpleNamespace()
    scheduler = SimpleNamespace(requests={}, max_num_running_reqs=4)
    engine = SimpleNamespace(
        model_executor=executor, engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    )
    requests = RequestQueue(give, lambda output: output)
    requests._budget = KvBudget(1024, 8, 16)
    first, second = requests.add([Request([5], Call(1), seed=0), Request([5], Call(1), seed=1)])
    if worker_died:
        with pytest.raises(RuntimeError, match="^cancelled$"):
            requests.start_fitting(engine)
        requests.fail("a worker of vLLM has died")
        assert all(str(future.exception()) == "a worker of vLLM has died" for future in (first, second))
    else:
        requests.start_fitting(engine)
        assert str(first.exception()) == "cancelled" and not second.done()


def test_a_thread_whose_vllm_does_not_start_tells_why():
    async def refused() -> None:
        thread = EngineThread(RequestQueue(lambda request: "", lambda output: output))

        def make():
            raise ValueError("there is no such model")

        with pytest.raises(ValueError, match="no such model"):
            await thread.start(make)
        thread.close(timeout_s=60.0)
        assert not thread.alive

    asyncio.run(refused())
