"""The experts that the real engine says it chose, against those that transformers chooses; and damage to experts."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from corruptions import flip_a_bit, refused, swap
from test_rollout_in_flight import endless, flat, moment, prompts, sampled, with_push
from tiny_trainers import EXPERTS, write_model
from transformers import AutoModelForCausalLM

from megatron_rl.types import Mesh, Tokens

LONG, STEP, CACHE = 150, 128, 4096
"""A prompt of this length is computed in parts, because a step has fewer tokens, and it is longer than vLLM's largest
cache block, so that its prefix is cached. The last one is the number of tokens in the cache."""
THOUGHT, RESPONSE = 60, 40
THINKING = {"thought_tokens": THOUGHT, "response_tokens": RESPONSE}
TIES = 1e-3
"""In fp32 the scores of two experts are in the same order on both sides unless they are nearly equal, which is rarer
than this. Of other weights' choices most differ."""


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory) -> tuple[Path, Path]:
    """Two models that differ only in their weights. The first of three layers is dense."""
    base, more = tmp_path_factory.mktemp("mixtures"), EXPERTS | {"num_hidden_layers": 3, "mlp_only_layers": [0]}
    return tuple(write_model(base / name, seed, "Qwen3Moe", **more) for name, seed in (("a", 1), ("b", 2)))


@pytest.fixture(scope="module")
def choices(mixtures):
    """The choices of both models for the tokens of a row, each [L, layers with experts, K], sorted."""
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in mixtures]
    seen = []
    for model in models:
        for layer in model.model.layers[1:]:
            layer.mlp.gate.register_forward_hook(lambda module, inputs, output: seen.append(output[2].sort(-1).values))

    @torch.no_grad()
    def of(ids: np.ndarray) -> np.ndarray:
        seen.clear()
        for model in models:
            model(torch.from_numpy(ids.astype(np.int64))[None])
        return torch.stack(seen).unflatten(0, (2, 2)).transpose(1, 2).numpy()

    return of


def share_of_others(answers: list[Tokens], choices) -> float:
    """The share of tokens and layers whose experts are not those of the weights that sampled the answer's last action.
    All tokens but the last one of an answer must have experts; the last one has them if the answer was cut."""
    wrong = total = 0
    for tokens in answers:
        num_routed = len(tokens.routes)
        assert num_routed in (len(tokens.ids) - 1, len(tokens.ids)) and tokens.routes.dtype == np.uint8
        assert tokens.routes.shape[1:] == (3, 2)
        expected = choices(tokens.ids)[tokens.version.max() % 2][:num_routed]
        wrong += (np.sort(tokens.routes[:, 1:], -1) != expected).any(-1).sum()
        total += expected.shape[0] * expected.shape[1]
    assert total > 1000
    return wrong / total


def in_call_two(requests: list[tuple[int, int]]) -> bool:
    return any(num_prompt > THOUGHT and num_sampled >= 4 for num_prompt, num_sampled in requests)


def tokens_of(groups) -> list[Tokens]:
    return [tokens for _, tokens in flat(groups)]


@pytest.fixture(scope="module")
def stage(make_stage, mixtures, tmp_path_factory):
    made = make_stage(
        mixtures[0],
        Mesh(),
        returns_routes=True,
        record=tmp_path_factory.mktemp("record") / "engine.tokens",
        vllm={"max_num_batched_tokens": STEP, "num_gpu_blocks_override": CACHE // 32, "block_size": 32},
        max_sequences=64,
        max_prompt_tokens=LONG,
        max_response_tokens=THOUGHT + RESPONSE + 2,
        delimiter="=?",
        thinking=THINKING,
    )
    return endless(made)


def test_every_token_but_the_last_has_its_experts(stage, mixtures, choices):
    """Samples share the cached prompt, and the second call of each answer begins with what the first one has cached.
    Long prompts are computed in parts."""
    assert stage.engine.sampler._thread.engine.vllm_config.scheduler_config.max_num_batched_tokens == STEP < LONG
    stage.push(mixtures[0], 0)
    groups = stage.run(stage.generate([*prompts(3, 5), *prompts(2, LONG)], 3, 0, seed=3))
    assert share_of_others(tokens_of(groups), choices) < TIES
    other = [replace(tokens, version=np.where(tokens.version < 0, -1, 1)) for tokens in tokens_of(groups)]
    assert share_of_others(other, choices) > 0.5


@pytest.mark.parametrize("reached", [sampled(6), in_call_two], ids=["in call 1", "in call 2"])
def test_after_a_push_the_experts_are_those_of_the_new_weights(stage, mixtures, choices, reached):
    """They recompute the keys and values of the whole answer, so these are what later tokens see."""
    stage.push(mixtures[0], 10)
    stage.trainers.begin_push(mixtures[1], 11)
    groups, running, _ = with_push(stage, prompts(8, 5), 2, 10, reached, 11)
    stage.trainers.end_push()
    answers = tokens_of(groups)
    assert running and sum({10, 11} <= set(tokens.version.tolist()) for tokens in answers) == running
    assert share_of_others(answers, choices) < TIES


@pytest.mark.deep
def test_an_answer_that_goes_on_has_the_experts_of_the_engine_that_ends_it(stage, mixtures, choices):
    """The record has no experts, so the engine computes those of the tokens that were sampled before."""
    path = stage.engine.sampler._progress.path

    async def answer(earlier=()):
        calls = [stage.answer(i, i, prompt, range(2), earlier) for i, prompt in enumerate(prompts(8, 5))]
        return await asyncio.gather(*calls, return_exceptions=True)

    async def interrupted():
        event = moment(stage.engine, sampled(30))
        answers = asyncio.create_task(answer())
        await event.wait()
        with pytest.raises(RuntimeError):
            await stage.engine.weights.receive(29)  # the trainer pushes another version
        await answers

    stage.push(mixtures[0], 20)
    stage.trainers.begin_push(mixtures[1], 21)
    stage.run(interrupted())
    stage.trainers.end_push()
    stage.rejoin()
    stage.push(mixtures[1], 21)
    answers = tokens_of(stage.run(answer([path])))
    assert all({20, 21} <= set(tokens.version.tolist()) for tokens in answers)
    assert share_of_others(answers, choices) < TIES


@pytest.mark.deep
def test_experts_of_answers_that_were_preempted(stage, mixtures, choices, monkeypatch):
    """The queue lets too many requests start."""
    stage.push(mixtures[0], 30)
    requests = stage.engine.sampler._thread.requests
    monkeypatch.setattr(requests._budget, "num_fitting", lambda running, waiting: len(waiting))
    groups = stage.run(stage.generate(prompts(12, 5), 4, 30, seed=1))
    assert requests.num_preempted > 0
    assert share_of_others(tokens_of(groups), choices) < TIES


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("model.layers.1.mlp.experts.routed_experts.w13_weight", swap),
        ("model.layers.0.self_attn.k_norm.weight", flip_a_bit),
    ],
)
def test_damage_to_experts_and_norms_is_named(stage, mixtures, name, how):
    error = refused(stage, mixtures, 0, partial(how, name))
    assert re.match(rf"engine 0, rank 0: {name} .* has changed since version 1 arrived", error), error


@pytest.mark.deep
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_experts_of_an_engine_of_two_ranks(make_own_stage, mixtures, choices, expert_parallel):
    options = dict(
        parallel={"tensor": 2, "expert": 2 if expert_parallel else 1}, max_prompt_tokens=8, max_response_tokens=30
    )
    stage = make_own_stage(mixtures[1], Mesh(), returns_routes=True, **options)
    stage.push(mixtures[1], 1)
    groups = stage.run(stage.generate(prompts(8, 5), 4, 1, seed=1))
    assert share_of_others(tokens_of(groups), choices) < TIES
