"""The engine that answers: vLLM's AsyncLLM, fed with token ids and giving token ids.

A call's requests are queued while the scheduler is paused and start together, in one order, whatever the timing of
the messages to the engine core. Weights may arrive while requests run: these stop between two tokens and go on with
the new weights. Invariants (tests/unit/rollout):
- `generate` is a pure function of (weights, prompts, seed) when no push and no other call happens in it: the sampler's
  random stream and the prefix cache start anew with a call, so a resumed run repeats the unbroken one;
- a push in a call changes nothing before it: every answer begins as without the push;
- each token carries the version that sampled it, exactly;
- a cached prefix is never read by requests of other weights: the push clears the cache and the running requests are
  computed anew (`cleared`), or later requests cannot see it (`salted`);
- log-probs are of the full distribution at the sampling temperature (vLLM's `processed_logprobs`; with top_p
  or top_k they are of what these leave, which the importance correction refuses);
- an engine that holds no weights, others than the caller thinks, or half of an update, answers nothing; a call in which
  a push fails raises.

The first holds to the bit on a CPU; on a GPU, kernels may round differently from run to run.

One lock makes "nothing is scheduled" atomic: whoever pauses the scheduler, to add requests or to change the weights,
resumes it before another may pause it. vLLM labels a step's tokens when it hands them out. A pause ends when all steps
have been handed out, with asynchronous scheduling too, and the label changes after the pause: it is never off by one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Awaitable, Sequence
from typing import Any

import torch
from pydantic import ValidationError

from megatron_rl.config.schema import ModelConfig, RolloutConfig
from megatron_rl.layout import read_shape
from megatron_rl.loop.thinking import Completion, Continuation, join, plan_second_call, truncate
from megatron_rl.rollout.shared_memory import remove_leftovers, remove_own_names
from megatron_rl.rollout.vocabulary import delimiter_ids, stop_ids
from megatron_rl.types import Metrics, Prompt, Sample, Tokens

log = logging.getLogger(__name__)

MAX_SEQUENCES = 1024
"""Answers that decode side by side; more wait. On a GPU vLLM sizes its graphs by it."""


def set_cpu_environment() -> None:
    """What vLLM reads when it is imported, where there is no GPU; settings that stand already win.

    One thread an engine: decode steps of small models are too short to share. Dynamo would compile a two-line
    function for seconds.
    """
    for name, value in {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }.items():
        os.environ.setdefault(name, value)


class VllmEngine:
    """One engine: `rollout.tensor` ranks. Start it, receive weights, then ask."""

    def __init__(self, *, model: ModelConfig, rollout: RolloutConfig, seed: int) -> None:
        """
        Raises:
            ValueError: the model folder is no model, its positions do not hold the longest sample, or the
                thinking budget does not fit.
        """
        self._model, self._rollout, self._seed = model, rollout, seed
        shape = read_shape(model.path)
        self._vocab_size = shape.vocab_size
        self._stop_ids = stop_ids(model.path)
        thinking = rollout.thinking
        if rollout.max_model_tokens > shape.max_positions:
            raise ValueError(
                f"rollout.max_prompt_tokens + rollout.max_response_tokens = {rollout.max_model_tokens} "
                f"exceeds the {shape.max_positions} positions of {model.path}; lower one of them"
            )
        self._delimiter = delimiter_ids(model.path, rollout.delimiter) if rollout.delimiter else None
        if thinking:
            needed = thinking.thought_tokens + len(self._delimiter) + thinking.response_tokens
            if needed > rollout.max_response_tokens:
                raise ValueError(
                    f"rollout.max_response_tokens ({rollout.max_response_tokens}) is below thinking's "
                    f"thought_tokens + the delimiter's {len(self._delimiter)} tokens + response_tokens = "
                    f"{needed}; raise it"
                )
        self._llm: Any = None
        self._version: int | None = None
        self._failure = ""
        """Why there is no version; empty before the first push."""
        self._num_requests = 0
        self._scheduling = asyncio.Lock()
        """Held from pausing the scheduler to resuming it."""

    async def start(self) -> None:
        """Load the model with dummy weights: the bridge brings the true ones.

        Raises:
            ValueError: vLLM refuses the configuration.
        """
        try:
            self._start()
        except ValidationError as error:  # it cannot be sent to another process, and names vLLM's internals
            reasons = "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
            log.exception("vLLM refuses its configuration")
            raise ValueError(f"vLLM refuses the configuration: {reasons}") from None

    def _start(self) -> None:
        on_gpu = torch.cuda.is_available()
        if not on_gpu:
            set_cpu_environment()
        remove_leftovers()
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(self._model.path),
                load_format="dummy",
                dtype=self._model.dtype,
                quantization=self._rollout.quantization,
                skip_tokenizer_init=True,
                generation_config="vllm",  # the folder's own sampling defaults (top_k, temperature) stay out
                seed=self._seed,
                tensor_parallel_size=self._rollout.tensor,
                enable_expert_parallel=self._rollout.expert_parallel,
                max_model_len=self._rollout.max_model_tokens,
                max_num_seqs=MAX_SEQUENCES,
                logprobs_mode="processed_logprobs",
                weight_transfer_config=WeightTransferConfig(backend="megatron_rl"),
                worker_extension_cls="megatron_rl.rollout.worker.RolloutWorker",
                disable_log_stats=True,
                **_gpu_options(self._rollout) if on_gpu else _cpu_options(self._rollout),
            )
        )
        remove_own_names()

    async def generate(
        self, prompts: Sequence[Prompt], num_samples: int, version: int, seed: int, greedy: bool = False
    ) -> list[list[tuple[Sample, Tokens]]]:
        """Answer every prompt `num_samples` times; `greedy`: with the most probable tokens.

        Calls may run side by side and pushes may arrive. A call that begins while another runs shares its random stream
        and its prefix cache. After a push the answers go on with the new weights, and `Tokens.version` says from where.

        Args:
            version: of the weights that generation begins with. While a push is under way, the call waits for it.

        Returns:
            For each prompt its samples, in order.

        Raises:
            ValueError: a prompt that is empty, too long or not of this vocabulary; or the engine's weights
                are not `version`.
            RuntimeError: a push failed while the call ran; its answers are lost.
        """
        self._check(prompts)
        thinking = self._rollout.thinking
        limit = thinking.thought_tokens if thinking else self._rollout.max_response_tokens
        calls = await self._sample(
            [(prompt.token_ids, limit) for prompt in prompts],
            self._params(num_samples, greedy),
            (version, _sampler_seed(self._seed, seed)),
        )
        first = [completion for completions in calls for completion in completions]
        prompt_ids = [prompt.token_ids for prompt in prompts for _ in range(num_samples)]
        if thinking:
            plans = [plan_second_call(call, self._delimiter, thinking.response_tokens) for call in first]
        else:
            plans = [Continuation(len(call.ids), (), 0) for call in first]
        second = await self._continue(prompt_ids, first, plans, self._params(1, greedy))
        samples = [
            join(ids, (truncate(call, plan.num_kept), *rest), plan.forced, self._delimiter)
            for ids, call, plan, rest in zip(prompt_ids, first, plans, second, strict=True)
        ]
        return [samples[i : i + num_samples] for i in range(0, len(samples), num_samples)]

    async def init_transfer(self, info: dict[str, Any]) -> None:
        """Join the bridge; every trainer rank and every engine must do so at the same time.

        Raises:
            ValueError: a live parameter that the plan does not know, or the reverse; sides that disagree.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await _told(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(info)), ValueError)

    async def receive(self, version: int) -> Metrics:
        """Take the weights that the trainer pushes as `version`, while it pushes them; requests may run.

        Returns:
            `seconds` in all; `paused_s` of them requests stood still, 0 when none ran.

        Raises:
            RuntimeError: the push stalled, broke off or was of another version. The requests that ran are ended, and
                the engine answers nothing until a whole push.
        """
        start = time.perf_counter()
        async with self._scheduling:
            paused = time.perf_counter()
            running = self._llm.get_num_unfinished_requests() > 0
            held = "no whole set of weights" if self._version is None else f"version {self._version}"
            self._failure = f"the push of version {version} over {held} failed"
            self._version = None
            try:
                if running:
                    await self._llm.pause_generation(mode="keep", clear_cache=False)
                await self._take_weights(version)
            except RuntimeError as error:
                self._failure += f": {error}"
                raise
            finally:
                if self._version is None:
                    await self._llm.update_weight_version("torn")
                    if running:
                        await self._llm.pause_generation(mode="abort")
                if running:
                    await self._llm.resume_generation()
            end = time.perf_counter()
        return {"seconds": end - start, "paused_s": end - paused if running else 0.0}

    @property
    def alive(self) -> bool:
        """Whether vLLM's own processes still are."""
        return self._llm is not None and not self._llm.errored

    def close(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None

    async def _take_weights(self, version: int) -> None:
        """The update itself and what depends on the weights, while nothing is scheduled."""
        errors = await self._llm.collective_rpc("take_weights", args=(version,))
        if any(errors):
            raise RuntimeError("; ".join(dict.fromkeys(error for error in errors if error)))
        await self._llm.update_weight_version(str(version))
        if self._rollout.prefix_cache == "cleared":
            await _told(self._llm.reset_prefix_cache(reset_running_requests=True), RuntimeError)
        self._version = version

    def _check_version(self, version: int) -> None:
        if version != self._version:
            held = f"version {self._version}" if self._version is not None else "no whole set of weights"
            reason = f" ({self._failure})" if self._version is None and self._failure else ""
            raise ValueError(f"version {version} was asked for, but the engine holds {held}{reason}; push first")

    def _check(self, prompts: Sequence[Prompt]) -> None:
        longest = self._rollout.max_prompt_tokens
        for prompt in prompts:
            size = len(prompt.token_ids)
            if not 0 < size <= longest:
                raise ValueError(
                    f"prompt {prompt.uid} has {size} tokens, rollout.max_prompt_tokens is {longest}: "
                    "raise it, or drop the row with data.on_bad_row=skip"
                )
            alien = next((token for token in prompt.token_ids if not 0 <= token < self._vocab_size), None)
            if alien is not None:
                raise ValueError(
                    f"prompt {prompt.uid} holds the id {alien}, outside the model's vocabulary of "
                    f"{self._vocab_size}: tokenise it with this model's tokenizer"
                )

    async def _continue(
        self,
        prompt_ids: Sequence[Sequence[int]],
        first: Sequence[Completion],
        plans: Sequence[Continuation],
        params: dict[str, Any],
    ) -> list[list[Completion]]:
        """Call 2 for each sample that has one, else an empty list; the prefix cache knows what call 1 saw."""
        requests = [
            ([*ids, *call.ids, *plan.forced], plan.max_tokens)
            for ids, call, plan in zip(prompt_ids, first, plans, strict=True)
            if plan.max_tokens
        ]
        answers = iter(await self._sample(requests, params, None) if requests else [])
        return [next(answers) if plan.max_tokens else [] for plan in plans]

    async def _sample(
        self, requests: Sequence[tuple[Sequence[int], int]], params: dict[str, Any], begin: tuple[int, int] | None
    ) -> list[list[Completion]]:
        """One call of the engine for all (prompt ids, token limit).

        Args:
            params: of sampling, but the limit.
            begin: the version that the engine must hold, and a seed that starts the random stream and an empty prefix
                cache, unless another call runs. None goes on with weights, stream and cache as they are.
        """
        async with self._scheduling:
            if begin:
                self._check_version(begin[0])
            elif self._version is None:
                raise RuntimeError(f"{self._failure}; the answers that were under way are lost")
            anew = begin is not None and not self._llm.get_num_unfinished_requests()
            await self._llm.pause_generation(mode="keep", clear_cache=anew)
            try:
                if anew:
                    await self._llm.collective_rpc("seed_sampling", args=(begin[1],))
                queues = [await self._add(ids, limit, params) for ids, limit in requests]
            finally:
                await self._llm.resume_generation()
        return [await self._collect(queue) for queue in queues]

    async def _add(self, ids: Sequence[int], limit: int, params: dict[str, Any]) -> Any:
        """Queue one request; returns where its answers will arrive."""
        from vllm import SamplingParams

        prompt: dict[str, Any] = {"prompt_token_ids": list(ids)}
        if self._rollout.prefix_cache == "salted":
            prompt["cache_salt"] = str(self._version)
        self._num_requests += 1
        return await self._llm.add_request(str(self._num_requests), prompt, SamplingParams(**params, max_tokens=limit))

    async def _collect(self, queue: Any) -> list[Completion]:
        """A request's answers in order; they arrive as they end.

        Raises:
            RuntimeError: a push that failed has ended the request.
        """
        answers: list[Any] = []
        finished = False
        while not finished:
            output = await queue.get()
            answers += output.outputs
            finished = output.finished
        if any(answer.finish_reason == "abort" for answer in answers):
            raise RuntimeError(f"{self._failure}; the answers that were under way are lost")
        return [_completion(answer) for answer in sorted(answers, key=lambda answer: answer.index)]

    def _params(self, num_samples: int, greedy: bool) -> dict[str, Any]:
        """Of vLLM's SamplingParams, but the token limit."""
        from vllm.sampling_params import RequestOutputKind

        sampling = self._rollout.sampling
        return {
            "n": num_samples,
            "temperature": 0.0 if greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": list(self._stop_ids),
            "logprobs": 0,  # of the sampled token alone
            "flat_logprobs": True,
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }


async def _told(call: Awaitable[Any], kind: type[Exception]) -> None:
    """Await a call of the engine core. What is raised there arrives as a bare Exception with its text alone; it
    becomes `kind`, which says whose fault it is."""
    try:
        await call
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise kind(str(error)) from error


def _completion(answer: Any) -> Completion:
    logp = answer.logprobs.logprobs
    versions = [int(span.version) for span in answer.weight_versions for _ in range(span.start, span.end)]
    assert len(logp) == len(versions) == len(answer.token_ids)
    return Completion(answer.token_ids, logp, versions, stopped=answer.finish_reason == "stop")


def _cpu_options(rollout: RolloutConfig) -> dict[str, Any]:
    """Asynchronous scheduling hides a device's latency; without a device it only costs, and so does a worker
    process beside the engine core's. A step takes every prompt at once: one pass of the scheduler's Python
    loop less."""
    options: dict[str, Any] = {
        "enforce_eager": True,
        "async_scheduling": False,
        "max_num_batched_tokens": max(8192, rollout.max_model_tokens),
    }
    if rollout.tensor == 1:
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        options["distributed_executor_backend"] = UniProcExecutor
    return options


def _gpu_options(rollout: RolloutConfig) -> dict[str, Any]:
    """Not yet run on a GPU: the CPU tests share everything but these and the environment."""
    return {"gpu_memory_utilization": rollout.gpu_memory_utilization}


def _sampler_seed(*parts: int) -> int:
    """Streams of different engines and calls are unrelated."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little")
