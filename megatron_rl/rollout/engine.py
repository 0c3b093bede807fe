"""The engine that generates answers: vLLM, with token ids as input and output.

The requests of a call start together and in a fixed order. Weights may arrive while requests run: they arrive between
two steps, and the requests continue with them. Invariants (tests/unit/rollout):
- Each answer has a seed, and its noise belongs to (seed, position). So it is the same whatever else the engine does, on
  whichever engine it begins or goes on, up to the rounding of batches of other sizes. If no push and no other call
  happens during `generate`, it is the same to the bit, because the call empties the prefix cache: a resumed run repeats
  the uninterrupted one.
- A push during a call changes no token that was sampled before it.
- Each token carries exactly the version that sampled it.
- A request never reads a cached prefix that other weights computed. With `cleared` a push empties the cache and the
  running requests' keys and values are computed anew; with `salted` later requests cannot see the old cache.
- Log-probs are those of the full distribution at the sampling temperature (vLLM's `processed_logprobs`). With top_p or
  top_k they are those of the truncated distribution, so a training run is refused.
- An engine without weights, with another version than the caller asks for, or with a part of an update refuses to
  answer. A call during which a push fails raises an error.

On a GPU, kernels may round differently from run to run.

vLLM labels the tokens of a step with a version when it hands them out. Before weights change, all steps have been
handed out, so no token gets the wrong version. With asynchronous scheduling, which vLLM does on GPUs alone, this has
not been run.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from megatron_rl.config.policy import ModelConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.layout import read_shape
from megatron_rl.rollout.beams import as_samples
from megatron_rl.rollout.budgets import Budgets, Chosen
from megatron_rl.rollout.engine_thread import EngineThread
from megatron_rl.rollout.engine_weights import EngineWeights
from megatron_rl.rollout.episodes import MakeAnswers
from megatron_rl.rollout.prefix_values import Beginning, PrefixValuer
from megatron_rl.rollout.program import Call, Completion, Transcript, as_sample, next_call, replay
from megatron_rl.rollout.progress import Progress, recorded
from megatron_rl.rollout.request_queue import Request, RequestQueue
from megatron_rl.rollout.start import make_engine
from megatron_rl.rollout.vocabulary import stop_ids
from megatron_rl.types import Prompt, Purpose, Sample, Tokens

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

log = logging.getLogger(__name__)

CLOSE_S = 20.0
"""The time limit for vLLM's end."""


@dataclass(slots=True)
class _Answer:
    """An answer whose program goes on while others do."""

    prompt_ids: Sequence[int]
    name: tuple[int, int] | None
    """The ticket of the group and the number of the sample; None: its tokens are not recorded."""
    chosen: Chosen
    transcript: Transcript
    call: Call | None
    """The call under way; None if the answer is complete."""
    begun: Completion
    """What an earlier engine has sampled of this call."""
    seed: int

    @property
    def request(self) -> Request:
        sampled = [*self.transcript.ids, *self.begun.ids]
        call = replace(self.call, max_tokens=self.call.max_tokens - len(self.begun.ids))
        return Request([*self.prompt_ids, *sampled], call, self.seed, answer=self.name, goes_on=len(sampled) > 0)

    def sampled(self, rest: Completion) -> None:
        """Complete the call."""
        parts = [(*a, *b) for a, b in ((self.begun.ids, rest.ids), (self.begun.logp, rest.logp))]
        version = (*self.begun.version, *rest.version)
        self.transcript.sampled(Completion(*parts, version, rest.stopped, rest.routes))
        self.begun = Completion((), (), (), stopped=False)


class VllmEngine:
    """One engine of `rollout.tensor` x `rollout.pipeline` ranks. Call `start`, then `weights.init_transfer` and
    `weights.receive`, then `generate`. An engine that loads weights needs no transfer."""

    def __init__(
        self,
        *,
        model: ModelConfig,
        rollout: RolloutConfig,
        seed: int,
        spans_nodes: bool = False,
        returns_routes: bool = False,
        record: Path | None = None,
        shares_gpus: bool = False,
        loads_weights: bool = False,
        make_answers: MakeAnswers | None = None,
    ) -> None:
        """
        Args:
            returns_routes: whether `Tokens.routes` are given. The model must then have experts.
            record: the file that gets the tokens of the unfinished answers of `answer`, so that another engine can go
                on with them.
            spans_nodes: whether the ranks are on several nodes. The process must then be a Ray actor whose placement
                group has a bundle for each rank, because vLLM starts its ranks there as actors.
            shares_gpus: whether trainers have the same GPUs, so that `weights.enter` gives them the memory.
            loads_weights: whether `start` loads the weights of the model's folder, as version 0; otherwise the bridge
                brings them.
            make_answers: makes what carries out the answers, if there is `rollout.environment`.

        Raises:
            ValueError: the folder holds no model, the model has fewer positions than the longest sample has tokens, or
                thinking budget or beams do not fit (see `Budgets`).
        """
        self._model, self._rollout, self._seed, self._spans_nodes = model, rollout, seed, spans_nodes
        self._shares_gpus, self._loads_weights = shares_gpus, loads_weights
        self._returns_routes = returns_routes
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
        assert (make_answers is None) == (rollout.environment is None), "only an environment needs them"
        self._episodes = make_answers(self._start, self._completion) if make_answers else None
        self._num_requests = 0
        self._progress = Progress(record) if record else None
        self.weights = EngineWeights(self._thread, rollout, self._progress, shares_gpus)

    async def start(self) -> None:
        """Start vLLM.

        Raises:
            ValueError: vLLM refuses the configuration.
        """
        try:
            options = self._seed, self._spans_nodes, self._returns_routes, self._progress, self._shares_gpus
            start = partial(make_engine, self._model, self._rollout, self._budgets, *options, self._loads_weights)
            await self._thread.start(start)
            longest = self._rollout.max_response_tokens
            await self._thread.call(lambda: self._thread.requests.attach(self._thread.engine, longest))
            if self._loads_weights:
                await self.weights.loaded()
        except ValidationError as error:  # it cannot be pickled, and it names vLLM's internals
            reasons = "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
            log.exception("vLLM refuses its configuration")
            raise ValueError(f"vLLM refuses the configuration: {reasons}") from None

    async def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        version: int,
        seed: int,
        purpose: Purpose = "training",
        first: int = 0,
    ) -> list[list[tuple[Sample, Tokens]]]:
        """The samples of each prompt, in the order of the prompts. See `generate_as_finished`."""
        asked = self.generate_as_finished(prompts, num_samples, version, seed, purpose, first)
        groups = {number: samples async for number, samples in asked}
        return [groups[number] for number in range(len(prompts))]

    async def generate_as_finished(
        self, prompts: Sequence[Prompt], num_samples: int, version: int, seed: int, purpose: Purpose, first: int
    ) -> AsyncIterator[tuple[int, list[tuple[Sample, Tokens]]]]:
        """Answer every prompt `num_samples` times, and give each group as soon as all its answers are complete. With
        `rollout.beams` these are thoughts, of which each gives a sample for each of its beams, the best one first.

        Several calls may run at once, and pushes may arrive during a call. After a push the answers continue with the
        new weights, and `Tokens.version` gives the version of each token.

        Args:
            version: the version of the weights that generation begins with. If a push is under way, the call waits
                until it ends.
            first: the number of prompts that other engines answer before these ones. The seed of an answer comes from
                `seed` and the number of its prompt, so it does not depend on the number of engines.
            purpose: only answers for `training` get the rewards of their passages.

        Yields:
            The number of a prompt, counted from 0, and its samples.

        Raises:
            ValueError: a prompt is empty, too long or has tokens outside the vocabulary, or no usable thinking budget
                (see `Budgets.of`), or vLLM did not keep it, or the engine does not hold `version`.
            RuntimeError: a push failed during the call, and the answers that were not given yet are lost.
        """
        self._check(prompts)
        groups = self._groups(prompts, num_samples, version, seed, purpose == "baseline", first)
        if self._valuer is not None and purpose == "training":
            groups = self._valuer.groups(groups, prompts)
        async for number, samples in groups:
            yield number, samples

    async def _groups(
        self, prompts: Sequence[Prompt], num_samples: int, version: int, seed: int, greedy: bool, first: int
    ) -> AsyncIterator[tuple[int, list[tuple[Sample, Tokens]]]]:
        prompt_ids = [prompt.token_ids for prompt in prompts for _ in range(num_samples)]
        seeds = [
            request_seed(self._seed, seed, number) + sample
            for number in range(first, first + len(prompts))
            for sample in range(num_samples)
        ]
        if self._episodes is not None:
            async for number, samples in self._episodes.groups(prompts, num_samples, seeds, version, greedy):
                yield number, samples
            return
        chosen = [self._budgets.of(prompt, sample) for prompt in prompts for sample in range(num_samples)]
        transcripts = [Transcript() for _ in prompt_ids]
        num_left = [num_samples] * len(prompts)
        calls: dict[int, Call] = {}
        for i, transcript in enumerate(transcripts):
            call = next_call(chosen[i].program, transcript)
            assert call is not None, "a program begins with a call"
            calls[i] = call
        begins_with: int | None = version
        while calls:
            # In later rounds the prefix cache still holds the tokens of the earlier ones.
            requests = [
                Request([*prompt_ids[i], *transcripts[i].ids], call, seeds[i], greedy) for i, call in calls.items()
            ]
            asked, following = list(calls), {}
            async for k, completion in self._sample(requests, begins_with):
                i = asked[k]
                transcripts[i].sampled(completion)
                if (after := next_call(chosen[i].program, transcripts[i])) is not None:
                    following[i] = after
                    continue
                number = i // num_samples
                num_left[number] -= 1
                if num_left[number] == 0 and self._budgets.beams is None:
                    own = range(number * num_samples, (number + 1) * num_samples)
                    yield number, [_sample_of(prompt_ids[j], transcripts[j], chosen[j]) for j in own]
            calls = {i: following[i] for i in sorted(following)}  # the order in which requests begin is fixed
            begins_with = None
        if self._budgets.beams is not None:
            found = await self._search(prompt_ids, transcripts, chosen, seeds, [None] * len(seeds))
            for number in range(len(prompts)):
                own = range(number * num_samples, (number + 1) * num_samples)
                yield number, [sample for j in own for sample in found[j]]

    async def answer(
        self, ticket: int, number: int, prompt: Prompt, samples: range, earlier: Sequence[Path] = ()
    ) -> list[tuple[Sample, Tokens]]:
        """Give some of the answers of a group while others are given and pushes arrive, with the weights that the
        engine holds.

        Each answer goes on as soon as its own call has ended. With `rollout.beams` the answers are thoughts, as in
        `generate_as_finished`; another engine goes on with a thought, and searches its beams from the start.

        Args:
            ticket: names this asking of the group in `cancel` and in the records. All engines have the same.
            number: the number of the group, which seeds its answers. Those of evaluations are below 0.
            samples: the numbers of the answers within the group.
            earlier: the records of the engines that have begun this group and lost it, in order. The answers go on
                from the tokens in these records, except with an environment, whose state is lost: they begin anew.

        Raises:
            ValueError: the prompt is empty, too long or has tokens outside the vocabulary, or no usable thinking budget
                (see `Budgets.of`), or vLLM did not keep it.
            RuntimeError: the engine holds no weights, the group was cancelled, or a push failed meanwhile, and the
                answers are lost.
        """
        self._check([prompt])
        if self._episodes is not None:
            found = await self._episodes.answers(ticket, prompt, samples, request_seed(self._seed, number))
        else:
            found = await self._answers(ticket, number, prompt, samples, earlier)
        if self._valuer is not None and number >= 0:
            found = await self._valuer.rewarded(prompt, found)
        if self._progress is not None:
            self._progress.done(ticket)
        return found

    async def _answers(
        self, ticket: int, number: int, prompt: Prompt, samples: range, earlier: Sequence[Path]
    ) -> list[tuple[Sample, Tokens]]:
        """See `answer`; without an environment."""
        answers = []
        for sample in samples:
            rows, seed = recorded(earlier, ticket, sample), request_seed(self._seed, number) + sample
            sampled = Completion(rows["token"].tolist(), rows["logp"].tolist(), rows["version"].tolist(), stopped=False)
            answers.append(self._begun(prompt, sample, sampled, seed, (ticket, sample)))
        return await self._completed(answers, is_first=True)

    async def _go_on(self, prompt: Prompt, beginnings: Sequence[Beginning]) -> list[tuple[Sample, Tokens]]:
        """See `prefix_values.GoOn`. The tokens of a beginning are all sampled."""
        answers = []
        for beginning in beginnings:
            tokens, own = beginning.tokens, slice(len(prompt.token_ids), beginning.length)
            columns = tokens.ids[own].tolist(), tokens.logp_rollout[own].tolist(), tokens.version[own].tolist()
            seed = request_seed(self._seed, beginning.sample, columns[0]) + beginning.rollout
            answers.append(self._begun(prompt, beginning.sample, Completion(*columns, stopped=False), seed))
        return await self._completed(answers, is_first=False)

    async def _completed(self, answers: Sequence[_Answer], is_first: bool) -> list[tuple[Sample, Tokens]]:
        """Carry out the programs of answers side by side."""
        requests = [answer.request for answer in answers if answer.call is not None]
        futures = iter(await self._thread.call(partial(self._begin, requests, is_first=is_first)))
        calls = [self._complete(answer, next(futures) if answer.call else None) for answer in answers]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [sample for samples in outcomes for sample in samples]

    async def cancel(self, ticket: int) -> None:
        """End the answers of a group. Its call of `answer`, if it is under way, ends with an error."""
        if self._episodes is not None:
            self._episodes.cancel(ticket)

        def end() -> None:
            self._thread.requests.cancel(self._thread.engine, ticket)
            if self._progress is not None:
                self._progress.forget(ticket)

        await self._thread.call(end, drained=True)

    def _begun(
        self, prompt: Prompt, sample: int, sampled: Completion, seed: int, name: tuple[int, int] | None = None
    ) -> _Answer:
        """An answer of which some tokens have been sampled."""
        chosen = self._budgets.of(prompt, sample)
        transcript, call, used = replay(chosen.program, sampled, self._stop_ids)
        rest = Completion(sampled.ids[used:], sampled.logp[used:], sampled.version[used:], stopped=False)
        return _Answer(prompt.token_ids, name, chosen, transcript, call, rest, seed)

    async def _complete(self, answer: _Answer, future: Future[RequestOutput] | None) -> list[tuple[Sample, Tokens]]:
        """Carry out the program of one answer, and search its beams if it has any.

        Args:
            future: the call that is under way; None if the answer is complete.
        """
        while future is not None:
            answer.sampled(self._completion(await asyncio.wrap_future(future)))
            answer.call, future = next_call(answer.chosen.program, answer.transcript), None
            if answer.call is not None:
                [future] = await self._thread.call(partial(self._begin, [answer.request]))
        if self._budgets.beams is None:
            return [_sample_of(answer.prompt_ids, answer.transcript, answer.chosen)]
        one = [answer.prompt_ids], [answer.transcript], [answer.chosen], [answer.seed], [answer.name]
        [samples] = await self._search(*one)
        return samples

    async def _search(
        self,
        prompt_ids: Sequence[Sequence[int]],
        transcripts: Sequence[Transcript],
        chosen: Sequence[Chosen],
        seeds: Sequence[int],
        names: Sequence[tuple[int, int] | None],
    ) -> list[list[tuple[Sample, Tokens]]]:
        """Search the beams of thoughts, one token of all of them after the other. Returns the samples of each
        thought."""
        search = self._budgets.beams
        assert search is not None, "the configuration has beams"
        beams = [search.begin(transcript, one.delimiter) for transcript, one in zip(transcripts, chosen, strict=True)]
        for _ in range(search.num_tokens):
            requests = [
                Request([*prompt_ids[i], *transcripts[i].ids, *beam.ids], search.call, seeds[i], False, names[i], True)
                for i, own in enumerate(beams)
                for beam in own
            ]
            given = dict([one async for one in self._sample(requests, None)])
            completions = iter([given[k] for k in range(len(requests))])
            beams = [search.extended(own, list(islice(completions, len(own)))) for own in beams]
        return [
            as_samples(ids, transcript, one.delimiter, one.thought_budget, own)
            for ids, transcript, one, own in zip(prompt_ids, transcripts, chosen, beams, strict=True)
        ]

    async def _score(self, texts: Sequence[tuple[Sequence[int], int]]) -> list[Sequence[float]]:
        """See `prefix_values.Score`."""
        found: dict[int, Sequence[float]] = {}
        for reads_cache in (True, False):  # again without the cache, if it held what is scored
            left = [k for k in range(len(texts)) if k not in found]
            calls = [Call(1, num_scored=texts[k][1], reads_cache=reads_cache) for k in left]
            requests = [Request(texts[k][0], call, seed=0, goes_on=True) for k, call in zip(left, calls, strict=True)]
            async for i, completion in self._sample(requests, None):
                num = requests[i].call.num_scored
                if num <= len(completion.prompt_logp):
                    found[left[i]] = completion.prompt_logp[-num:]
        return [found[k] for k in range(len(texts))]

    @property
    def alive(self) -> bool:
        """Whether vLLM works, its workers included."""
        return self._thread.alive

    def close(self) -> None:
        self._thread.close(CLOSE_S)

    def _check(self, prompts: Sequence[Prompt]) -> None:
        longest = self._rollout.max_prompt_tokens
        for prompt in prompts:
            size = len(prompt.token_ids)
            if not 0 < size <= longest:
                raise ValueError(
                    f"prompt {prompt.uid} has {size} tokens, but rollout.max_prompt_tokens is {longest}: "
                    "raise it, or drop the row with data.on_bad_row=skip"
                )
            alien = next((token for token in prompt.token_ids if not 0 <= token < self._vocab_size), None)
            if alien is not None:
                raise ValueError(
                    f"prompt {prompt.uid} holds the id {alien}, outside the model's vocabulary of "
                    f"{self._vocab_size}: tokenise it with this model's tokenizer"
                )

    async def _sample(self, requests: Sequence[Request], version: int | None) -> AsyncIterator[tuple[int, Completion]]:
        """Begin requests, and give the number of each with its completion as soon as it has ended. If `version` is
        given, answers begin with them."""
        begin = partial(self._begin, requests, version, is_first=version is not None)
        loop, ended = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Future["RequestOutput"]]]()

        def put(k: int, future: Future[RequestOutput]) -> None:
            loop.call_soon_threadsafe(ended.put_nowait, (k, future))

        for k, future in enumerate(await self._thread.call(begin)):
            future.add_done_callback(partial(put, k))
        for _ in requests:
            k, future = await ended.get()
            yield k, self._completion(future.result())

    async def _start(
        self, requests: Sequence[Request], version: int | None = None, is_first: bool = False
    ) -> list[Future[RequestOutput]]:
        return await self._thread.call(partial(self._begin, requests, version, is_first))

    def _begin(
        self, requests: Sequence[Request], version: int | None = None, is_first: bool = False
    ) -> list[Future[RequestOutput]]:
        """Queue requests and return their future outputs.

        Args:
            version: the version that the engine must hold; None: any.
            is_first: whether answers begin with these requests. If there are no others, the prefix cache is emptied.
        """
        self.weights.require("generating")
        self.weights.require_version(version)
        engine, queue = self._thread.engine, self._thread.requests
        if is_first and not len(queue):
            self._thread.drain()
            engine.reset_prefix_cache()
            queue.forget_lengths()
        return queue.add(requests)

    def _give(self, request: Request) -> str:
        from vllm import SamplingParams

        prompt: dict[str, Any] = {"prompt_token_ids": list(request.ids)}
        if self._rollout.prefix_cache == "salted":
            prompt["cache_salt"] = str(self.weights.version)
        self._num_requests += 1
        name = str(self._num_requests)
        params, call = self._params(request.is_greedy), request.call
        params |= {"max_tokens": call.max_tokens, "thinking_token_budget": call.thinking_token_budget}
        params |= {"logprobs": call.num_candidates}  # 0: only those of the sampled tokens
        if call.num_scored:
            params |= {"prompt_logprobs": 0, "skip_reading_prefix_cache": not call.reads_cache}
            params["extra_args"] = {"num_scored": call.num_scored}  # for RolloutWorker.score_together
        params |= {"seed": request.seed, "stop_token_ids": [*params["stop_token_ids"], *call.stops]}
        internal_name = self._thread.engine.add_request(name, prompt, SamplingParams(**params))
        # An answer with an environment does not go on in another engine, so nobody would read its tokens; what is
        # sampled after a beam is no token of the answer.
        is_read = self._episodes is None and not call.num_candidates
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
        [answer] = output.outputs
        given = answer.logprobs
        logp = [given.logprobs[i] for i in given.start_indices]  # that of the sampled token is the first one of each
        versions = [int(span.version) for span in answer.weight_versions for _ in range(span.start, span.end)]
        assert len(logp) == len(versions) == len(answer.token_ids)
        routes = answer.routed_experts
        if routes is not None:  # those that were computed last are at the end; the last token is never computed
            routes = routes[-(len(output.prompt_token_ids) + len(answer.token_ids) - 1) :]
        ended = answer.finish_reason == "stop" and answer.token_ids[-1] in self._stop_ids
        candidates = dict(zip(given.token_ids, given.logprobs)) if len(given.logprobs) > len(logp) else {}
        return Completion(answer.token_ids, logp, versions, ended, routes, candidates, _prompt_logp(output))


def request_seed(*parts: int) -> int:
    """The seed of the first answer to a prompt, of 62 bits; that of another one is larger by its number."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 2


def _prompt_logp(output: RequestOutput) -> list[float]:
    """See `Completion.prompt_logp`."""
    given = output.prompt_logprobs
    if given is None:
        return []
    # The first token has none. What vLLM gives for those of the cache depends on its model runner.
    num_computed = len(output.prompt_token_ids) - (output.num_cached_tokens or 0) - 1
    return [given.logprobs[i] for i in given.start_indices[len(given) - num_computed :]]


def _sample_of(prompt_ids: Sequence[int], transcript: Transcript, chosen: Chosen) -> tuple[Sample, Tokens]:
    return as_sample(prompt_ids, transcript, chosen.delimiter, chosen.thought_budget)
