"""Answers of one engine, as the stream asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path

from megatron_rl.rollout.engine import Samples, VllmEngine
from megatron_rl.types import GroupRequest, Prompt

tickets = count(2**20)


def answer(
    engine: VllmEngine, ticket: int, number: int, prompt: Prompt, samples: range, earlier: Sequence[Path] = ()
) -> Awaitable[Samples]:
    """Answers that begin alone, with whatever weights the engine has."""
    return engine.answer(ticket, GroupRequest(number, prompt, len(samples), (number,)), samples, earlier=earlier)


async def generate(
    engine: VllmEngine,
    prompts: Sequence[Prompt],
    num_samples: int,
    version: int,
    seed: int,
    purpose: str = "training",
    first: int = 0,
    finished: Callable[[int], object] = lambda number: None,
) -> list[Samples]:
    """The answers of a step, which begin together.

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

    async def told(number: int, call: Awaitable[Samples]) -> Samples:
        samples = await call
        finished(number)
        return samples

    groups = await asyncio.gather(*(told(i, call) for i, call in enumerate(calls)), return_exceptions=True)
    for group in groups:
        if isinstance(group, BaseException):
            raise group
    return groups
