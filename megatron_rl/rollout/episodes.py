"""The answers of several turns that an engine carries out: each goes on alone, because an environment that is slow must
not hold up the others.

Invariants (tests/unit/rollout): the first turns of a call begin together and in a fixed order; nothing of an answer
goes on after its group was cancelled or its call has ended.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.rollout.program import Call, Completion, Transcript
from megatron_rl.rollout.request_queue import Request
from megatron_rl.rollout.turns import Turns
from megatron_rl.types import Prompt, Sample, Tokens

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

Samples = list[tuple[Sample, Tokens]]


Completed = Callable[["RequestOutput"], Completion]
"""Takes what an answer needs from vLLM's output."""


class Start(Protocol):
    """Begin requests; see `VllmEngine._begin`."""

    def __call__(
        self, requests: Sequence[Request], version: int | None = None, is_first: bool = False
    ) -> Awaitable[list[Future[RequestOutput]]]: ...


class Answers(Protocol):
    """Carries out answers that are more than the calls of a program."""

    def groups(
        self, prompts: Sequence[Prompt], num_samples: int, seeds: Sequence[int], version: int, greedy: bool
    ) -> AsyncIterator[tuple[int, Samples]]:
        """See `VllmEngine.generate_as_finished`.

        Args:
            seeds: those of all answers.
        """
        ...

    async def answers(self, ticket: int, prompt: Prompt, samples: range, seed: int) -> Samples:
        """See `VllmEngine.answer`.

        Args:
            seed: that of the group's first answer.
        """
        ...

    def cancel(self, ticket: int) -> None:
        """End the answers of a group."""


MakeAnswers = Callable[[Start, Completed], Answers]
"""Makes them for an engine, from what begins its requests and what takes an answer from vLLM's output."""


class Episodes:
    """Answers of several turns.

    Args:
        turns: carries out one answer.
    """

    def __init__(self, turns: Turns, start: Start, completion: Completed) -> None:
        self._turns, self._start, self._completion = turns, start, completion
        self._playing: defaultdict[int, set[asyncio.Task[Any]]] = defaultdict(set)
        """The answers of `answers`, by the tickets of their groups."""

    async def groups(
        self, prompts: Sequence[Prompt], num_samples: int, seeds: Sequence[int], version: int, greedy: bool
    ) -> AsyncIterator[tuple[int, Samples]]:
        """See `Answers`."""
        asked = [prompt for prompt in prompts for _ in range(num_samples)]
        requests = [
            Request(prompt.token_ids, self._turns.first_call, seed, greedy)
            for prompt, seed in zip(asked, seeds, strict=True)
        ]
        futures = await self._start(requests, version, is_first=True)

        async def group(number: int) -> tuple[int, Samples]:
            own = range(number * num_samples, (number + 1) * num_samples)
            return number, await asyncio.gather(*(self._play(asked[i], requests[i], futures[i]) for i in own))

        groups = [asyncio.ensure_future(group(number)) for number in range(len(prompts))]
        try:
            for finished in asyncio.as_completed(groups):
                yield await finished
        finally:
            await _end(groups)

    async def answers(self, ticket: int, prompt: Prompt, samples: range, seed: int) -> Samples:
        """See `Answers`."""
        requests = [
            Request(prompt.token_ids, self._turns.first_call, seed + sample, answer=(ticket, sample))
            for sample in samples
        ]
        futures = await self._start(requests, is_first=not self._playing)  # the others' turns go on from the cache
        plays = [self._play(prompt, request, future) for request, future in zip(requests, futures, strict=True)]
        tasks = [asyncio.ensure_future(play) for play in plays]
        self._playing[ticket].update(tasks)
        try:
            return await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            raise RuntimeError("the group was cancelled") from None
        finally:
            await _end(tasks)
            self._playing[ticket].difference_update(tasks)
            if not self._playing[ticket]:
                del self._playing[ticket]

    def cancel(self, ticket: int) -> None:
        """End the answers of a group."""
        for task in self._playing.get(ticket, ()):
            task.cancel()

    async def _play(self, prompt: Prompt, request: Request, future: Future[RequestOutput]) -> tuple[Sample, Tokens]:
        """Carry out one answer.

        Args:
            request: its first request, which is under way.
        """

        async def completed(future: Future[RequestOutput]) -> Completion:
            return self._completion(await asyncio.wrap_future(future))

        async def ask(transcript: Transcript, call: Call) -> Completion:
            ids = [*prompt.token_ids, *transcript.ids]
            [future] = await self._start([replace(request, ids=ids, call=call, goes_on=True)])
            return await completed(future)

        return await self._turns.answer(prompt, completed(future), ask)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what is still under way, and wait for its end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
