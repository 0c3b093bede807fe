"""Answers of one engine, as the stream asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path

from megatron_rl.rollout.engine import Engine, Samples
from megatron_rl.types import GroupRequest, Prompt

tickets = count(2**20)


async def answer(
    engine: Engine, ticket: int, number: int, prompt: Prompt, samples: range, earlier: Sequence[Path] = ()
) -> Samples:
    """Answers that begin alone, with whatever weights the engine has, and behind them their continuations."""
    request = GroupRequest(number, prompt, len(samples), (number,))
    own, continuations = await engine.answer(ticket, request, samples, earlier=earlier)
    return [*own, *continuations]


async def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    num_samples: int,
    version: int,
    seed: int,
    purpose: str = "training",
    first: int = 0,
    finished: Callable[[int], object] = lambda number: None,
) -> list[Samples]:
    """The answers of a step, which begin together, and behind those of each prompt their continuations.

    Args:
        first: the number of the step's prompts before these.
        finished: is called with the index of each prompt whose answers are complete.
    """
    sign, batch = 1 if purpose == "training" else -1, (next(tickets), len(prompts))
    calls = [
        engine.answer(
            next(tickets),
            GroupRequest(sign * (i + 1), prompt, num_samples, (seed, first + i), purpose == "baseline"),
            range(num_samples),
            version,
            batch,
        )
        for i, prompt in enumerate(prompts)
    ]

    async def told(number: int, call: Awaitable[tuple[Samples, Samples]]) -> Samples:
        own, continuations = await call
        finished(number)
        return [*own, *continuations]

    groups = await asyncio.gather(*(told(i, call) for i, call in enumerate(calls)), return_exceptions=True)
    for group in groups:
        if isinstance(group, BaseException):
            raise group
    return groups
