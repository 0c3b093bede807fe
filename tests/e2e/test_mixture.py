"""The real loop with a mixture of experts, whose trainer replays the engines' choices and trains a multi-token head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.data.journal import read_journal
from megatron_rl.loop.checkpoints import find_checkpoints
from megatron_rl.observe.records import METRICS, read_lines
from megatron_rl.processes import descendants

LAST = "model.layers.2."
"""What the names of the head's tensors begin with."""
COPIES = {LAST + "embed_tokens.weight": "model.embed_tokens.weight", LAST + "shared_head.head.weight": "lm_head.weight"}


@pytest.fixture
def glm(task, tmp_path) -> Path:
    """A random GLM-4.5 with the demo's tokenizer, as it is published: two layers, and a head, which has the third."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    folder, hidden = tmp_path / "glm", 128
    shutil.copytree(task / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    dense = json.loads((folder / "config.json").read_text())
    sizes = {key: value for key, value in dense.items() if key not in ("architectures", "model_type", "layer_types")}
    sizes |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 0}
    torch.manual_seed(0)
    Glm4MoeForCausalLM(Glm4MoeConfig(**(sizes | {"num_hidden_layers": 3, "use_qk_norm": True}))).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    norms = {f"{LAST}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors |= norms | {copy: tensors[name].clone() for copy, name in COPIES.items()}
    tensors[LAST + "eh_proj.weight"] = 0.02 * torch.randn(hidden, 2 * hidden)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def arguments(task: Path, glm: Path, steps: int) -> list[str]:
    return [
        "grpo",
        "configs/run/tiny_grpo.yaml",
        "run.name=mixture",
        f"run.steps={steps}",
        f"model.path={glm}",
        f"data.train={task}/train.jsonl",
        "data.eval=null",
        "policy.parallel={tensor: 1, data: 2, expert: 2}",
        "policy.routing_replay=true",
        "policy.multi_token=train",
        "policy.load_balancing_loss=0.01",
        "rollout.max_lag=1",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        "rollout.max_response_tokens=32",
        "rewards=[{kind: function, path: 'rewards:share_of_digits'}]",
        "checkpoint.every=1",
    ]


@pytest.mark.deep
@pytest.mark.deadline(600)
def test_engines_draft_with_the_head_that_the_run_trains(recipe, task, glm):
    drafts = ["policy.routing_replay=false", "rollout.speculative={kind: multi_token, tokens: 2}"]
    run = recipe.run(*arguments(task, glm, 3), *drafts)
    assert run.returncode == 0, run.stdout + run.stderr
    begun = load_file(glm / "model.safetensors")
    trained = [one for one in read_lines(recipe.folder / "runs/mixture" / METRICS)[:-1] if "loss" in one]
    assert len(trained) == 3
    for record in trained:
        assert record["sync/bytes"] == sum(x.nbytes for name, x in begun.items() if name not in COPIES)
        assert record.get("mismatch/mean_abs", 0) < 1e-4
    assert all(0 < record["rollout/accepted"] < record["rollout/drafted"] for record in trained[1:])


@pytest.mark.deep
@pytest.mark.deadline(900)
def test_a_run_that_was_killed_replays_the_choices_in_its_journal_and_trains_the_head(recipe, task, glm):
    folder = recipe.folder / "runs" / "mixture"
    run = recipe.start(*arguments(task, glm, 1000))
    recipe.wait_until(run, lambda: len(find_checkpoints(folder / "checkpoints")) > 1)
    for process in [psutil.Process(run.pid), *descendants(psutil.Process(run.pid))]:
        process.kill()
    run.wait()
    begun = load_file(glm / "model.safetensors")
    groups = read_journal(folder / "journal").values()
    assert groups and all(len(t.routes) == len(t.ids) - 1 for group in groups for t in group.payload)

    last = max(find_checkpoints(folder / "checkpoints")) + 2
    resumed = recipe.run(*arguments(task, glm, last), "--resume", "auto")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    trained = [record for record in read_lines(folder / METRICS)[:-1] if "loss" in record]
    assert len(trained) >= last - 1
    for record in trained:
        # Each sample has about 40 tokens, of which the last one has no choice.
        assert 0.9 < record["routing/replayed"] < 1 and record["routing/differing"] < 0.5
        assert 1 <= record["experts/load_mean"] <= record["experts/load/max"] <= 8 / 2
        assert record["experts/auxiliary_loss"] > 0 and np.isfinite(record["loss"])
        assert record.get("mismatch/mean_abs", 0) < 1e-4  # of the tokens that this step's weights sampled, if any
    assert "mismatch/mean_abs" in trained[0] and trained[0]["routing/differing"] < 1e-3

    losses = [record["multi_token/loss"] for record in trained]
    assert losses == pytest.approx([np.log(21)] * len(losses), rel=0.02), "of 21 tokens, which are equally likely"
    assert all(0 <= record["multi_token/accuracy"] < 0.5 for record in trained)
    assert trained[0]["sync/bytes"] == sum(x.nbytes for name, x in begun.items() if not name.startswith(LAST))

    exported = load_file(folder / "hf/model.safetensors")
    assert exported.keys() == begun.keys()
    assert all(torch.equal(exported[copy], exported[name]) for copy, name in COPIES.items())
    still = {name for name in begun if name.startswith(LAST) and torch.equal(begun[name], exported[name])}
    assert still == {LAST + "mlp.gate.e_score_correction_bias"}, "it is not trained"
    assert json.loads((folder / "hf/config.json").read_text())["num_nextn_predict_layers"] == 1
