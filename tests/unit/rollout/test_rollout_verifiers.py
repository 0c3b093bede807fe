"""The library verifiers plays with the policy, where it is installed: run pytest in an environment that has it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from patience import deadline
from tiny_chat import KEEPS, characters, renderer

from megatron_rl.environments import FORMATS
from megatron_rl.recipes.environment_libraries.verifiers_library import play
from megatron_rl.rollout.program import Completion
from megatron_rl.rollout.programs.conversations import Conversations
from megatron_rl.rollout.programs.endpoint import Endpoint, TurnReading

HERE = Path(__file__).parent


def test_the_library_plays_its_episodes_with_the_policy(monkeypatch):
    """With the real library, and a taskset whose harness asks the model twice."""
    pytest.importorskip("verifiers")
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    tokenizer = characters()
    end = tokenizer.token_to_id("<end>")
    environment = {"taskset": {"id": "echo_for_verifiers"}, "agent": {"runtime": {"type": "subprocess"}}}

    def render(turns, tools, generation):
        return renderer(KEEPS, tools=tools)(turns, generation)

    async def ask(ids, call):
        text = tokenizer.decode(ids, skip_special_tokens=False)
        said = [*tokenizer.encode(str(text.count("<turn>")), add_special_tokens=False).ids, end]
        return Completion(said, [-0.5] * len(said), [3] * len(said), True)

    async def run():
        reading = TurnReading(FORMATS["hermes"], "", lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
        endpoint = Endpoint("127.0.0.1", reading, 500, {})
        await endpoint.start()
        held = [Conversations(render, tokenizer, ["<end>"]) for _ in range(2)]
        urls = [endpoint.open(one, ask)[1] for one in held]
        try:
            tasks = [{"prompt": "a", "answer": "4"}, {"prompt": "b", "answer": "5"}]
            plays = [play({"task": task}, url, environment) for task, url in zip(tasks, urls, strict=True)]
            wrong = play({"task": {"prompt": "c"}}, urls[0], environment)
            return await asyncio.gather(*plays, wrong, return_exceptions=True), held
        finally:
            await endpoint.close()

    (*rewards, wrong), held = asyncio.run(asyncio.wait_for(run(), deadline(120)))
    assert rewards == [1.0, 0.0] and "ValidationError" in str(wrong)
    for one in held:
        [(_, transcript, path)] = one.transcripts()
        assert len(path) == 2 and sum(transcript.is_action) == 4
