"""Hugging Face folders in and out."""

from __future__ import annotations

import json
import math
import shutil

import cover
import pytest
import torch
from safetensors.torch import load_file, save_file
from scenarios import Layout

from megatron_rl.commands import hf_to_megatron, megatron_to_hf
from megatron_rl.types import Mesh

EXPORTED = [
    (Mesh(), "tied"),
    (Mesh(tensor=4), "untied"),
    (Mesh(tensor=2, context=2), "tied"),
    (Mesh(tensor=2, pipeline=2, virtual=2), "untied"),
    (Mesh(tensor=2, pipeline=2, virtual=2), "tied"),
]


@pytest.mark.parametrize("mesh, ties", cover.essential(EXPORTED, EXPORTED[-1]), ids=str)
def test_export_after_load_gives_the_same_bits(request, trainers, tmp_path, mesh, ties):
    source = request.getfixturevalue("tied_model_folder" if ties == "tied" else "model_folder")
    target = tmp_path / "export"
    trainers.run("export", mesh.world_size, folder=source, layout=Layout(mesh), target=target)
    before, after = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (target / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


BEGUN = (Mesh(tensor=2), Mesh(pipeline=2, virtual=2), Mesh(data=2))


@pytest.mark.parametrize("mesh", cover.essential(BEGUN, Mesh(pipeline=2, virtual=2)), ids=str)
def test_a_run_begins_with_the_weights_of_megatrons_form(trainers, tied_model_folder, tmp_path, mesh):
    """That of the converter, and a checkpoint that another mesh has written."""
    opened, layout = tmp_path / "open", Layout(mesh)
    hf_to_megatron.main([str(tied_model_folder), str(opened)])
    of_run = dict(folder=tied_model_folder, layout=Layout(Mesh(tensor=2)), checkpoint=tmp_path / "step")
    trainers.run("save_at_once", 2, **of_run)
    expected = load_file(tied_model_folder / "model.safetensors")
    for name, weights in (("from_open", opened), ("from_step", tmp_path / "step")):
        target = tmp_path / name
        trainers.run("export", 2, folder=opened / "hf", layout=layout, target=target, weights=weights)
        got = load_file(target / "model.safetensors")
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[key], expected[key]) for key in expected)
        assert (target / "tokenizer.json").read_text() == (tied_model_folder / "tokenizer.json").read_text()


def test_fp8_in_blocks_is_loaded_with_the_bits_of_the_converter(trainers, model_folder, tmp_path):
    """The blocks are so small that the ranks' cuts lie inside them."""
    folder, tensors = tmp_path / "fp8", load_file(model_folder / "model.safetensors")
    shutil.copytree(model_folder, folder)
    for name, tensor in list(tensors.items()):
        if tensor.ndim == 2 and "layers" in name:
            tensors[name] = (tensor * 100).to(torch.float8_e4m3fn)
            rows, columns = tensor.shape
            tensors[f"{name}_scale_inv"] = torch.rand(-(-rows // 7), -(-columns // 5))
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "weight_block_size": [7, 5]}}
    (folder / "config.json").write_text(json.dumps(config))
    megatron_to_hf.main([str(folder), str(tmp_path / "expected"), "--dtype", "bfloat16"])
    layout = Layout(Mesh(tensor=2), dtype="bfloat16")
    trainers.run("export", 2, folder=folder, layout=layout, target=tmp_path / "got")
    got, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("got", "expected"))
    assert got.keys() == expected.keys() and len(got) < len(tensors)
    assert all(torch.equal(got[name], expected[name]) for name in got)
    assert "quantization_config" not in json.loads((tmp_path / "got" / "config.json").read_text())


def test_weights_that_are_damaged_or_of_another_model_are_refused_on_all_ranks(
    trainers, model_folder, deep_model_folder, tmp_path
):
    opened = tmp_path / "open"
    hf_to_megatron.main([str(model_folder), str(opened)])
    files = json.loads((opened / "manifest.json").read_text())["files"]
    file, tensors = next((opened / name, entry["tensors"]) for name, entry in files.items() if entry.get("tensors"))
    content = bytearray(file.read_bytes())
    content[next(iter(tensors.values()))["start"]] ^= 1
    file.write_bytes(content)
    infinite = shutil.copytree(model_folder, tmp_path / "infinite")
    tensors = load_file(infinite / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"][-1, 0] = math.inf  # on the last rank alone
    save_file(tensors, infinite / "model.safetensors")
    of_numbers = "model.layers.1.self_attn.q_proj.weight.* has numbers that are not finite"
    for weights, message in (
        (opened, file.name),
        (deep_model_folder, "holds a qwen3 of other sizes than"),
        (infinite, of_numbers),
    ):
        arguments = dict(folder=model_folder, layout=Layout(Mesh(tensor=2)), target=tmp_path / "x", weights=weights)
        with pytest.raises(AssertionError, match=message):
            trainers.run("export", 2, **arguments)


@pytest.mark.deep
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
