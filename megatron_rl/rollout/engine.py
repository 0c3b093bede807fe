"""The engine that generates answers: vLLM, with token ids as input and output.

The calls of a batch start together and in their order. An answer's program goes on in the engine's thread
(coroutine.py): its next request enters vLLM before the next step and waits for no other answer. Weights may arrive
while requests run: they arrive between two steps, and the requests continue with them. Invariants (tests/unit/rollout):
- Each answer has a seed, and its noise belongs to (seed, position). So it does not depend on the engine or on other
  requests, up to the rounding of batches of other sizes. If the engine does nothing else, and no push arrives, the
  answers of a batch are the same to the bit, because an idle engine empties its prefix cache when a batch begins: a
  resumed run in turns repeats the uninterrupted one.
- A push during a call changes no token that was sampled before it.
- Each token carries exactly the version that sampled it.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pydantic import ValidationError

from megatron_rl.layout import read_shape
from megatron_rl.rollout.answer import completion_of, prompt_logp, request_seed, sampled_before
from megatron_rl.rollout.backend import EngineSpec
from megatron_rl.rollout.coroutine import Coroutine, begin
from megatron_rl.rollout.engine_thread import EngineThread
from megatron_rl.rollout.engine_weights import EngineWeights
from megatron_rl.rollout.program import Call, Completion, Program, Samples, as_rollout, next_call, replay
from megatron_rl.rollout.programs.beams import as_rollouts
from megatron_rl.rollout.programs.budgets import Budgets
from megatron_rl.rollout.programs.episodes import EpisodeRequest
from megatron_rl.rollout.programs.prefix_values import Beginning, PrefixValuer
from megatron_rl.rollout.progress import Progress, recorded
from megatron_rl.rollout.request_queue import Request, RequestQueue
from megatron_rl.rollout.start import make_engine, served_adapter
from megatron_rl.rollout.vocabulary import stop_ids
from megatron_rl.types import GroupRequest, Prompt

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

log = logging.getLogger(__name__)

Result = TypeVar("Result")

CLOSE_S = 20.0
"""The time limit for vLLM's end."""


class VllmEngine:
    """vLLM as one engine of the ranks of `rollout.parallel`; implements `EngineBackend`. Call `start`, then
    `weights.init_transfer` and `weights.receive`, then `answer`. An engine that loads weights needs no transfer."""

    def __init__(self, spec: EngineSpec) -> None:
        """
        Raises:
            ValueError: the folder holds no model, the model has fewer positions than the longest sample has tokens, or
                thinking budget or beams do not fit (see `Budgets`).
        """
        self._spec, self._rollout = spec, spec.rollout
        model, rollout, record = spec.model, spec.rollout, spec.record
        shape = read_shape(model.path)
        self._vocab_size = shape.vocab_size
        self._stop_ids = stop_ids(model.path)
        if (longest := rollout.max_engine_tokens) > shape.max_positions:
            values = rollout.prefix_values
            forced = " + rollout.prefix_values.forced_tokens" if values and values.num_scored else ""
            raise ValueError(
                f"rollout.max_prompt_tokens + rollout.max_response_tokens{forced} = {longest} exceeds the "
                f"{shape.max_positions} positions of {model.path}; lower one of them"
            )
        self._budgets = Budgets(model.path, rollout, torch.cuda.is_available())
        self._valuer: PrefixValuer | None = None
        if rollout.prefix_values is not None:
            self._valuer = PrefixValuer(
                model.path, rollout.prefix_values, self._budgets.delimiter or (), self._score, self._go_on
            )
        self._thread = EngineThread(RequestQueue(self._give))
        self.failure: Callable[[], str] = self._thread.failure
        assert (spec.make_answers is None) == (rollout.environment is None), "only an environment needs them"
        self._episodes = spec.make_answers(self._go_on_asking, self._completion) if spec.make_answers else None
        self._batches: dict[int | None, list[tuple[Callable[[], Any], asyncio.Future[Any]]]] = {}
        """The calls of each batch that wait for its last one; see `answer`."""
        self._num_requests, self._pins = 0, spec.adapters is not None and rollout.num_adapters > 1
        self._progress = Progress(record) if record else None
        self.weights = EngineWeights(self._thread, rollout, self._progress, spec.shares_gpus, spec.adapters is not None)

    async def start(self) -> None:
        """Start vLLM.

        Raises:
            ValueError: vLLM refuses the configuration.
        """
        try:
            await self._thread.start(partial(make_engine, self._spec, self._budgets, self._progress))
            longest = self._rollout.max_response_tokens
            await self._thread.call(lambda: self._thread.requests.attach(self._thread.engine, longest))
            if self._spec.loads_weights:
                await self.weights.loaded()
        except ValidationError as error:  # it cannot be pickled, and it names vLLM's internals
            reasons = "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
            log.exception("vLLM refuses its configuration")
            raise ValueError(f"vLLM refuses the configuration: {reasons}") from None

    async def answer(
        self,
        ticket: int,
        asked: GroupRequest,
        samples: range,
        version: int | None = None,
        batch: tuple[int, int] | None = None,
        earlier: Sequence[Path] = (),
    ) -> tuple[Samples, Samples]:
        """See `EngineBackend`."""
        prompt, first_seed, is_rewarded = asked.prompt, request_seed(self._spec.seed, *asked.seed), asked.number >= 0
        # Nobody trains on the group, so it may keep the weights of its beginning.
        pinned = [(ticket, i) for i in samples] if self._pins and asked.number < 0 else []

        def started(requests: Sequence[Request], is_first: bool) -> list[Future[RequestOutput]]:
            check_prompt(prompt, self._rollout.max_prompt_tokens, self._vocab_size)
            self._require(version, is_first)
            if pinned:
                self.weights.pin(pinned)
            return self._ask(requests)

        def begun() -> Future[tuple[Samples, Samples]]:
            check_prompt(prompt, self._rollout.max_prompt_tokens, self._vocab_size)
            programs = {i: self._budgets.of(prompt, i) for i in samples}
            sampled = {i: sampled_before(recorded(earlier, ticket, i)) for i in samples}
            answers = [
                self._answered(prompt, programs[i], sampled[i], first_seed + i, (ticket, i), asked.is_greedy)
                for i in samples
            ]
            self._require(version, is_first=True)
            if pinned:
                self.weights.pin(pinned)
            return begin(self._group(prompt, answers, is_rewarded))

        try:
            if self._episodes is not None:
                played = await self._episodes.answers(
                    EpisodeRequest(ticket, prompt, samples, first_seed, asked.is_greedy),
                    lambda requests, is_first: self._together(batch, partial(started, requests, is_first)),
                )
                found = await self._carry_out(self._valued(prompt, played, is_rewarded))
            else:
                found = await asyncio.wrap_future(await self._together(batch, begun))
        finally:
            self.weights.unpin(pinned)
        if self._progress is not None:
            self._progress.done(ticket)
        return found

    async def _together(self, batch: tuple[int, int] | None, start: Callable[[], Result]) -> Result:
        """Call a function in the engine's thread, in turn with the functions of the same batch; see `answer`."""
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

    async def _carry_out(self, coroutine: Coroutine[Result]) -> Result:
        """Carry out a coroutine in the engine's thread."""
        return await asyncio.wrap_future(await self._thread.call(partial(begin, coroutine)))

    def _group(
        self, prompt: Prompt, answers: Sequence[Coroutine[Samples]], is_rewarded: bool
    ) -> Coroutine[tuple[Samples, Samples]]:
        """See `answer`."""
        return (yield from self._valued(prompt, (yield from self._side_by_side(answers)), is_rewarded))

    def _side_by_side(self, answers: Sequence[Coroutine[Samples]]) -> Coroutine[Samples]:
        parts = yield [begin(answer) for answer in answers]
        return [sample for samples in parts for sample in samples]

    def _valued(self, prompt: Prompt, samples: Samples, is_rewarded: bool) -> Coroutine[tuple[Samples, Samples]]:
        """The answers with the rewards of their passages, and their continuations, if they get any."""
        if self._valuer is None or not is_rewarded:
            return samples, []
        return (yield from self._valuer.rewarded(prompt, samples))

    def _answered(
        self,
        prompt: Prompt,
        program: Program,
        sampled: Completion,
        seed: int,
        name: tuple[int, int] | None = None,
        is_greedy: bool = False,
    ) -> Coroutine[Samples]:
        """Carry out the program of one answer, and search its beams if it has any.

        Args:
            sampled: the tokens that have been sampled already.
            name: see `Request.answer`.
        """
        transcript, call = replay(program, sampled, self._stop_ids)
        while call is not None:
            ids = [*prompt.token_ids, *transcript.ids]
            [output] = yield self._ask([Request(ids, call, seed, is_greedy, name, goes_on=len(transcript.ids) > 0)])
            transcript.sampled(self._completion(output))
            call = next_call(program, transcript)
        delimiter, budget = program.delimiter, program.thought_tokens
        if (search := self._budgets.beams) is None:
            return [as_rollout(prompt.token_ids, transcript, delimiter, budget)]
        assert delimiter is not None, "beams follow a thought"
        beams = search.begin(transcript, delimiter)
        for _ in range(search.num_tokens):
            before = [*prompt.token_ids, *transcript.ids]
            requests = [Request([*before, *beam.ids], search.call, seed, False, name, True) for beam in beams]
            outputs = yield self._ask(requests)
            beams = search.extended(beams, [self._completion(output) for output in outputs])
        return as_rollouts(prompt.token_ids, transcript, delimiter, budget, beams)

    def _go_on(self, prompt: Prompt, beginnings: Sequence[Beginning]) -> Coroutine[Samples]:
        """See `prefix_values.GoOn`. The tokens of a beginning are all sampled."""
        answers = []
        for beginning in beginnings:
            tokens, own = beginning.tokens, slice(len(prompt.token_ids), beginning.length)
            columns = tokens.ids[own].tolist(), tokens.logp_rollout[own].tolist(), tokens.version[own].tolist()
            seed = request_seed(self._spec.seed, beginning.sample, columns[0]) + beginning.rollout
            program, sampled = self._budgets.of(prompt, beginning.sample), Completion(*columns, stopped=False)
            answers.append(self._answered(prompt, program, sampled, seed))
        return (yield from self._side_by_side(answers))

    def _score(self, texts: Sequence[tuple[Sequence[int], int]]) -> Coroutine[list[Sequence[float]]]:
        """See `prefix_values.Score`."""
        found: dict[int, Sequence[float]] = {}
        for reads_cache in (True, False):  # again without the cache, if it held what is scored
            left = [k for k in range(len(texts)) if k not in found]
            calls = [Call(1, num_scored=texts[k][1], reads_cache=reads_cache) for k in left]
            requests = [Request(texts[k][0], call, seed=0, goes_on=True) for k, call in zip(left, calls, strict=True)]
            outputs = yield self._ask(requests)
            for k, call, output in zip(left, calls, outputs, strict=True):
                logp = prompt_logp(output)
                if call.num_scored <= len(logp):
                    found[k] = logp[-call.num_scored :]
        return [found[k] for k in range(len(texts))]

    async def cancel(self, ticket: int) -> None:
        """End the answers of a group. Its call of `answer`, if it is running, ends with an error."""
        if self._episodes is not None:
            self._episodes.cancel(ticket)

        def end() -> None:
            self._thread.requests.cancel(self._thread.engine, ticket)
            if self._progress is not None:
                self._progress.forget(ticket)

        await self._thread.call(end, drained=True)

    @property
    def alive(self) -> bool:
        """Whether vLLM works, its workers included."""
        return self._thread.alive

    def close(self) -> None:
        self._thread.close(CLOSE_S)

    async def _go_on_asking(self, request: Request) -> Completion:
        """See `episodes.Ask`."""
        [future] = await self._thread.call(partial(self._ask, [request]))
        return self._completion(await asyncio.wrap_future(future))

    def _require(self, version: int | None, is_first: bool) -> None:
        """Check that the engine can answer.

        Args:
            version: the version that the engine must hold; None: any.
            is_first: whether answers begin now. If there are no others, the prefix cache is emptied.
        """
        self.weights.require("generating")
        self.weights.require_version(version)
        engine, queue = self._thread.engine, self._thread.requests
        if is_first and not len(queue):
            self._thread.drain()
            engine.reset_prefix_cache()
            queue.forget_lengths()

    def _ask(self, requests: Sequence[Request]) -> list[Future[RequestOutput]]:
        """Queue requests, and return their future outputs."""
        self.weights.require("generating")
        return self._thread.requests.add(requests)

    def _give(self, request: Request) -> str:
        from vllm import SamplingParams

        prompt: dict[str, Any] = {"prompt_token_ids": list(request.ids)}
        if self._rollout.prefix_cache == "salted":
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
        adapter = served_adapter(self._spec.adapters, pinned)
        internal_name = self._thread.engine.add_request(name, prompt, SamplingParams(**params), lora_request=adapter)
        # No progress is kept for environments (nobody reads it) nor beams (their calls sample candidates, not answers).
        is_read = self._episodes is None and not call.num_candidates and pinned is None
        if self._progress is not None and request.answer is not None and is_read:
            self._progress.begin(internal_name, *request.answer)
        return name

    def _params(self, greedy: bool) -> dict[str, Any]:
        """The fields of vLLM's SamplingParams, without the limits of the call and the seed."""
        from vllm.sampling_params import RequestOutputKind

        sampling = self._rollout.sampling
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


def check_prompt(prompt: Prompt, longest: int, vocab_size: int) -> None:
    """
    Raises:
        ValueError: the prompt is empty, has more than `longest` tokens, or one that the model does not have.
    """
    size = len(prompt.token_ids)
    if not 0 < size <= longest:
        raise ValueError(
            f"prompt {prompt.uid} has {size} tokens, but rollout.max_prompt_tokens is {longest}: raise it, or drop "
            "the row with data.on_bad_row=skip"
        )
    alien = next((token for token in prompt.token_ids if not 0 <= token < vocab_size), None)
    if alien is not None:
        raise ValueError(
            f"prompt {prompt.uid} holds the id {alien}, outside the model's vocabulary of {vocab_size}: "
            "tokenise it with this model's tokenizer"
        )


def _outcome(start: Callable[[], Any]) -> Any:
    """The result of a function, or its error."""
    try:
        return start()
    except Exception as error:
        return error
