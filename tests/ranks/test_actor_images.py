"""Images: the log-probs and the gradient of rows with several and no images are transformers' in every layout."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import cover
import numpy as np
import pytest
import torch
from composites import HEAD, OF_HEADS
from image_models import IMAGE_TOKEN, MODELS, drawing, row, write_model
from random_adapters import write_adapters
from safetensors.torch import load_file, save_file
from scenarios import ALGORITHM, OPTIMIZER, Layout
from shares import TrainSample
from test_actor_experts import as_saved
from test_actor_gradients import numbers_of
from transformers_models import open_model

from megatron_rl.config.policy import LoraConfig, ParallelConfig
from megatron_rl.convert import Options, open_checkpoint, to_hub
from megatron_rl.convert.work import carry_out
from megatron_rl.data.pictures import Pictures
from megatron_rl.models import read_shape
from megatron_rl.models.peft import PREFIX, TENSORS
from megatron_rl.tools.bench.compare_layouts import parse_layout, relative
from megatron_rl.types import Mesh

LAYOUTS = {
    "qwen2_5_vl": ("tp2-cp2", "tp2", "pp2-vpp2", "dp2"),
    "qwen3_vl": ("tp2-cp2", "tp2", "pp2", "cp2", "dp2", "tp2-pp2", "pp2-cp2"),
    "qwen3_vl_moe": ("dp2-ep2", "tp2", "tp2-dp2-ep2", "pp2-cp2"),
    "qwen3_5": ("tp2", "tp2-pp2", "pp2-vpp2", "cp2", "dp2"),
    "qwen3_5_moe": ("tp2-dp2-ep2", "pp2-cp2"),
}
assert LAYOUTS.keys() == MODELS.keys()
TOWERS = ("frozen", "trained")
HEAD_TENSORS = {key: torch.full(extents, 0.5) for key, extents in HEAD.items()}
CASES = [(kind, layout, tower) for kind, layouts in LAYOUTS.items() for layout in layouts for tower in TOWERS]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """(the folder, the rows, the gradient in float64 by transformers, the loss) of each model, of all rows or of the
    first ones, of which one has an image"""
    folders = cache(lambda kind: written(tmp_path_factory.mktemp(kind) / "model", kind))
    return cache(lambda kind, number=None, lora=None: world(folders(kind), kind, number, lora))


def written(folder, kind):
    write_model(folder, kind)
    return folder


def world(folder, kind, number, lora):
    """With adapters the gradient is theirs, by the chain rule from the merged weight W + scale B A."""
    model = open_model(folder, torch.float64, experts_implementation="eager")
    layers = {}
    if lora:
        start = write_adapters(folder.with_name(f"rank{lora.rank}"), folder, lora)
        stored = {
            name.replace("language_model.", ""): one.double().numpy()
            for name, one in load_file(start / TENSORS).items()
        }
        layers = {
            name.removeprefix(PREFIX).removesuffix(".lora_A.weight"): (a, stored[name.replace("_A", "_B")])
            for name, a in stored.items()
            if ".lora_A" in name
        }
        for name, parameter in model.named_parameters():
            for held, weight in as_saved(own_name(name), parameter.detach().numpy(), kind).items():
                if pair := layers.get(held.removesuffix(".weight")):
                    weight += lora.adapters.scale * pair[1] @ pair[0]
    pictures = Pictures(folder, folder / "images")
    one, two = drawing(20, 31, 0), drawing(9, 40, 1)
    parts = [[3, one, 9], [5, 7], [2, one, 4, two, 20], [1, two, two, 6], [30, 12], [9, one, 5]]
    rows = [row(pictures, part, seed) for seed, part in enumerate(parts)]
    rows += [answered(rows[-1], seed) for seed in range(3)]
    rows = rows[:number]
    model.requires_grad_(True)
    num_tokens, loss = sum(int(one.action_mask.sum()) for one in rows), 0.0
    for one in rows:
        ids = torch.from_numpy(one.ids.astype(np.int64))[None]
        images = {}
        if one.pictures:
            patches = np.concatenate([pictures.patches(picture) for picture in one.pictures])
            grids = [[1, picture.num_rows, picture.num_columns] for picture in one.pictures]
            images = dict(pixel_values=torch.from_numpy(patches).double(), image_grid_thw=torch.tensor(grids))
            images["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        logp = model(input_ids=ids, **images).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        loss = loss - logp[torch.from_numpy(one.action_mask[1:])].sum() / num_tokens
    loss.backward()
    gradient = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient |= as_saved(own_name(name), parameter.grad.numpy(), kind)
    if lora:
        of_weights, gradient, scale = gradient, {}, lora.adapters.scale
        for layer, (a, b) in layers.items():
            whole = scale * of_weights[f"{layer}.weight"]
            gradient |= {f"{layer}.lora_A.weight": b.T @ whole, f"{layer}.lora_B.weight": whole @ a.T}
    return folder, rows, gradient, loss.item()


def own_name(name):
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def answered(tokens, seed):
    """Another answer to the same prompt, which both have in common in a row."""
    ids, is_action = tokens.ids.copy(), tokens.action_mask
    ids[is_action] = np.random.default_rng(seed).integers(0, IMAGE_TOKEN, is_action.sum())
    return replace(tokens, ids=ids)


def check(found, expected, tower):
    """The gradient and its norm are those of transformers, of a frozen tower without the tower."""
    _, norm, gradient = found
    wanted = {key: one for key, one in expected.items() if tower == "trained" or not key.startswith("visual.")}
    # One embedding for both ends has one gradient there.
    assert gradient.keys() - wanted.keys() <= {"lm_head.weight"} and wanted.keys() <= gradient.keys()
    for key in wanted:
        assert relative(gradient[key], wanted[key]) < 2e-5, key
    assert norm == pytest.approx(np.sqrt(sum(np.square(one).sum() for one in wanted.values())), rel=2e-5)


@pytest.mark.parametrize(
    ("kind", "tower"), cover.essential([(k, t) for k in LAYOUTS for t in TOWERS], ("qwen3_vl", "frozen"))
)
def test_one_process_has_the_gradient_of_transformers(trainers, worlds, kind, tower):
    folder, rows, expected, loss = worlds(kind)
    (found,) = numbers_of(trainers, folder, rows, ParallelConfig(), 2, vision_tower=tower)
    assert found[0] == pytest.approx(loss, abs=1e-5)
    check(found, expected, tower)


@pytest.mark.parametrize(("kind", "layout", "tower"), cover.essential(CASES, ("qwen3_vl", "tp2-cp2", "trained")))
def test_the_gradient_does_not_depend_on_the_layout(trainers, worlds, kind, layout, tower):
    folder, rows, expected, _ = worlds(kind)
    check(numbers_of(trainers, folder, rows, parse_layout(layout), 2, vision_tower=tower)[0], expected, tower)


@pytest.mark.deep
@pytest.mark.parametrize("layout", ["dp2", "pp2", "cp2", "tp2"])
def test_a_rank_and_a_row_without_an_image_take_part_in_the_reduction(trainers, worlds, layout):
    """Of two rows one has an image."""
    folder, rows, expected, _ = worlds("qwen3_vl", 2)
    check(numbers_of(trainers, folder, rows, parse_layout(layout), 1, vision_tower="trained")[0], expected, "trained")


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "layout"), [("qwen2_5_vl", "tp2"), ("qwen3_vl", "pp2"), ("qwen3_5", "tp2")])
def test_layers_that_are_computed_again_have_the_same_gradient(trainers, worlds, kind, layout):
    folder, rows, expected, _ = worlds(kind)
    found = numbers_of(trainers, folder, rows, parse_layout(layout), 2, "full", vision_tower="trained")
    check(found[0], expected, "trained")


@pytest.mark.deep
@pytest.mark.parametrize("kind", MODELS)
def test_a_trained_tower_is_saved_and_exported_whole(trainers, worlds, tmp_path, kind):
    folder, trained = worlds(kind)[0], dict(vision_tower="trained")
    if kind in OF_HEADS:
        save_file(HEAD_TENSORS, folder / "more.safetensors")
    given = dict(folder=folder, layout=Layout(Mesh(tensor=2, pipeline=2)), **trained)
    trainers.run("save_at_once", 4, checkpoint=tmp_path / "saved", **given)
    one = dict(folder=folder, layout=Layout(), target=tmp_path / "export")
    trainers.run("export", 1, weights=tmp_path / "saved", checkpoint=tmp_path / "saved", **one, **trained)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "export"))
    assert before.keys() == after.keys() and all(torch.equal(after[key], before[key]) for key in before)
    saved = open_checkpoint(tmp_path / "saved")
    frozen = replace(saved, shape=replace(saved.shape, vision=replace(saved.shape.vision, trained=False)))
    for name, source in (("offline", saved), ("with the tower of the model", frozen)):
        carry_out(to_hub(source, Options("float32"), folder), tmp_path / name, 1, lambda _: None)
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == before.keys() and all(torch.equal(found[key], before[key]) for key in before)
        assert open_checkpoint(tmp_path / name).shape.vision == read_shape(folder).vision
    if kind in OF_HEADS:
        kept = one | dict(target=tmp_path / "kept", multi_token="keep")
        trainers.run("export", 1, weights=tmp_path / "saved", checkpoint=tmp_path / "saved", **kept, **trained)
        files = [load_file(path) for path in (tmp_path / "kept").glob("*.safetensors")]
        found = {key: tensor for file in files for key, tensor in file.items()}
        assert found.keys() == before.keys() | HEAD.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in (before | HEAD_TENSORS).items())
        told = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("export", "kept")]
        assert [one["text_config"]["mtp_num_hidden_layers"] for one in told] == [0, 1]
    with pytest.raises(AssertionError, match="has a vision tower that is trained, and policy.vision_tower says other"):
        trainers.run("export", 1, weights=tmp_path / "saved", **one)


LORA = LoraConfig(rank=3, alpha=7)
ADAPTED = [
    *(("qwen2_5_vl", layout) for layout in ("dp1", "tp2-cp2", "pp2")),
    *(("qwen3_vl", layout) for layout in ("dp1", "tp2", "pp2", "cp2", "dp2", "tp2-pp2")),
    *(("qwen3_vl_moe", layout) for layout in ("dp1", "tp2-dp2-ep2")),
    *(("qwen3_5", layout) for layout in ("dp1", "tp2", "pp2-cp2")),
]


@pytest.mark.parametrize(("kind", "layout"), cover.essential(ADAPTED, ("qwen3_vl", "tp2")))
def test_adapters_have_the_gradient_of_pefts_formula(trainers, worlds, kind, layout):
    folder, rows, expected, loss = worlds(kind, lora=LORA)
    lora = LORA.model_copy(update={"start": folder.with_name("rank3")})
    found = numbers_of(trainers, folder, rows, parse_layout(layout), 2, lora=lora)
    assert found[0][0] == pytest.approx(loss, abs=1e-5) or layout != "dp1"
    check(found[0], expected, "frozen")


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "layout"), [("qwen2_5_vl", "tp2"), ("qwen3_vl", "pp2")])
def test_adapters_of_layers_that_are_computed_again_too(trainers, worlds, kind, layout):
    folder, rows, expected, _ = worlds(kind, lora=LORA)
    lora = LORA.model_copy(update={"start": folder.with_name("rank3")})
    check(numbers_of(trainers, folder, rows, parse_layout(layout), 2, "full", lora=lora)[0], expected, "frozen")


@pytest.mark.deep
def test_a_step_without_an_image_moves_a_trained_tower_by_momentum_and_decay(trainers, worlds):
    folder, rows, *_ = worlds("qwen3_vl")
    seen, read = (
        [TrainSample(str(i), row, 1.0, 1.0) for i, row in enumerate(rows) if bool(row.pictures) == has]
        for has in (True, False)
    )
    given = dict(folder=folder, layout=Layout(), algorithm=ALGORITHM, pass_before_update=False, vision_tower="trained")
    [(steps, _)] = trainers.run("train_steps", 1, samples=seen, later=read, num_steps=2, **given)
    [(alone, _)] = trainers.run("train_steps", 1, samples=read, num_steps=1, **given)
    decay = 1 - alone[0][0]["lr"] * OPTIMIZER.weight_decay
    start = load_file(folder / "model.safetensors")
    for name in (name for name in alone[0][1] if name.startswith("visual.")):
        before = start[f"model.{name}"]
        expected = before * decay if before.dim() > 1 else before
        torch.testing.assert_close(alone[0][1][name], expected)
    name = "visual.blocks.0.norm1.weight"  # it has no decay
    assert not torch.equal(steps[1][1][name], steps[0][1][name])


@pytest.mark.deep
def test_tensor_ranks_that_have_the_same_tokens_have_the_same_gradient(trainers, worlds):
    folder, rows, expected, _ = worlds("qwen3_vl")
    parallel = ParallelConfig(tensor=2, sequence=False)
    check(numbers_of(trainers, folder, rows, parallel, 2, vision_tower="trained")[0], expected, "trained")
