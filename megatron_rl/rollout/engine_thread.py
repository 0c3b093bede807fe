"""The thread that owns vLLM's engine.

The thread does one thing after the other: a call from outside, or a decode step of all running requests. So a call that
adds requests or changes the weights runs between two steps, and needs no lock. The engine's scheduler is in the same
process: in a second process vLLM would import its libraries again, and send all requests and every step's tokens
between the two.

An engine with pipeline stages works on several batches at once, so a batch may be running between two steps. A call
that changes more than the requests therefore waits for these first (`drain`).

Invariants (tests/unit/rollout): calls are made in the order of their arrival; no batch is in progress during a call
that changes the engine; after a failure of vLLM every pending call and answer ends with its cause.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from megatron_rl import spans
from megatron_rl.rollout.coroutine import resolve
from megatron_rl.rollout.request_queue import RequestQueue

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

log = logging.getLogger(__name__)

Result = TypeVar("Result")
WORKER_DIED = "a worker of vLLM has died"


class _Call(NamedTuple):
    function: Callable[[], Any]
    future: Future[Any]
    while_paused: bool
    drained: bool


class EngineThread:
    """Call `start`, then `call` from any event loop, then `close`."""

    def __init__(self, requests: RequestQueue) -> None:
        self.requests = requests
        """Only functions that are given to `call` use it."""
        self._engine: LLMEngine | None = None
        self.paused = False
        """Whether the thread makes no steps, and only calls that are for a pause; the others wait for its end. Only
        functions that are given to `call` set it."""
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._deferred: deque[_Call] = deque()
        self._calling: Future[Any] | None = None
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="vLLM", daemon=True)

    async def start(self, make: Callable[[], LLMEngine]) -> None:
        """Make the engine in its thread. Errors of `make` are raised here."""

        def begin() -> None:
            self._engine = make()
            self._engine.model_executor.register_failure_callback(lambda: self._fail(WORKER_DIED))

        self._thread.start()
        await self.call(begin)

    async def call(self, function: Callable[[], Result], while_paused: bool = False, drained: bool = False) -> Result:
        """Run a function in the thread, between two steps, and return its result.

        Args:
            while_paused: whether the call is made in a pause, too.
            drained: whether no batch may be running; see `drain`.

        Raises:
            RuntimeError: vLLM has failed.
        """
        future: Future[Result] = Future()
        self._calls.put(_Call(function, future, while_paused, drained))
        if self._failure is not None:  # the thread may have taken its last call
            resolve(future, error=RuntimeError(self._failure))
        return await asyncio.wrap_future(future)

    def drain(self) -> None:
        """Wait for the running batches, and hand out their tokens. The caller runs in the thread.

        Between two steps there are some with pipeline stages, and with asynchronous scheduling. vLLM has the latter on
        GPUs alone, where this has not been run.

        Raises:
            RuntimeError: vLLM has failed.
        """
        core = self.engine.engine_core.engine_core
        if not core.batch_queue:
            return
        core.pause_scheduler(mode="keep", clear_cache=False)
        while core.batch_queue:
            self._guarded(self._hand_out_step)
        core.resume_scheduler()

    @property
    def engine(self) -> LLMEngine:
        """Only functions that are given to `call` use it."""
        assert self._engine is not None, "`start` has been called"
        return self._engine

    @property
    def alive(self) -> bool:
        # vLLM says that a worker is lost before it calls back.
        return self._thread.is_alive() and self._failure is None and not self._lost_a_worker

    def failure(self) -> str:
        """Why vLLM has failed; empty if it has not, or if nobody knows."""
        return self._failure or ""

    def close(self, timeout_s: float) -> None:
        """End vLLM's processes. Requests that run are lost."""
        if self._thread.is_alive():
            self._calls.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while self._failure is None:
            try:
                call = self._next()
            except queue.Empty:
                self._step()
                continue
            if call is None:
                break
            if self.paused and not call.while_paused:
                self._deferred.append(call)
                continue
            self._calling = call.future
            try:
                if call.drained:
                    self.drain()
                result = call.function()
            except Exception as error:  # it belongs to the caller
                resolve(self._calling, error=RuntimeError(WORKER_DIED) if self._lost_a_worker else error)
            else:
                resolve(self._calling, result)
            self._calling = None
        self._fail("the engine is closed")
        if self._engine is not None:
            self._engine.engine_core.shutdown()

    def _next(self) -> _Call | None:
        """The next call; None: the thread is to end.

        Raises:
            queue.Empty: there is none, and a step can be made.
        """
        if self._deferred and not self.paused:
            return self._deferred.popleft()
        return self._calls.get(block=self.paused or not len(self.requests))

    def _step(self) -> None:
        def start_and_step() -> None:
            self.requests.start_fitting(self.engine)
            self._hand_out_step()

        with suppress(RuntimeError):  # all who wait are told
            self._guarded(start_and_step)

    def _hand_out_step(self) -> None:
        with spans.span("engine step", len(self.requests)):
            self.requests.hand_out(self.engine.step())

    def _guarded(self, step: Callable[[], None]) -> None:
        """Make a step. If it fails, all that is waited for ends.

        Raises:
            RuntimeError: vLLM has failed.
        """
        try:
            step()
        except Exception as error:
            log.exception("a step of vLLM failed")
            self._fail(WORKER_DIED if self._lost_a_worker else f"a step of vLLM failed: {error}")
            raise RuntimeError(self._failure) from error

    @property
    def _lost_a_worker(self) -> bool:
        """Whether a worker has died. The error of a call or of a step is then only "cancelled"."""
        return self._engine is not None and bool(getattr(self._engine.model_executor, "is_failed", False))

    def _fail(self, cause: str) -> None:
        """End all that is waited for. vLLM notices a lost worker in a thread of its own, and calls this there: the
        thread of the engine may wait for this worker for ever."""
        self._failure = self._failure or cause
        self.requests.fail(self._failure)
        waiting = [*filter(None, [self._calling]), *(call.future for call in list(self._deferred))]
        with suppress(queue.Empty):
            while True:
                if call := self._calls.get_nowait():  # None comes from `close`
                    waiting.append(call.future)
        for future in waiting:
            resolve(future, error=RuntimeError(self._failure))
