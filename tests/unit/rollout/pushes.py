"""Pushes at chosen moments of a generation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def moment(engine, reached: Callable[[list[tuple[int, int]]], bool]) -> asyncio.Event:
    """An event that is set when `reached` is true of the (prompt tokens, sampled tokens) of the unfinished requests."""
    processor, event, loop = engine.sampler._thread.engine.output_processor, asyncio.Event(), asyncio.get_running_loop()
    original = processor.process_outputs

    def watch(*args, **kwargs):
        outputs = original(*args, **kwargs)
        states = processor.request_states.values()
        if reached([(state.prompt_len, state.detokenizer.num_output_tokens()) for state in states]):
            loop.call_soon_threadsafe(event.set)
            processor.process_outputs = original
        return outputs

    processor.process_outputs = watch
    return event


def sampled(count: int) -> Callable[[list[tuple[int, int]]], bool]:
    return lambda requests: any(num_sampled >= count for _, num_sampled in requests)


def with_push(stage, asked, num_samples: int, version: int, reached, receive_as: int, also=None):
    """Generate with `version`, and receive weights as soon as `reached` is true.

    Returns:
        The answers, the number of requests that ran at that moment, and the results of `receive` and `also`. An error
        takes the place of a result.
    """

    async def both():
        event = moment(stage.engine, reached)
        answers = asyncio.create_task(stage.generate(asked, num_samples, version, seed=7))
        await event.wait()
        running = stage.engine.sampler._thread.engine.get_num_unfinished_requests()
        received = await asyncio.gather(stage.engine.weights.receive(receive_as), return_exceptions=True)
        others = [await also()] if also else []
        return (*await asyncio.gather(answers, return_exceptions=True), running, *received, *others)

    return stage.run(both())


def flat(groups):
    return [answer for group in groups for answer in group]
