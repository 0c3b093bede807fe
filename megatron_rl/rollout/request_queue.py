"""The requests of an engine: requests that wait until its KV cache has room for them, and requests that vLLM works on.

vLLM would start every request at once and preempt some when its cache is full. The queue gives it only what fits; see
`kv_budget.py`. Requests start in the order of their arrival, but the next call of a started answer comes before answers
that have not begun, because the cache still holds its tokens. With pipeline stages the requests start in as many parts
as there are stages, one part a step: vLLM would make one batch of all that start together, and all stages but one would
wait. Only the engine's thread uses the queue, except for `fail`.

Invariants (tests/unit/rollout): every future of `add` ends, with a completion or with an error; vLLM spends no
step on a request after it was cancelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import TYPE_CHECKING, Any

from megatron_rl import spans
from megatron_rl.rollout.coroutine import resolve
from megatron_rl.rollout.kv_budget import KvBudget
from megatron_rl.rollout.program import Completion, Request

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine


class RequestQueue:
    """
    Args:
        give: gives a request to vLLM, and returns its name there.
        completed: what a request gets of vLLM's output.
    """

    def __init__(self, give: Callable[[Request], str], completed: Callable[[RequestOutput], Completion]) -> None:
        self._give, self._completed = give, completed
        self._waiting: deque[tuple[Request, Future[Completion]]] = deque()
        self._running: dict[str, tuple[Request, Future[Completion]]] = {}
        """What vLLM works on, by its names."""
        self._unresolved: set[Future[Completion]] = set()
        """The futures of all of these. `fail` reads it at any moment, also while a request moves from waiting to
        running."""
        self._budget: KvBudget | None = None
        self._num_stages = 1
        self._has_changed = False
        """Whether requests have come or gone since the queue last looked for room, or some requests that fit have not
        started."""
        self.num_preempted = 0
        """The number of requests that vLLM preempted because its cache was full."""
        self.num_sampled = 0
        """The number of tokens of finished answers."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def attach(self, engine: LLMEngine, longest: int) -> None:
        """Take the sizes of an engine, and count what it preempts.

        Args:
            longest: the largest number of tokens that are sampled for an answer.
        """
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

        scheduler = engine.engine_core.engine_core.scheduler
        num_largest = get_max_concurrency_for_kv_cache_config(engine.vllm_config, scheduler.kv_cache_config)
        capacity = int(num_largest * engine.vllm_config.model_config.max_model_len)
        self._budget = KvBudget(capacity, longest, scheduler.block_size)
        self._num_stages = engine.vllm_config.parallel_config.pipeline_parallel_size
        preempt = scheduler._preempt_request

        def count_and_preempt(request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
            self.num_preempted += not drop_stale_output  # otherwise a push recomputes its cache
            preempt(request, timestamp, drop_stale_output)

        scheduler._preempt_request = count_and_preempt

    def add(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        """Queue requests and return their future completions."""
        futures: list[Future[Completion]] = [Future() for _ in requests]
        self._unresolved.update(futures)
        spans.follow("request", futures)
        items = list(zip(requests, futures, strict=True))
        self._waiting.extendleft(reversed([item for item in items if item[0].goes_on]))
        self._waiting.extend(item for item in items if not item[0].goes_on)
        self._has_changed = True
        return futures

    def start_fitting(self, engine: LLMEngine) -> None:
        """Give vLLM the waiting requests that fit into the cache."""
        if not self._waiting or not self._has_changed:
            return
        assert self._budget is not None, "the engine has been attached"
        self._has_changed = False
        scheduler = engine.engine_core.engine_core.scheduler
        running = [(request.num_tokens, request.num_output_tokens) for request in scheduler.requests.values()]
        num_free = scheduler.max_num_running_reqs - len(running)
        first = [len(request.ids) for request, _ in islice(self._waiting, num_free)]
        num_fitting = self._budget.num_fitting(running, first)
        part = -(-(len(running) + num_fitting) // self._num_stages)
        self._has_changed = num_fitting > part
        for _ in range(min(num_fitting, part)):
            request, future = self._waiting.popleft()
            try:
                self._running[self._give(request)] = request, future
            except Exception as error:  # vLLM refuses this request, which is no reason to end another one
                if getattr(engine.model_executor, "is_failed", False):  # a worker has died, which is one
                    raise
                self._unresolved.remove(future)
                resolve(future, error=error)

    def hand_out(self, outputs: Sequence[RequestOutput]) -> None:
        """Give the outputs of vLLM to those who wait for them."""
        assert self._budget is not None, "the engine has been attached"
        for output in outputs:
            if output.finished:
                completion = self._completed(output)
                request, future = self._running.pop(output.request_id)
                call = request.call
                if not call.num_candidates and not call.num_scored:  # no answer, so it says nothing of their lengths
                    self._budget.finished(len(completion.ids))
                    self.num_sampled += len(completion.ids)
                self._has_changed = True
                self._unresolved.remove(future)
                resolve(future, completion)

    def forget_lengths(self) -> None:
        """Forget the lengths of earlier answers, so that the next requests start when they would in a new engine."""
        assert self._budget is not None, "the engine has been attached"
        self._budget.forget()

    def cancel(self, engine: LLMEngine, ticket: int) -> None:
        """End the requests of a group with an error."""

        def is_cancelled(request: Request) -> bool:
            return request.answer is not None and request.answer[0] == ticket

        self._end(engine, is_cancelled, "the group was cancelled")

    def abort(self, engine: LLMEngine, reason: str) -> None:
        """End all requests with an error."""
        self._end(engine, lambda _: True, reason)

    def _end(self, engine: LLMEngine, ends: Callable[[Request], bool], reason: str) -> None:
        names = [name for name, (request, _) in self._running.items() if ends(request)]
        engine.abort_request(names)
        ended = [self._running.pop(name)[1] for name in names]
        ended += [future for request, future in self._waiting if ends(request)]
        self._waiting = deque(item for item in self._waiting if not ends(item[0]))
        self._has_changed = True
        self._unresolved.difference_update(ended)
        for future in ended:
            resolve(future, error=RuntimeError(reason))

    def fail(self, reason: str) -> None:
        """End all that is waited for, because vLLM has failed. Any thread may call this, at any time."""
        for future in list(self._unresolved):
            resolve(future, error=RuntimeError(reason))
