"""An engine: what answers are made of, over any sampler (`backend.py`).

An answer's program says what the sampler is asked next (`program.py`), and goes on where its last completion came
(`coroutine.py`): its next request waits for no other answer. Invariants (tests/unit/rollout):
- Each answer has a seed, which depends neither on the engine nor on other answers.
- Each token carries exactly the version that sampled it.
- Budgets, beams, turns and values of passages work with every sampler that has the abilities which they need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from megatron_rl.models import read_shape
from megatron_rl.rollout.answer import request_seed, sampled_before
from megatron_rl.rollout.backend import AnswerCall, BackendWeights, EngineSpec, Sampler
from megatron_rl.rollout.coroutine import Coroutine, begin
from megatron_rl.rollout.program import Call, Completion, Program, Request, Samples, as_rollout, next_call, replay
from megatron_rl.rollout.programs.beams import as_rollouts
from megatron_rl.rollout.programs.budgets import Budgets
from megatron_rl.rollout.programs.episodes import EpisodeRequest
from megatron_rl.rollout.programs.prefix_values import Beginning, PrefixValuer
from megatron_rl.rollout.progress import recorded
from megatron_rl.types import GroupRequest, Prompt

Result = TypeVar("Result")


class Engine:
    """One engine, as the process that holds it uses it. All methods run in one event loop.

    Call `start`, then `weights.init_transfer`, `weights.take` and `weights.commit`, then `answer`. An engine that loads
    weights needs no transfer.
    """

    def __init__(self, spec: EngineSpec, sampler: Callable[[EngineSpec], Sampler]) -> None:
        """
        Args:
            sampler: makes the engine's sampler.

        Raises:
            ValueError: the folder holds no model, the model has fewer positions than the longest sample has tokens, or
                thinking budget or beams do not fit (see `Budgets`).
        """
        self._spec, model, rollout = spec, spec.model, spec.rollout
        shape = read_shape(model.path)
        self._vocab_size = shape.vocab_size
        self._stop_ids = spec.stop_ids
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
        self.sampler = sampler(spec)
        assert (spec.make_answers is None) == (rollout.environment is None), "only an environment needs them"
        self._episodes = spec.make_answers(self.sampler.sample) if spec.make_answers else None

    @property
    def weights(self) -> BackendWeights:
        return self.sampler.weights

    async def start(self) -> None:
        """
        Raises:
            ValueError: the sampler refuses the configuration.
        """
        await self.sampler.start()

    async def answer(
        self,
        ticket: int,
        asked: GroupRequest,
        samples: range,
        version: int | None = None,
        batch: tuple[int, int] | None = None,
        earlier: Sequence[Path] = (),
    ) -> tuple[Samples, Samples]:
        """Give some of the answers of a group, and their continuations if there are any (`Group.continuations`). With
        `rollout.beams` the answers are thoughts; each thought gives a rollout for each of its beams, the best one
        first.

        Many calls run at once, and pushes may arrive during a call: the answers continue with the new weights, and
        `Tokens.version` gives the version of each token. Each answer goes on as soon as its own request has ended.

        Args:
            ticket: names this asking of the group in `cancel` and in the records. All engines have the same.
            samples: the numbers of the answers within the group.
            version: the version of the weights that the answers begin with. If a push is running, the call waits until
                it ends. None: any.
            batch: the name of calls that begin together, in the order of their arrival, and their number. The first
                ones wait for the last one. None: this call begins alone.
            earlier: the records of the engines that have begun these answers and lost them, in order. The answers go
                on from the tokens in these records, and search their beams from the start. With an environment, whose
                state is lost, they begin again.

        Raises:
            ValueError: the prompt is empty, too long or has tokens outside the vocabulary, or no usable thinking budget
                (see `Budgets.of`), or the engine did not keep it, it does not hold `version`, or gave a log-prob that
                is not finite.
            RuntimeError: the engine holds no weights, the group was cancelled, or a push failed meanwhile, and the
                answers are lost.
        """
        prompt, first_seed, is_rewarded = asked.prompt, request_seed(self._spec.seed, *asked.seed), asked.number >= 0
        call = AnswerCall(ticket, asked, samples, version, batch)

        def started(requests: Sequence[Request]) -> list[Future[Completion]]:
            check_prompt(prompt, self._spec.rollout.max_prompt_tokens, self._vocab_size)
            return self.sampler.ask(requests)

        def begun() -> Future[tuple[Samples, Samples]]:
            check_prompt(prompt, self._spec.rollout.max_prompt_tokens, self._vocab_size)
            programs = {i: self._budgets.of(prompt, i) for i in samples}
            sampled = {i: sampled_before(recorded(earlier, ticket, i)) for i in samples}
            answers = [
                self._answered(prompt, programs[i], sampled[i], first_seed + i, (ticket, i), asked.is_greedy)
                for i in samples
            ]
            return begin(self._group(prompt, answers, is_rewarded))

        with self.sampler.answering(call):
            if self._episodes is None:
                answered = await asyncio.wrap_future(await self.sampler.begin(call, begun))
            else:
                played = await self._episodes.answers(
                    EpisodeRequest(ticket, prompt, samples, first_seed, asked.is_greedy, self._budgets.of),
                    lambda requests, is_first: self.sampler.begin(call, partial(started, requests), is_first),
                )
                answered = await self._carry_out(self._valued(prompt, played, is_rewarded))
        for found in answered:
            require_finite(prompt, found)
        return answered

    async def _carry_out(self, coroutine: Coroutine[Result]) -> Result:
        """Carry out a coroutine where the sampler is asked."""
        return await asyncio.wrap_future(await self.sampler.call(partial(begin, coroutine)))

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
            goes_on = len(transcript.ids) > 0
            request = Request(ids, call, seed, is_greedy, name, goes_on, pictures=prompt.pictures)
            [completion] = yield self.sampler.ask([request])
            transcript.sampled(completion)
            call = next_call(program, transcript)
        delimiter, budget = program.delimiter, program.thought_tokens
        if (search := self._budgets.beams) is None:
            return [as_rollout(prompt.token_ids, transcript, delimiter, budget, prompt.pictures)]
        assert delimiter is not None, "beams follow a thought"
        beams = search.begin(transcript, delimiter)
        for _ in range(search.num_tokens):
            before = [*prompt.token_ids, *transcript.ids]
            requests = [Request([*before, *beam.ids], search.call, seed, False, name, True) for beam in beams]
            beams = search.extended(beams, (yield self.sampler.ask(requests)))
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
            completions = yield self.sampler.ask(requests)
            for k, call, completion in zip(left, calls, completions, strict=True):
                if call.num_scored <= len(completion.prompt_logp):
                    found[k] = completion.prompt_logp[-call.num_scored :]
        return [found[k] for k in range(len(texts))]

    async def score(self, texts: Sequence[tuple[Sequence[int], int]]) -> list[Sequence[float]]:
        """The log-probs of the last tokens of each text, at temperature 1. An engine that does nothing else empties its
        prefix cache first.

        Args:
            texts: the tokens, and how many of them are scored, at least 1.
        """
        nobody = AnswerCall(-1, GroupRequest(0, Prompt("", (), ""), 0, ()), range(0), None, None)
        return await asyncio.wrap_future(await self.sampler.begin(nobody, lambda: begin(self._score(texts))))

    async def cancel(self, ticket: int) -> None:
        """End the answers of a group. Its call of `answer`, if it is running, ends with an error."""
        if self._episodes is not None:
            self._episodes.cancel(ticket)
        await self.sampler.cancel(ticket)

    @property
    def alive(self) -> bool:
        """Whether the engine works, its ranks included."""
        return self.sampler.alive

    def failure(self) -> str:
        """Why the engine does not work; empty if it does, or if nobody knows."""
        return self.sampler.failure()

    def close(self) -> None:
        """End the processes of the engine."""
        self.sampler.close()


def require_finite(prompt: Prompt, samples: Samples) -> None:
    """The trainer looks at answers that it trains on; a group whose answers all have the same reward is none of them.

    Raises:
        ValueError: a sampled token has a log-prob that is not finite.
    """
    for _, tokens in samples:
        bad = np.flatnonzero(~np.isfinite(tokens.logp_rollout) & tokens.action_mask)
        if bad.size:
            raise ValueError(
                f"prompt {prompt.uid}: the engine gave token {tokens.ids[bad[0]]} the log-prob "
                f"{tokens.logp_rollout[bad[0]]} (weights of version {tokens.version[bad[0]]}): the model's numbers are "
                "not finite there; look at the weights of this version, or at the engine's kernels and GPU"
            )


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
