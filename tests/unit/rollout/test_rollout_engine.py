"""The real engine gets weights from real trainer processes over the bridge. All tests here share one engine, which the
last one ends."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import changed
from tiny_references import reference_logp
from tiny_trainers import NUM_TOKENS, SPECIAL
from transformers import AutoModelForCausalLM

from megatron_rl.config.policy import ModelConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.rollout.backend import EngineSpec
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.vllm_sampler import VllmSampler
from megatron_rl.types import Mesh, Prompt

FORBIDDEN = SPECIAL.index("<unk>")
LONG = 150
"""A prompt of this length is longer than vLLM's largest cache block, so that its prefix is cached."""


@pytest.fixture(scope="module")
def stage(make_stage, folders):
    return make_stage(
        folders[0],
        Mesh(tensor=2),
        max_prompt_tokens=160,
        max_response_tokens=24,
        sampling={"temperature": 0.7, "forbid": ["<unk>"]},
    )


@pytest.fixture(scope="module")
def references(folders):
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]


def prompts(count: int = 6) -> list[Prompt]:
    random = np.random.default_rng(0)
    sizes = [LONG, 3, 7, 12, 5, 1, 20, 30][:count]
    return [Prompt(f"row {n}", tuple(random.integers(5, 21, n).tolist()), "") for n in sizes]


def largest_difference(model, groups, temperature: float) -> float:
    worst = 0.0
    for group in groups:
        for _, tokens in group:
            expected = reference_logp(model, tokens.ids, temperature, [FORBIDDEN])
            worst = max(worst, np.abs(expected - tokens.logp_rollout)[tokens.action_mask].max())
    return worst


def flat(groups) -> list[tuple[list[int], list[float]]]:
    return [(tokens.ids.tolist(), tokens.logp_rollout.tolist()) for group in groups for _, tokens in group]


def test_an_engine_without_weights_answers_nothing(stage):
    with pytest.raises(ValueError, match="holds no whole set of weights; push first"):
        stage.run(stage.generate(prompts(), 1, 0, seed=0))


@pytest.mark.parametrize(
    ("num_layers", "ffn_size", "message"),
    [
        (3, 96, "expects a parameter model.layers.2.input_layernorm.weight"),
        (1, 96, r"engine 0, rank 0: parameter model.layers.1.\S+ .* is covered by no rule"),
        (2, 80, r"parameter model.layers.0.mlp.gate_up_proj.weight is \(192, 64\)"),
    ],
)
def test_a_parameter_that_the_plan_does_not_write_is_named(stage, num_layers, ffn_size, message):
    setup = stage.trainers.setup
    shape = changed(replace(setup.shape, layers=setup.shape.layers[:1] * num_layers), mlp={"size": ffn_size})
    other = replace(setup, shape=shape)
    with pytest.raises(ValueError, match=message):
        stage.run(stage.engine.weights.init_transfer({"setup": other.as_dict(), "engine": 0}))


def test_an_engine_of_another_dtype_is_refused(stage):
    other = replace(stage.trainers.setup, dtype="bfloat16")
    with pytest.raises(ValueError, match="float32.*bfloat16"):
        stage.run(stage.engine.weights.init_transfer({"setup": other.as_dict(), "engine": 0}))
    stage.rejoin()


def test_log_probs_are_those_of_the_pushed_model(stage, folders, references):
    """They are at the sampling temperature and over the full distribution, although older weights cached the prefix."""
    for version, (folder, model, other) in enumerate(zip(folders, references, references[::-1], strict=True)):
        received, sent = stage.push(folder, version)
        written = 4 * sum(parameter.numel() for parameter in model.parameters())
        assert sum(metrics["bytes"] for metrics in sent) == written and received["seconds"] > 0
        groups = stage.run(stage.generate(prompts(), 4, version, seed=3))
        # Both sides compute two layers in fp32 and round logits at 1e-6 relative; log-probs go down to -12.
        assert largest_difference(model, groups, 0.7) < 1e-5
        assert largest_difference(other, groups, 0.7) > 1
        assert all((tokens.version[tokens.action_mask] == version).all() for g in groups for _, tokens in g)


def test_samples_are_what_they_say(stage, folders):
    asked = prompts()
    groups = stage.run(stage.generate(asked, 64, stage.load(folders[0]), seed=0))
    finishes, sampled = set(), set()
    for prompt, group in zip(asked, groups, strict=True):
        assert len(group) == 64
        for sample, tokens in group:
            size = len(prompt.token_ids)
            assert tuple(tokens.ids[:size]) == prompt.token_ids and tokens.routes is None
            assert tokens.action_mask.tolist() == [False] * size + [True] * sample.num_actions
            response = tokens.ids[size:].tolist()
            assert sample.num_thought_tokens == (response.index(3) if 3 in response else 0)
            assert 1 not in response[:-1], "nothing follows the end of an answer"
            assert sample.finish == ("stop" if response[-1] == 1 else "length")
            assert sample.finish == "stop" or len(response) == 24
            finishes.add(sample.finish)
            sampled |= set(response)
    assert finishes == {"stop", "length"}
    assert sampled == set(range(NUM_TOKENS)) - {FORBIDDEN}, "all tokens but one, and none that the tokenizer lacks"


def test_same_seed_and_weights_same_answers(stage, folders):
    """The answers are equal to the bit, whatever was generated in between; another seed gives other answers."""
    stage.push(folders[0], 3)
    first = flat(stage.run(stage.generate(prompts(), 4, 3, seed=11)))
    other = flat(stage.run(stage.generate(prompts()[::-1], 2, 3, seed=12)))
    stage.push(folders[1], 4)
    stage.run(stage.generate(prompts(), 4, 4, seed=11))
    stage.push(folders[0], 5)
    assert flat(stage.run(stage.generate(prompts(), 4, 5, seed=11))) == first
    assert flat(stage.run(stage.generate(prompts()[::-1], 2, 5, seed=11))) != other
    different = len({tuple(ids) for ids, _ in first})
    assert different >= len(first) - 2, "samples of a prompt are drawn independently; short ones may be equal"
    rest = flat(stage.run(stage.generate(prompts()[3:], 4, 5, seed=11, first=3)))
    same = sum(a == b for (a, _), (b, _) in zip(rest, first[12:], strict=True))
    assert same >= len(rest) - 2, "the number of engines changes no answer but by rounding"


def test_bad_prompts_are_named(stage, folders):
    stage.push(folders[0], 7)
    for ids, message in [
        ((5,) * 161, "prompt gsm8k:3 has 161 tokens, but rollout.max_prompt_tokens is 160"),
        ((), "prompt gsm8k:3 has 0 tokens"),
        ((5, 40), "prompt gsm8k:3 holds the id 40, outside the model's vocabulary of 40"),
        ((5, -1), "prompt gsm8k:3 holds the id -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            stage.run(stage.generate([*prompts(), Prompt("gsm8k:3", ids, "")], 2, 7, seed=0))
    with pytest.raises(ValueError, match="version 8.*version 7"):
        stage.run(stage.generate(prompts(), 2, 8, seed=0))


def test_numbers_that_are_not_finite_are_named_before_any_reward(stage, folders, tmp_path):
    """Groups whose answers have the same reward never reach the trainer, which would find the NaN."""
    broken = shutil.copytree(folders[0], tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    stage.push(broken, 8)
    with pytest.raises(ValueError, match=r"prompt row 150: .* log-prob nan \(weights of version 8\)"):
        stage.run(stage.generate(prompts(1), 1, 8, seed=0))


def test_a_push_of_another_version_fails_on_both_sides_and_leaves_no_weights(stage, folders):
    stage.trainers.begin_push(folders[0], 9)
    with pytest.raises(RuntimeError, match="version 8.*rank 0 pushed version 9"):
        stage.run(stage.engine.weights.receive(8))
    errors = stage.trainers.end_push()
    assert all(isinstance(error, RuntimeError) for error in errors)
    assert any("expected 8" in str(error) for error in errors)  # the others see the engine hang up
    with pytest.raises(ValueError, match="holds no whole set of weights"):
        stage.run(stage.generate(prompts(), 2, 8, seed=0))
    stage.rejoin()
    stage.push(folders[0], 10)
    assert stage.run(stage.generate(prompts(1), 1, 10, seed=0))


def test_a_trainer_that_dies_is_an_error_not_a_hang_and_others_take_its_place(stage, folders):
    stage.trainers.processes[1].kill()
    stage.trainers.processes[1].join()
    with pytest.raises(RuntimeError):
        stage.run(stage.engine.weights.receive(11))
    with pytest.raises(ValueError, match="holds no whole set of weights"):
        stage.run(stage.generate(prompts(), 2, 11, seed=0))
    stage.restart_trainers()
    assert stage.run(stage.generate(prompts(1), 1, stage.load(folders[0]), seed=0))


def engine(folder, **rollout) -> Engine:
    sizes = {"max_prompt_tokens": 8, "max_response_tokens": 8} | rollout
    config = RolloutConfig(prompts_per_step=1, samples_per_prompt=1, **sizes)
    return Engine(EngineSpec(ModelConfig(path=folder, dtype="float32"), config, seed=0), VllmSampler)


def test_more_tokens_than_positions_are_refused(folders):
    with pytest.raises(ValueError, match="257 exceeds the 256"):
        engine(folders[0], max_response_tokens=249)


def test_vllms_refusal_of_a_configuration_is_told_in_its_own_words(stage, folders):
    """`stage` restores the environment that starting an engine changes."""
    refused = engine(folders[0], vllm={"kv_cache_dtype": "misspelt"})
    with pytest.raises(ValueError, match="^vLLM refuses the configuration: .*'fp8'"):
        asyncio.run(refused.start())
    refused.close()


def test_a_step_that_fails_ends_all_that_is_waited_for(stage, folders, monkeypatch):
    """It is the last test, because it ends the engine."""
    version = stage.load(folders[0])

    def fails():
        raise OSError("the device is gone")

    monkeypatch.setattr(stage.engine.sampler._thread.engine, "step", fails)
    for _ in range(2):  # while it generates, and afterwards
        with pytest.raises(RuntimeError, match="^a step of vLLM failed: the device is gone$"):
            stage.run(stage.generate(prompts(1), 4, version, seed=0))
    assert not stage.engine.alive
    stage.close()
