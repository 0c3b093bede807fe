"""Passages of thoughts are rewarded in the real loop, by the engine that answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.data.saved_rollouts import read_step
from megatron_rl.observe.records import METRICS, read_lines
from megatron_rl.types import UTILITY


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "values", "max_lag", "stages"),
    [
        ("log_probs", "force: '</think>', forced_tokens: 16", 1, 2),
        ("trainer", "force: '</think>', forced_tokens: 16, by: trainer", 0, 1),
    ],
)
def test_passages_are_rewarded(recipe, task, name, values, max_lag, stages):
    """While answers are generated, once by an engine of two pipeline stages, which gets new weights meanwhile; and once
    by the trainer."""
    run = recipe.run(
        "grpo",
        "configs/run/tiny_grpo.yaml",
        f"run.name={name}",
        "run.steps=2",
        f"model.path={task}/model",
        f"data.train={task}/train.jsonl",
        "data.eval=null",
        "policy.parallel.tensor=1",
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=4",
        f"rollout.max_lag={max_lag}",
        f"rollout.parallel.pipeline={stages}",
        "rollout.dump=true",
        "rollout.thinking={thought_tokens: 32, response_tokens: 6}",
        f"rollout.prefix_values={{{values}, markers: [','], min_tokens: 2, max_tokens: 12}}",
        "rewards=[{kind: function, path: 'rewards:share_of_digits'}]",
        "algorithm.adv_estimator={kind: grpo_process, weights: {utility: 0.5}}",
        "checkpoint.every=0",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    folder = recipe.folder / "runs" / name
    records = [record for record in read_lines(folder / METRICS) if "passages/mean" in record]
    assert len(records) == 2
    for step, record in enumerate(records):
        assert record["passages/mean"] > 1 and record["grad_norm"] > 0
        if not record.get("lag/max"):
            assert record["mismatch/mean_abs"] < 1e-5  # both sides compute in fp32
        samples = [sample for group in read_step(folder / "rollouts", step).groups for sample in group.rollouts]
        utilities = [[r.value for r in sample.token_rewards if r.kind == UTILITY] for sample in samples]
        assert record["passages/mean"] == pytest.approx(np.mean([len(own) for own in utilities]))
        assert np.std(sum(utilities, [])) > 1e-4
    if name == "trainer":
        check_values(task / "model", read_step(folder / "rollouts", 0).groups)


def check_values(model_folder, groups) -> None:
    """The utilities are those that transformers' forward passes of the first weights give."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    without_token = torch.tensor(
        [*{*range(model.config.vocab_size)} - {*tokenizer.get_vocab().values()}], dtype=torch.int64
    )

    @torch.no_grad()
    def value(prefix, right) -> float:
        ids = torch.tensor([*prefix, *tokenizer.encode("</think>"), *right])
        logits = model(ids[None, :-1]).logits[0]
        logp = logits.index_fill(1, without_token, -torch.inf).log_softmax(-1)
        return float(logp[range(len(ids) - 1), ids[1:]][-len(right) :].mean())

    for group in groups:
        right = tokenizer.encode(group.prompt.columns["ground_truth"])
        for sample, tokens in zip(group.rollouts, group.payload, strict=True):
            ids, rewards = tokens.ids.tolist(), [r for r in sample.token_rewards if r.kind == UTILITY]
            values = [value(ids[:end], right) for end in (sample.num_prompt_tokens, *(r.position + 1 for r in rewards))]
            # Both sides compute in fp32; values are means of about 4 log-probs near -4.
            assert [r.value for r in rewards] == pytest.approx(np.diff(values).tolist(), abs=1e-5)
