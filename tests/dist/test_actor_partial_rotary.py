"""Heads of which a part is rotated: the trainer against transformers' GLM-4.5."""

from __future__ import annotations

import json
from pathlib import Path

import cover
import numpy as np
import pytest
import torch
import transformers
from partial_scenarios import known
from safetensors.torch import load_file
from scenarios import Layout
from test_actor_families import COMMON, LATENT, PLAIN, YARN

from megatron_rl.layout import read_shape
from megatron_rl.types import Mesh

MIXTURE = {key: LATENT[key] for key in ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group")}
SIZES = COMMON | MIXTURE | dict(
    head_dim=16,
    use_qk_norm=True,
    moe_intermediate_size=24,
    n_shared_experts=2,
    first_k_dense_replace=1,
    routed_scaling_factor=1.5,
)  # fmt: skip
MODELS = {
    "half": dict(rope_parameters=PLAIN),
    "quarter": dict(rope_parameters=PLAIN | {"partial_rotary_factor": 0.25}),
    "half_yarn": dict(rope_parameters=YARN),
    "whole": dict(rope_parameters=PLAIN | {"partial_rotary_factor": 1.0}),
}
ROTATED = {"half": 8, "quarter": 4, "half_yarn": 8, "whole": 16}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("partial")
    for name, more in MODELS.items():
        torch.manual_seed(0)
        model = transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**SIZES | more))
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:  # ones would hide what is lost
                parameter.data.uniform_(0.5, 1.5)
            elif parameter_name.endswith("gate.weight"):
                parameter.data.normal_(0, 0.2)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
        model.save_pretrained(root / name)
        (root / name / "tokenizer.json").write_text("{}")
    return {name: root / name for name in MODELS}


LAYOUTS = {
    "tp2": Layout(Mesh(tensor=2)),
    "dp2_ep2": Layout(Mesh(data=2, expert=2)),
}
CASES = [(name, "tp2") for name in MODELS] + [("half", "dp2_ep2")]


@pytest.mark.parametrize("name, layout_name", cover.essential(CASES, ("half", "tp2")))
def test_logits_equal_those_of_transformers(trainers, models, long_samples, name, layout_name):
    layout = LAYOUTS[layout_name]
    with known():
        assert read_shape(models[name]).rotary_dim == ROTATED[name]
    (logits, lengths), *_ = trainers.run(
        "partial_scenarios.logits", 2, folder=models[name], samples=long_samples, layout=layout
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    for sample, start in zip(long_samples, starts, strict=False):
        ids = torch.from_numpy(sample.tokens.ids.astype(np.int64))
        with torch.no_grad():
            expected = model(ids[None]).logits[0].numpy()
        got = logits[start : start + len(ids), : expected.shape[1]]
        np.testing.assert_allclose(got, expected, atol=2e-5)  # fp32 rounding, as for DeepSeek-V3's mixture


@pytest.mark.deep
def test_an_export_rotates_as_much(trainers, models, tmp_path):
    folder, target = models["quarter"], tmp_path / "export"
    trainers.run("partial_scenarios.export", 2, folder=folder, layout=LAYOUTS["dp2_ep2"], target=target)
    before, after = (load_file(path / "model.safetensors") for path in (folder, target))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    rope = json.loads((target / "config.json").read_text())["rope_parameters"]
    assert rope["partial_rotary_factor"] == 0.25
    with known():
        assert read_shape(target) == read_shape(folder)
