"""A run that begins with a folder as Gemma 3 is published, whose text model stands next to a vision tower."""

from __future__ import annotations

import json
import shutil

import composites
import pytest
from safetensors.torch import load_file

from megatron_rl.observe.records import METRICS, read_lines


@pytest.mark.deep
def test_the_text_model_of_a_folder_with_a_vision_tower_trains_and_is_exported_alone(
    recipe, task, tmp_path, monkeypatch
):
    """Nothing is converted. An engine's log-probs differ from the trainer's by rounding."""
    *classes, sizes, tower = composites.MODELS["gemma3"]
    # vLLM's attention on CPUs has heads of 32 dims, and none of 16
    monkeypatch.setitem(composites.MODELS, "gemma3", (*classes, sizes | {"head_dim": 32}, tower))
    one = composites.Made("gemma3", tmp_path)
    for path in (task / "model").glob("tokenizer*"):
        shutil.copy(path, one.folder)
    run = recipe.run(
        *("grpo", "configs/run/tiny_grpo.yaml", "run.name=tower", "run.steps=2", f"model.path={one.folder}"),
        *(f"data.train={task}/train.jsonl", "data.eval=null", "policy.parallel.tensor=1", "checkpoint.every=0"),
        *("rollout.prompts_per_step=4", "rollout.max_response_tokens=16"),
        "rewards=[{kind: function, path: 'rewards:share_of_digits'}]",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    folder = recipe.folder / "runs" / "tower"
    steps = [record for record in read_lines(folder / METRICS) if "loss" in record]
    assert [step["mismatch/max_abs"] < 1e-4 and step["grad_norm"] > 0 for step in steps] == [True] * 2
    assert load_file(folder / "hf" / "model.safetensors").keys() == one.tensors.keys()
    config = json.loads((folder / "hf" / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"] and not {"text_config", "vision_config"} & config.keys()
