"""Another engine in the place of vLLM, through the same stream and verifiers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.data.saved_rollouts import read_step


@pytest.mark.deep
def test_an_engine_of_ones_own_answers_in_the_place_of_vllm(recipe, task):
    shutil.copy(Path(__file__).parents[1] / "transformers_engine.py", recipe.folder)
    run = recipe.run(
        "generate",
        "configs/run/tiny_grpo.yaml",
        f"model.path={task}/model",
        f"data.train={task}/train.jsonl",
        "rollout.backend=transformers_engine.py:TransformersEngine",
        "rollout.num_engines=2",
        "rollout.prompts_per_step=3",
        "rollout.samples_per_prompt=4",
        "rollout.max_response_tokens=8",
        *("--steps", "1", "--out", "rollouts"),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    step = read_step(recipe.folder / "rollouts", 0)
    assert [len(group.rollouts) for group in step.groups] == [4, 4, 4]
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32).eval()
    answers = set()
    for group in step.groups:
        for rollout, tokens in zip(group.rollouts, group.payload, strict=True):
            assert rollout.verdict.score in (0.0, 1.0) and rollout.length == len(tokens.ids)
            with torch.no_grad():
                logp = model(torch.tensor(tokens.ids[None]).long()).logits[0].log_softmax(-1)
            expected = logp[np.arange(len(tokens.ids) - 1), tokens.ids[1:]].numpy()
            got = tokens.logp_rollout[1:]
            # Both are forward passes in fp32; one sees the answer token by token.
            assert abs(got - expected)[tokens.action_mask[1:]].max() < 1e-4
            answers.add(tuple(tokens.ids.tolist()))
    assert len(answers) > 6, "each answer has its own seed"


def test_a_backend_that_does_not_exist_is_told_before_anything_starts(run_here, task):
    run = run_here(
        "grpo",
        "configs/run/tiny_grpo.yaml",
        f"model.path={task}/model",
        f"data.train={task}/train.jsonl",
        "rollout.backend=transformers_engine:Misspelt",
    )
    assert run.returncode == 1 and "rollout.backend" in run.stdout and "Misspelt" in run.stdout
