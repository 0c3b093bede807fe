"""An engine over the smallest sampler, which writes only `sample`: transformers on the CPU."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from functools import partial

import asking
import pytest
import torch
from tiny_references import reference_logp
from tiny_trainers import NUM_TOKENS
from tiny_turns import turns_of
from transformers import AutoModelForCausalLM
from transformers_sampler import TransformersSampler

from megatron_rl.config.policy import ModelConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.rollout.backend import EngineSpec
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.programs.episodes import Episodes
from megatron_rl.types import Prompt

ENDS, CLOSES, EQUALS, FORBIDDEN = 1, 3, 16, 7
NO_TOKEN = range(NUM_TOKENS, 40)
"""The rows of the model without a token."""
THOUGHT, ANSWER = 6, 4


@pytest.fixture(scope="module")
def model(folders):
    return AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()


@contextmanager
def engine(folder, make_answers=lambda rollout: None, **rollout):
    sizes = {"max_prompt_tokens": 8, "max_response_tokens": 16, "sampling": {"temperature": 1.5, "forbid": ["2"]}}
    config = RolloutConfig(prompts_per_step=1, samples_per_prompt=1, **sizes | rollout)
    spec = EngineSpec(
        ModelConfig(path=folder, dtype="float32"),
        config,
        seed=0,
        loads_weights=True,
        make_answers=make_answers(config),
    )
    made = Engine(spec, TransformersSampler)
    asyncio.run(made.start())
    yield made
    made.close()


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"row {i}", (5 + i, 6, EQUALS), "", {"num_turns": 3}) for i in range(count)]


def generate(made: Engine, *arguments, **keys):
    return asyncio.run(asking.generate(made, *arguments, **keys))


def test_budgets_are_kept_and_no_forbidden_token_is_sampled(folders, model):
    with engine(folders[0], thinking={"thought_tokens": THOUGHT, "response_tokens": ANSWER}) as made:
        groups = generate(made, prompts(4), 6, 0, seed=1)
        again = generate(made, prompts(4), 6, 0, seed=1)
    cuts, sampled = set(), set()
    for sample, tokens in sum(groups, []):
        response, forced = tokens.ids[3:].tolist(), (~tokens.action_mask[3:]).nonzero()[0].tolist()
        assert sample.num_thought_tokens <= THOUGHT and sample.thought_cut == bool(forced)
        if forced:
            assert forced == [THOUGHT] and response[THOUGHT] == CLOSES, "the closing is forced after the budget"
        if CLOSES in response:
            assert len(response) - response.index(CLOSES) - 1 <= ANSWER
        else:
            assert response[-1] == ENDS and len(response) <= THOUGHT
        sampled |= set(tokens.ids[tokens.action_mask].tolist())
        expected = reference_logp(model, tokens.ids, 1.5, [FORBIDDEN])
        # Both sides are forward passes in fp32; one sees the answer token by token.
        assert abs(expected - tokens.logp_rollout)[tokens.action_mask].max() < 1e-4
        assert set(tokens.version[tokens.action_mask]) == {0}
        cuts.add(sample.thought_cut)
    assert cuts == {True, False} and len(sampled) > 12
    assert not sampled & {FORBIDDEN, *NO_TOKEN}
    assert [tokens.ids.tolist() for _, tokens in sum(again, [])] == [
        tokens.ids.tolist() for _, tokens in sum(groups, [])
    ]
    with engine(folders[0], sampling={"temperature": 1.5}) as made:
        free = generate(made, prompts(4), 6, 0, seed=1)
    assert any(FORBIDDEN in tokens.ids[3:] for _, tokens in sum(free, [])), "it is sampled unless it is forbidden"


def test_greedy_answers_have_the_most_probable_tokens_and_the_budget(folders, model):
    with engine(folders[0], thinking={"thought_tokens": THOUGHT, "response_tokens": ANSWER}) as made:
        groups = generate(made, prompts(4), 1, 0, seed=1, purpose="baseline")
    for [(_, tokens)] in groups:
        with torch.no_grad():
            logits = model(torch.tensor(tokens.ids[None]).long()).logits[0]
        logits[:, [FORBIDDEN, *NO_TOKEN]] = -torch.inf
        best, actions = logits.argmax(-1)[:-1].numpy(), tokens.action_mask[1:]
        assert actions.any() and (best == tokens.ids[1:])[actions].all()


def test_answers_of_several_turns_need_no_more(folders):
    environment = {"kind": "class", "path": "unused:Unused", "max_turns": 3}
    answers = lambda rollout: partial(Episodes, turns_of(folders[0], [])(rollout))  # noqa: E731
    sizes = {"delimiter": "", "max_response_tokens": 60, "sampling": {"temperature": 2.0}}
    with engine(folders[0], answers, environment=environment, **sizes) as made:
        groups = generate(made, prompts(3), 4, 0, seed=1)
    assert max(sample.episode.num_turns for sample, _ in sum(groups, [])) > 1
    assert not any(sample.episode.fault for sample, _ in sum(groups, []))


def test_another_version_is_refused_and_a_cancelled_group_ends(folders):
    with engine(folders[0]) as made:
        with pytest.raises(ValueError, match="version 1 was asked for, but the engine holds 0"):
            generate(made, prompts(1), 1, 1, seed=0)

        async def cancelled():
            tasks = [asyncio.create_task(asking.answer(made, i, i, prompts(2)[i], range(8))) for i in range(2)]
            while not made.sampler._running:
                await asyncio.sleep(0)
            await made.cancel(0)
            return await asyncio.gather(*tasks, return_exceptions=True)

        first, second = asyncio.run(cancelled())
        assert str(first) == "the group was cancelled" and len(second) == 8
        assert not made.sampler._running
