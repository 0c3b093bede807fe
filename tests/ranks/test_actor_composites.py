"""Folders of models with a vision tower, as they are published: their text models train, and are pushed and exported,
as those that have a folder of their own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from composites import HEAD, MODELS, OF_HEADS, Made
from patience import deadline
from safetensors.torch import load_file
from scenarios import Layout
from sizes import VOCAB_SIZE
from test_actor_experts import plain_gradient
from test_actor_gradients import numbers_of
from test_layout_families import in_process

from megatron_rl.commands import hf_to_megatron
from megatron_rl.config.policy import ParallelConfig
from megatron_rl.models import FAMILIES, check_parameters, read_shape, vllm_shards
from megatron_rl.tools.bench.compare_layouts import parse_layout, random_rows, relative

pytestmark = pytest.mark.deep
LAYOUTS = {
    **{"qwen3_vl": "tp2-cp2", "qwen3_vl_moe": "tp2-dp2-ep2", "qwen3_5": "tp2-pp2", "qwen3_5_moe": "cp2-ep2"},
    **{"gemma3": "pp2-cp2", "qwen2_5_vl": "tp2-pp2", "kimi_k25": "tp2-ep2-etp1"},
}
assert LAYOUTS.keys() == MODELS.keys()


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The composite and its text model as a distributed checkpoint, by name."""
    root, known = tmp_path_factory.mktemp("composites"), {}

    def of(name: str) -> tuple[Made, Path]:
        if name not in known:
            known[name] = Made(name, root), root / f"{name}_converted"
            assert hf_to_megatron.main([*map(str, (known[name][0].folder, known[name][1])), "--workers", "1"]) == 0
        return known[name]

    return of


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_that_of_the_text_model_alone(trainers, converted, name):
    one, checkpoint = converted(name)
    rows, parallel = random_rows(VOCAB_SIZE, num_rows=8, longest=64, seed=3), parse_layout(LAYOUTS[name])
    alone = numbers_of(trainers, one.alone, rows, parallel, 2)
    found = numbers_of(trainers, checkpoint / "hf", rows, parallel, 2, weights=checkpoint)
    direct = numbers_of(trainers, one.folder, rows, parallel, 2)
    assert all(np.array_equal(tensor, direct[0][2][key]) for key, tensor in found[0][2].items())
    assert [ranks[:2] for ranks in found] == [ranks[:2] for ranks in alone]
    assert found[0][2].keys() == alone[0][2].keys() != set()
    assert all(np.array_equal(tensor, alone[0][2][key]) for key, tensor in found[0][2].items())


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_that_of_the_whole_model_in_transformers(trainers, converted, name):
    one, checkpoint = converted(name)
    rows = random_rows(VOCAB_SIZE, num_rows=8, longest=64, seed=3)
    ((_, _, found),) = numbers_of(
        trainers, checkpoint / "hf", rows, ParallelConfig(), 1, exact=True, weights=checkpoint
    )
    whole = plain_gradient(one.folder, rows, 0.0, 0.0)
    expected = {key.replace("model.language_model.", "model."): gradient for key, gradient in whole.items()}
    assert found.keys() == expected.keys()
    for key in expected:  # its rotations and delta rule are in fp32
        assert relative(found[key], expected[key]) < 2e-5, key


@pytest.mark.parametrize("name", MODELS)
def test_an_export_is_the_folder_of_the_text_model_alone(trainers, converted, tmp_path, name):
    one, checkpoint = converted(name)
    layout, target = Layout(parse_layout(LAYOUTS[name]).mesh), tmp_path / "export"
    given = dict(folder=checkpoint / "hf", weights=checkpoint, layout=layout)
    trainers.run("export", layout.mesh.world_size, target=target, **given)
    exported = load_file(target / "model.safetensors")
    assert exported.keys() == one.tensors.keys()
    assert all(torch.equal(exported[key], tensor) for key, tensor in one.tensors.items())
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == [FAMILIES[read_shape(one.folder).family].vllm_model]
    assert not {"text_config", "vision_config"} & config.keys()
    if name in OF_HEADS:
        trainers.run("export", layout.mesh.world_size, target=tmp_path / "kept", multi_token="keep", **given)
        files = [load_file(path) for path in (tmp_path / "kept").glob("*.safetensors")]
        kept = {key: tensor for file in files for key, tensor in file.items()}
        assert kept.keys() == one.tensors.keys() | HEAD.keys()
        assert all(torch.equal(kept[key], tensor) for key, tensor in (one.tensors | one.head).items())


def test_vllms_class_has_the_names_and_extents_that_are_pushed(converted, tmp_path):
    folders = [converted(name)[1] / "hf" for name in MODELS]
    call = ("vllm_models", "rank_parameters", f"file://{tmp_path}/meeting", 0)
    (found,) = warm.together(in_process, [(*call, [(str(folder), 1, 1, False) for folder in folders])], deadline(240))
    for name, folder, (model, parameters, recording) in zip(MODELS, folders, found, strict=True):
        shape = read_shape(folder)
        shards = vllm_shards(shape, 1, 0)
        assert model == FAMILIES[shape.family].vllm_model
        check_parameters(shards, parameters, name)
        assert set(recording.shards) == set(shards) and len(recording.shards) == len(shards)
