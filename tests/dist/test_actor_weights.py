"""Hugging Face folders in and out."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from scenarios import Layout

from megatron_rl.types import Mesh


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tensor=4), Mesh(tensor=2, context=2), Mesh(tensor=2, pipeline=2, virtual=2)], ids=str)
def test_export_after_load_gives_the_same_bits(request, trainers, tmp_path, mesh, tied):
    source = request.getfixturevalue("tied_model_folder" if tied else "model_folder")
    target = tmp_path / "export"
    trainers.run("export", mesh.world_size, folder=source, layout=Layout(mesh), target=target)
    before, after = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (target / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_transformers_loads_a_bf16_export(trainers, model_folder, tmp_path):
    from transformers import Qwen3ForCausalLM

    target = tmp_path / "export"
    layout = Layout(Mesh(tensor=2), dtype="bfloat16")
    trainers.run("export", 2, folder=model_folder, layout=layout, target=target)
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    model = Qwen3ForCausalLM.from_pretrained(target, dtype="auto")
    source = load_file(model_folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, source[name].bfloat16()), name
