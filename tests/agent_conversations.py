"""Conversations with a model whose tokens are characters, and the server that agents reach it by."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from openai import AsyncOpenAI
from patience import deadline
from tiny_chat import KEEPS, characters, renderer

from megatron_rl.environments import FORMATS
from megatron_rl.rollout.program import Call, Completion
from megatron_rl.rollout.programs.conversations import Conversations
from megatron_rl.rollout.programs.endpoint import Endpoint, TurnReading

TOKENIZER = characters()
END = TOKENIZER.token_to_id("<end>")
VERSION = 3
WITH_CALLS = KEEPS.replace(
    "= m.content",
    "= m.content ~ (m.tool_calls | default([]) | map(attribute='function') | map('tojson') | join)",
)


def render_with(template: str):
    return lambda turns, tools, generation: renderer(template, tools=tools)(turns, generation)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def text_of(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


READING = TurnReading(FORMATS["hermes"], "", text_of)


def completion(text: str, stopped: bool = True) -> Completion:
    ids = [*ids_of(text), *([END] if stopped else [])]
    return Completion(ids, [-0.5] * len(ids), [VERSION] * len(ids), stopped)


def conversations(template: str = KEEPS) -> Conversations:
    return Conversations(render_with(template), TOKENIZER, ["<unk>", "<end>"])


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def say(held: Conversations, turns: list[dict], answer: str, stopped: bool = True, tools=()) -> str:
    """Ask, and answer. Returns the text of the tokens before the answer."""
    asked = held.ask(turns, tools)
    before = text_of(asked.ids)
    held.answered(asked, completion(answer, stopped), assistant(answer))
    return before


def play(agent, *answers: str, stopped: bool = True, template: str = KEEPS, max_tokens: int = 500):
    """What an agent returns that is given the address, and its conversations. The model gives the answers one after the
    other."""
    held, calls, remaining = conversations(template), [], iter(answers)

    async def ask(ids: list[int], call: Call) -> Completion:
        calls.append(call)
        return completion(next(remaining), stopped)

    async def run():
        endpoint = Endpoint(READING, max_tokens, {"temperature": 1.0})
        await endpoint.start()
        line = endpoint.open(held, ask)
        try:
            return await asyncio.wait_for(agent(line.url), deadline(30))
        finally:
            endpoint.end(line)
            await endpoint.close()

    return asyncio.run(run()), held, calls


def client(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=url, api_key="any", max_retries=0)
