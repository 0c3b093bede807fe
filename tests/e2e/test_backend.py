"""Another sampler in the place of vLLM, through the same stream and verifiers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.data.saved_rollouts import read_step
from megatron_rl.rollout.vocabulary import load_tokenizer

SAMPLER = Path(__file__).parents[1] / "transformers_sampler.py"
BACKEND = "rollout.backend=transformers_sampler.py:TransformersSampler"
THOUGHT, ANSWER = 5, 3


@pytest.mark.deep
def test_a_sampler_of_ones_own_answers_in_the_place_of_vllm(recipe, task):
    """Its file knows nothing of budgets."""
    shutil.copy(SAMPLER, recipe.folder)
    run = recipe.run(
        "generate",
        "configs/run/tiny_grpo.yaml",
        f"model.path={task}/model",
        f"data.train={task}/train.jsonl",
        BACKEND,
        "rollout.num_engines=2",
        "rollout.prompts_per_step=3",
        "rollout.samples_per_prompt=4",
        "rollout.max_response_tokens=16",
        f"rollout.thinking={{thought_tokens: {THOUGHT}, response_tokens: {ANSWER}}}",
        'rollout.sampling.forbid=["0"]',
        *("--steps", "1", "--out", "rollouts"),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    step = read_step(recipe.folder / "rollouts", 0)
    assert [len(group.rollouts) for group in step.groups] == [4, 4, 4]
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32).eval()
    vocabulary = load_tokenizer(task / "model").get_vocab()
    closes = vocabulary["</think>"]
    never = sorted({vocabulary["0"], *range(model.config.vocab_size)} - ({*vocabulary.values()} - {vocabulary["0"]}))
    answers, cuts = set(), 0
    for group in step.groups:
        for rollout, tokens in zip(group.rollouts, group.payload, strict=True):
            assert rollout.verdict.score in (0.0, 1.0) and rollout.length == len(tokens.ids)
            response = tokens.ids[rollout.num_prompt_tokens :].tolist()
            assert rollout.num_thought_tokens <= THOUGHT and len(response) <= THOUGHT + 1 + ANSWER
            cuts += rollout.thought_cut and response[THOUGHT] == closes
            assert not {*tokens.ids[tokens.action_mask].tolist()} & {*never}
            with torch.no_grad():
                logits = model(torch.tensor(tokens.ids[None]).long()).logits[0]
            logits[:, never] = -torch.inf
            expected = logits.log_softmax(-1)[np.arange(len(tokens.ids) - 1), tokens.ids[1:]].numpy()
            # Both are forward passes in fp32; one sees the answer token by token.
            assert abs(tokens.logp_rollout[1:] - expected)[tokens.action_mask[1:]].max() < 1e-4
            answers.add(tuple(tokens.ids.tolist()))
    assert cuts > 3 and len(answers) > 6, "each answer has its own seed"


def test_a_backend_that_cannot_do_what_is_asked_is_told_before_anything_starts(recipe, run_here, task):
    shutil.copy(SAMPLER, recipe.folder)
    arguments = ("configs/run/tiny_grpo.yaml", f"model.path={task}/model", f"data.train={task}/train.jsonl")
    run = run_here("grpo", *arguments, "rollout.backend=transformers_sampler:Misspelt")
    assert run.returncode == 1 and "rollout.backend" in run.stdout and "Misspelt" in run.stdout
    keys = ("rollout.quantization=fp8", "rollout.max_lag=2")
    run = run_here("grpo", *arguments, BACKEND, *keys, "--dry-run")
    assert run.returncode == 1
    for key in ("rollout.quantization", "rollout.max_lag", "training"):
        assert f"{key} needs a sampler with the ability" in run.stdout
    run = run_here("generate", *arguments, BACKEND, *keys, "--steps", "1", "--out", "rollouts")
    assert run.returncode == 1 and "rollout.quantization needs a sampler" in run.stdout
    assert "rollout.max_lag needs" not in run.stdout, "engines that answer alone get no weights"
