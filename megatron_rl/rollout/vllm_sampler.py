"""The sampler of an engine of vLLM, with token ids as input and output.

The calls of a batch start together and in their order. An answer goes on in the engine's thread: its next request
enters vLLM before the next step. Weights may arrive while requests run: they arrive between two steps, and the requests
continue with them. Invariants (tests/unit/rollout):
- The noise of a request belongs to (seed, position). So it does not depend on the engine or on other
  requests, up to the rounding of batches of other sizes. If the engine does nothing else, and no push arrives, the
  answers of a batch are the same to the bit, because an idle engine empties its prefix cache when a batch begins: a
  resumed run in turns repeats the uninterrupted one.
- A push during a call changes no token that was sampled before it.
- A request never reads a cached prefix that other weights computed. With `cleared` a push empties the cache and the
  running requests' keys and values are computed again; with `salted` later requests cannot see the old cache.
- Log-probs belong to the full distribution at the sampling temperature (vLLM's `processed_logprobs`). With top_p or
  top_k they belong to the truncated distribution, so a training run is refused.
- An engine without weights, with another version than the caller asks for, or with a part of an update refuses to
  answer. A call during which a push fails raises an error.

On a GPU, kernels may round differently from run to run.

vLLM labels the tokens of a step with a version when it hands them out. Before weights change, all steps have been
handed out, so no token gets the wrong version. With asynchronous scheduling, which vLLM does on GPUs alone, this has
not been run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from megatron_rl.data.pictures import pictures_of
from megatron_rl.rollout.answer import completion_of
from megatron_rl.rollout.backend import ABILITIES, AnswerCall, EngineSpec, Sampler
from megatron_rl.rollout.drafts import drafts_of
from megatron_rl.rollout.engine_thread import EngineThread
from megatron_rl.rollout.engine_weights import EngineWeights
from megatron_rl.rollout.program import Completion, Request
from megatron_rl.rollout.progress import Progress
from megatron_rl.rollout.request_queue import RequestQueue
from megatron_rl.rollout.start import make_engine, served_adapter

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

log = logging.getLogger(__name__)

Result = TypeVar("Result")

CLOSE_S = 20.0
"""The time limit for vLLM's end."""


class VllmSampler(Sampler):
    """vLLM with the ranks of `rollout.parallel`. Its `weights` also have `receive`, for an engine that is alone."""

    abilities = ABILITIES
    weights: EngineWeights

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._stop_ids, has_adapters = spec.stop_ids, spec.adapters is not None
        self._thread = EngineThread(RequestQueue(self._give, self._completion))
        self._batches: dict[int | None, list[tuple[Callable[[], Any], asyncio.Future[Any]]]] = {}
        """The calls of each batch that wait for its last one; see `begin`."""
        self._num_requests, self._pins = 0, has_adapters and spec.rollout.num_adapters > 1
        self._progress = Progress(spec.record) if spec.record else None
        speculative = spec.rollout.speculative
        self.drafts = drafts_of(speculative) if speculative is not None else None
        self.weights = EngineWeights(self._thread, spec, self._progress, self.drafts)

    async def start(self) -> None:
        """Start vLLM.

        Raises:
            ValueError: vLLM refuses the configuration.
        """
        try:
            await self._thread.start(partial(make_engine, self.spec, self._progress))
            longest = self.spec.rollout.max_response_tokens
            await self._thread.call(lambda: self._thread.requests.attach(self._thread.engine, longest))
            if self.drafts is not None:
                self.drafts.attach(self._thread.engine)
            if self.spec.loads_weights:
                await self.weights.loaded()
        except ValidationError as error:  # it cannot be pickled, and it names vLLM's internals
            reasons = "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
            log.exception("vLLM refuses its configuration")
            raise ValueError(f"vLLM refuses the configuration: {reasons}") from None

    async def sample(self, request: Request) -> Completion:
        [future] = await self.call(partial(self.ask, [request]))
        return await asyncio.wrap_future(future)

    @contextmanager
    def answering(self, call: AnswerCall) -> Iterator[None]:
        try:
            yield
        finally:
            self.weights.unpin(self._pinned_by(call))
            if self.drafts is not None:
                self.drafts.forget(call.ticket)
        if self._progress is not None:
            self._progress.done(call.ticket)

    async def call(self, work: Callable[[], Result]) -> Result:
        """Work in the engine's thread."""
        return await self._thread.call(work)

    async def begin(self, call: AnswerCall, work: Callable[[], Result], is_first: bool = True) -> Result:
        def begun() -> Result:
            self._require(call.version, is_first)
            if pinned := self._pinned_by(call):
                self.weights.pin(pinned)
            return work()

        return await self._together(call.batch, begun)

    def _pinned_by(self, call: AnswerCall) -> list[tuple[int, int]]:
        """The answers that keep the adapter of their beginning: nobody trains on them."""
        return [(call.ticket, i) for i in call.samples] if self._pins and call.asked.number < 0 else []

    async def _together(self, batch: tuple[int, int] | None, start: Callable[[], Result]) -> Result:
        """Call a function in the engine's thread, in turn with the functions of the same batch; see `begin`."""
        name, size = batch or (None, 1)
        waiting = self._batches.setdefault(name, [])
        started: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        waiting.append((start, started))
        if len(waiting) == size:
            del self._batches[name]
            if size > 1:
                log.info("version %s: answering %d parts of groups", self.weights.version, size)

            def start_all() -> list[Any]:
                return [_outcome(start) for start, _ in waiting]

            try:
                outcomes = await self._thread.call(start_all)
            except RuntimeError as error:  # vLLM has failed
                outcomes = [error] * size
            for (_, future), outcome in zip(waiting, outcomes, strict=True):
                if future.done():  # nobody waits for it any more
                    continue
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)
        return await started

    async def cancel(self, ticket: int) -> None:
        def end() -> None:
            self._thread.requests.cancel(self._thread.engine, ticket)
            if self._progress is not None:
                self._progress.forget(ticket)

        await self._thread.call(end, drained=True)

    @property
    def alive(self) -> bool:
        """Whether vLLM works, its workers included."""
        return self._thread.alive

    def failure(self) -> str:
        return self._thread.failure()

    def close(self) -> None:
        self._thread.close(CLOSE_S)

    def _require(self, version: int | None, is_first: bool) -> None:
        """Check that the engine can answer.

        Args:
            version: the version that the engine must hold; None: any.
            is_first: whether answers begin now. If there are no others, the prefix cache is emptied.
        """
        self.weights.require(self.weights.works)
        self.weights.require_version(version)
        engine, queue = self._thread.engine, self._thread.requests
        if is_first and not len(queue):
            self._thread.drain()
            engine.reset_prefix_cache()
            queue.forget_lengths()

    def ask(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        """Queue requests, and return their future completions."""
        self.weights.require(self.weights.works)
        return self._thread.requests.add(requests)

    def _give(self, request: Request) -> str:
        from vllm import SamplingParams

        prompt: Any = {"prompt_token_ids": list(request.ids)}
        if request.pictures:
            prompt = self._with_images(request)
        if self.spec.rollout.prefix_cache == "salted":
            prompt["cache_salt"] = str(self.weights.version)
        self._num_requests += 1
        name = str(self._num_requests)
        params, call = self._params(request.is_greedy), request.call
        params |= {"max_tokens": call.max_tokens, "thinking_token_budget": call.thinking_token_budget}
        params |= {"logprobs": call.num_candidates}  # 0: only for the sampled tokens
        if call.num_scored:
            params |= {"prompt_logprobs": 0, "skip_reading_prefix_cache": not call.reads_cache}
            params["extra_args"] = {"num_scored": call.num_scored}  # for RolloutWorker.score_together
        params |= {"seed": request.seed, "stop_token_ids": [*params["stop_token_ids"], *call.stops]}
        pinned = self.weights.pinned(request.answer)
        adapter = served_adapter(self.spec.adapters, pinned)
        internal_name = self._thread.engine.add_request(name, prompt, SamplingParams(**params), lora_request=adapter)
        if self.drafts is not None and call.max_tokens > 1:
            self.drafts.begin(internal_name, request.answer)
        # No progress is kept for environments (nobody reads it) nor beams (their calls sample candidates, not answers).
        is_read = self.spec.rollout.environment is None and not call.num_candidates and pinned is None
        if self._progress is not None and request.answer is not None and is_read:
            self._progress.begin(internal_name, *request.answer)
        return name

    def _with_images(self, request: Request) -> Any:
        from megatron_rl.rollout.vision_models import request_of

        vision, files = self.spec.vision, pictures_of(self.spec.model.path, self.spec.pictures)
        assert vision is not None, "images come with a model that sees them"
        return request_of(request.ids, request.pictures, vision, files)

    def _params(self, greedy: bool) -> dict[str, Any]:
        """The fields of vLLM's SamplingParams, without the limits of the call and the seed."""
        from vllm.sampling_params import RequestOutputKind

        sampling = self.spec.rollout.sampling
        return {
            "temperature": 0.0 if greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": list(self._stop_ids),
            "flat_logprobs": True,
            "detokenize": False,
            "skip_clone": True,  # each request has its own
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }

    def _completion(self, output: RequestOutput) -> Completion:
        return completion_of(output, self._stop_ids)


def _outcome(start: Callable[[], Any]) -> Any:
    """The result of a function, or its error."""
    try:
        return start()
    except Exception as error:
        return error
