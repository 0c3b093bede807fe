"""What the preflight says of images: where rows have them, and what a run with them cannot do."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
from image_models import PROCESSOR, drawing, write_model
from safetensors.torch import load_file, save_file

from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig, SftRunConfig
from megatron_rl.models import FAMILIES, obstacle_to_fused_layers, read_shape
from megatron_rl.models.peft import config_of
from megatron_rl.preflight.images import faults_of_images
from megatron_rl.preflight.rows import faults_of_rows
from megatron_rl.preflight.tokenizer_files import TokenizerFiles
from megatron_rl.types import Adapters, Mesh


def run_of(folder, **changes) -> GrpoRunConfig:
    given = {
        "run": {"name": "x", "steps": 1, "folder": folder / "runs"},
        "model": {"path": folder / "model", "dtype": "float32"},
        "data": {"train": folder / "rows"},
        "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_prompt_tokens": 64, "max_response_tokens": 8},
        "balance": {"max_tokens_per_microbatch": 96},
        "cluster": {"device": "cpu"},
    }
    for path, value in changes.items():
        section, _, key = path.partition("__")
        given[section] = given.get(section, {}) | {key: value}
    return validate(GrpoRunConfig, given)


def test_images_are_beside_the_files_of_a_folder_and_nothing_is_kept(tmp_path):
    write_model(tmp_path / "model")
    part = tmp_path / "rows" / "part"
    part.mkdir(parents=True)
    drawing(8, 8, 0).save(part / "a.png")
    row = {"messages": [{"role": "user", "content": "<image>?"}], "images": ["a.png"], "ground_truth": "1"}
    (part / "rows.jsonl").write_text(json.dumps(row))
    files = TokenizerFiles(tmp_path / "model")
    assert faults_of_rows(run_of(tmp_path), files, lambda note: None) == []
    assert not (tmp_path / "runs").exists()
    (part / "a.png").unlink()
    [told] = faults_of_rows(run_of(tmp_path), files, lambda note: None)
    assert "part/rows.jsonl:1: column `images`, image 1: the image" in told and "cannot be read: No such file" in told


@pytest.mark.parametrize(
    ("text", "size", "told"),
    [
        ("<image>?", (64, 64), "the prompt has 37 tokens, rollout.max_prompt_tokens is 36"),
        ("<image>?<|image_pad|>", (8, 8), "wrote 2 image tokens for 1 images"),
        ("<image>?", (1, 400), "one side is 400 times as long as the other"),
        ("<image>?", None, "an image of 100 bytes cannot be read"),
    ],
)
def test_prompts_are_measured_with_their_images(tmp_path, text, size, told):
    write_model(tmp_path / "model")
    data = BytesIO()
    drawing(*(size or (20, 20)), 0).save(data, "png")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.png").write_bytes(data.getvalue() if size else data.getvalue()[:100])
    row = {"messages": [{"role": "user", "content": text}], "images": ["a.png"], "ground_truth": "1"}
    (tmp_path / "rows" / "rows.jsonl").write_text(json.dumps(row))
    run = run_of(tmp_path, rollout__max_prompt_tokens=36)
    [found] = faults_of_rows(run, TokenizerFiles(tmp_path / "model"), lambda note: None)
    assert told in found


def test_the_file_that_says_how_images_are_cut_fits_the_tower(tmp_path):
    write_model(tmp_path / "model")
    shape, path = read_shape(tmp_path / "model"), tmp_path / "model" / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"patch_size": 99}))
    [told] = faults_of_images(run_of(tmp_path), shape)
    assert f"{path}: patch_size is 99, and the model's tower has 4; copy" in told
    for name, value in (("merge_size", 4), ("temporal_patch_size", None)):
        path.write_text(json.dumps(PROCESSOR | {name: value or 2}))
        [told] = faults_of_images(run_of(tmp_path), shape)
        assert f"{path}: {name} is {value or 2}, and the model's tower has" in told
    path.write_text("not json")
    [told] = faults_of_images(run_of(tmp_path), shape)
    assert told.startswith(f"{path}: Expecting value")
    path.unlink()
    [told] = faults_of_images(run_of(tmp_path), shape)
    assert f"{path} is missing" in told


def test_a_frozen_tower_has_its_weights_in_the_folder_of_the_model(tmp_path):
    write_model(tmp_path / "model")
    shape, files = read_shape(tmp_path / "model"), tmp_path / "model" / "model.safetensors"
    text = {name: tensor for name, tensor in load_file(files).items() if ".visual." not in name}
    save_file(text, files)
    [told] = faults_of_images(run_of(tmp_path), shape)
    assert "has no weights of its vision tower, which a checkpoint leaves out if it is frozen" in told


def test_rows_of_a_model_whose_sizes_alone_are_known_may_have_images(tmp_path):
    (tmp_path / "rows").mkdir()
    drawing(64, 64, 0).save(tmp_path / "rows" / "a.png")
    row = {"messages": [{"role": "user", "content": "<image>?"}], "images": ["a.png"], "ground_truth": "1"}
    (tmp_path / "rows" / "rows.jsonl").write_text(json.dumps(row))
    run = run_of(tmp_path, model__path=Path("models/Qwen2.5-VL-32B-Instruct"))
    assert faults_of_rows(run, None, lambda note: None) == []


def test_a_tower_is_not_trained_by_rows_without_images(tmp_path):
    write_model(tmp_path / "model")
    given = {
        "run": {"name": "x", "steps": 1},
        "model": {"path": tmp_path / "model", "dtype": "float32"},
        "policy": {"vision_tower": "trained"},
        "sft": {"rows": "rows"},
        "cluster": {"device": "cpu"},
    }
    [told] = faults_of_images(validate(SftRunConfig, given), read_shape(tmp_path / "model"))
    assert told.startswith("policy.vision_tower trained and a model that sees images")


def test_what_images_cannot_do_is_named_by_key(tmp_path):
    write_model(tmp_path / "model")
    shape = read_shape(tmp_path / "model")
    assert faults_of_images(run_of(tmp_path), shape) == []
    [told] = faults_of_images(run_of(tmp_path, rollout__speculative={}), shape)
    assert told.startswith("rollout.speculative and a model that sees images (qwen3_vl)")
    assert faults_of_images(run_of(tmp_path, policy__lora={}), shape) == []
    [told] = faults_of_images(run_of(tmp_path, policy__lora={}, policy__vision_tower="trained"), shape)
    assert told.startswith("policy.lora and a model that sees images (qwen3_vl)") and "policy.vision_tower" in told
    [told] = faults_of_images(run_of(tmp_path, policy__multi_token="train"), shape)
    assert told.startswith("policy.multi_token train and") and "set it to keep or drop" in told
    assert obstacle_to_fused_layers(shape, 2) is None
    names = config_of(replace(shape, adapters=Adapters(4, 8.0)), "a")
    assert json.loads(names)["exclude_modules"] == ".*visual\\..*", "as PEFT matches whole names"
    with pytest.raises(ValueError, match="adds to the outputs of the first 2 layers, .* has 1; give it more"):
        FAMILIES[shape.family].check_mesh(shape, Mesh(pipeline=4))
    FAMILIES[shape.family].check_mesh(shape, Mesh(pipeline=2))
    odd = replace(shape, vision=replace(shape.vision, tower=(("visual.blocks.0.mlp.linear_fc2.weight", (4, 6)),)))
    with pytest.raises(ValueError, match="6 does not divide into 4 .*rollout.parallel.tensor=4.*: it may be 1 or 2"):
        FAMILIES[shape.family].check_engine(odd, 4, False, 1)
    FAMILIES[shape.family].check_engine(odd, 2, False, 1)
