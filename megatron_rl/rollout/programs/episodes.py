"""The answers of several turns that an engine carries out: each goes on alone, because an environment that is slow must
not hold up the others.

Invariants (tests/unit/rollout): the first turns of a group begin together and in a fixed order; nothing of an answer
goes on after its group was cancelled or its call has ended.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

from megatron_rl.rollout.program import NEXT_CALL, Call, Completion, Program, Request, Samples
from megatron_rl.rollout.programs.played import SampledTurn
from megatron_rl.rollout.programs.turns import Ask as AskTurn
from megatron_rl.rollout.programs.turns import TurnProgram, Turns
from megatron_rl.types import Picture, Prompt

Result = TypeVar("Result")


ProgramOf = Callable[[Prompt, int, int | None], Program]
"""The program of a turn, see `Budgets.of`."""


class EpisodeRequest(NamedTuple):
    """Answers to one prompt that an engine is asked for."""

    ticket: int
    """See `Engine.answer`."""
    prompt: Prompt
    samples: range
    """The numbers of the answers within the group."""
    seed: int
    """The seed of the group's first answer; answer i has this seed + i."""
    is_greedy: bool
    program: ProgramOf


Begin = Callable[[Sequence[Request], bool], Awaitable[list[Future[Completion]]]]
"""Begins the first requests of a group, and returns their future completions. If the second argument is True, no
earlier answer goes on, so that the prefix cache is emptied."""

Ask = Callable[[Request], Awaitable[Completion]]
"""Asks for the next turn of an answer."""


class Answers(Protocol):
    """Carries out answers that are more than the calls of a program."""

    async def answers(self, asked: EpisodeRequest, begin: Begin) -> Samples:
        """The answers, without the rewards of their passages. See `Engine.answer`."""
        ...

    def cancel(self, ticket: int) -> None:
        """End the answers of a group."""


MakeAnswers = Callable[[Ask], Answers]
"""Makes them for an engine."""


class Plays:
    """The answers that are carried out, by the tickets of their groups."""

    def __init__(self) -> None:
        self._tasks: defaultdict[int, set[asyncio.Task[Any]]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._tasks)

    async def carry_out(self, ticket: int, plays: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
        """The results of all answers of a group, which are carried out side by side.

        Raises:
            RuntimeError: the group was cancelled.
        """
        tasks = [asyncio.ensure_future(play) for play in plays]
        self._tasks[ticket].update(tasks)
        try:
            return await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            raise RuntimeError("the group was cancelled") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks[ticket].difference_update(tasks)
            if not self._tasks[ticket]:
                del self._tasks[ticket]

    def cancel(self, ticket: int) -> None:
        for task in self._tasks.get(ticket, ()):
            task.cancel()


async def played_again(play: Callable[[], Awaitable[Samples]], retries: int) -> Samples:
    """An answer, which begins again if its environment has failed."""
    samples, num_failed = await play(), 0
    while num_failed < retries and any(sample.episode and sample.episode.fault for sample, _ in samples):
        samples, num_failed = await play(), num_failed + 1
    return [
        (replace(sample, episode=sample.episode and replace(sample.episode, num_failed=num_failed)), tokens)
        for sample, tokens in samples
    ]


class Episodes:
    """Answers of several turns.

    Args:
        turns: carries out one answer.
    """

    def __init__(self, turns: Turns, ask: Ask) -> None:
        self._turns, self._ask = turns, ask
        self._plays = Plays()

    async def answers(self, asked: EpisodeRequest, begin: Begin) -> Samples:
        """See `Answers`."""
        ticket, prompt, samples, seed, is_greedy, program = asked
        programs: list[TurnProgram] = [
            lambda before, left, sample=sample: program(before, sample, left)  # type: ignore[misc]
            for sample in samples
        ]
        turns = [] if self._turns.has_objects else [self._turns.begun(prompt, program_of) for program_of in programs]
        requests = [
            Request(prompt.token_ids, Call(1), seed + sample, is_greedy, (ticket, sample), pictures=prompt.pictures)
            for sample in samples
        ]
        now = [
            replace(request, ids=[*prompt.token_ids, *turn.transcript.ids], call=turn.call)
            for request, turn in zip(requests, turns, strict=False)
            if turn.call is not None
        ]
        futures = await begin(now, not self._plays)  # the turns of others go on from the cache
        firsts: list[Any] = [*zip(turns, map(asyncio.wrap_future, futures), strict=True)] or [None] * len(requests)
        plays = [
            played_again(self._plays_of(prompt, program_of, first, request), self._turns.retries)
            for request, program_of, first in zip(requests, programs, firsts, strict=True)
        ]
        return [sample for played in await self._plays.carry_out(ticket, plays) for sample in played]

    def cancel(self, ticket: int) -> None:
        """See `Answers`."""
        self._plays.cancel(ticket)

    def _plays_of(
        self,
        prompt: Prompt,
        program_of: TurnProgram,
        first: tuple[SampledTurn, Awaitable[Completion]] | None,
        request: Request,
    ) -> Callable[[], Awaitable[Samples]]:
        """Plays an answer, each time from its beginning.

        Args:
            first: see `Turns.answer`; it serves the first time.
        """
        ask, left = self._asks(request, first is not None), [] if first is None else [first]

        async def play() -> Samples:
            begun = left.pop() if left else None
            if begun is None and not self._turns.has_objects:
                turn = self._turns.begun(prompt, program_of)
                assert turn.call is not None, "the first time it had a call"
                begun = turn, ask([*prompt.token_ids, *turn.transcript.ids], prompt.pictures, turn.call, 0)
            return await self._turns.answer(prompt, program_of, begun, ask)

        return play

    def _asks(self, request: Request, has_begun: bool) -> AskTurn:
        """Asks for the calls of one answer.

        Args:
            request: its first request.
            has_begun: whether this request has been asked.
        """

        async def ask(ids: list[int], pictures: Sequence[Picture], call: Call, conversation: int) -> Completion:
            nonlocal has_begun
            goes_on, has_begun = has_begun, True
            seed = (request.seed + conversation * NEXT_CALL) % 2**62
            goes = replace(request, ids=ids, pictures=pictures, call=call, seed=seed, goes_on=goes_on)
            return await self._ask(goes)

        return ask
