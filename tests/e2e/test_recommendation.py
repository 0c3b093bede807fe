"""Thoughts and beams through the whole stack, while engines and trainers work at the same time."""

from __future__ import annotations

import json

import pytest

from megatron_rl.data.saved_rollouts import read_step
from megatron_rl.loop.beams import thoughts_of
from megatron_rl.observe.records import METRICS, read_lines
from megatron_rl.recipes.recommendation.task import CATALOGUE, write_task


@pytest.mark.deep
def test_an_asynchronous_run_trains_on_items_of_the_catalogue(recipe):
    folder = recipe.folder / "runs" / "recommendation"
    write_task(folder / "task")
    changes = ["model.path=runs/recommendation/task/model", "run.steps=2", "rollout.max_lag=1", "rollout.dump=true"]
    smaller = ["policy.parallel.tensor=1", "rollout.prompts_per_step=8", "eval.num_prompts=8", "eval.every=0"]
    run = recipe.run("grpo", "configs/run/recommendation.yaml", *changes, *smaller)
    assert run.returncode == 0, run.stdout + run.stderr
    first, second, last = read_lines(folder / "grpo" / METRICS)
    assert first["mismatch/mean_abs"] < 1e-5, "the second step's answers may be those of older weights"
    for record in (first, second):
        assert record["grad_norm"] > 0 and record["beams/missing"] == record["length/response_cut"] == 0
    assert 0 <= last["eval/recall@2"] <= last["eval/recall@4"] and "eval/pass@4" in last

    vocabulary = json.loads((folder / "task" / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    items = {tuple(vocabulary[token] for token in item.tokens) for item in CATALOGUE}
    saved = read_step(folder / "grpo" / "rollouts", 0)
    assert len(saved.groups) == 8
    for group in saved.groups:
        assert len(thoughts_of(group)) == 4
        for samples in thoughts_of(group):
            ended = samples[0].num_item_tokens == 0
            assert len(samples) == (1 if ended else 4)
        found = [(sample, t.ids[-3:]) for sample, t in zip(group.rollouts, group.payload, strict=True)]
        assert all(tuple(ids.tolist()) in items for sample, ids in found if sample.num_item_tokens)
