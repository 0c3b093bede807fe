"""Training in float16: gradients in every layout, a loss scale that all ranks share, and what it cannot hold."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import cover
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from scenarios import OPTIMIZER, Layout
from sizes import VOCAB_SIZE

from megatron_rl.config.optimizer import AdamConfig, MuonConfig
from megatron_rl.config.policy import LoraConfig, MegatronConfig, ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.tools.bench.compare_layouts import (
    NUM_MICROBATCHES,
    ONE_PROCESS,
    deal_rows,
    difference,
    parse_layout,
    random_rows,
    too_far,
)
from megatron_rl.types import Mesh

GRADIENTS = [
    *(("qwen3", layout) for layout in ("tp2", "pp2-vpp2", "cp2", "dp2", "tp2-pp2")),
    *(("qwen3_moe", layout) for layout in ("dp2-ep2", "tp2-dp2-ep2")),
    *(("deepseek_v3", "tp2-dp2-ep2"), ("gpt_oss", "tp2-cp2"), ("qwen3_next", "tp2-cp2"), ("olmo2", "tp2")),
    *(("minimax_m2", "tp2-dp2-ep2"), ("gemma3", "tp2-cp2")),
]

LOSSES = dict(load_balancing_loss=4.0, router_z_loss=0.5)
"""So large that they are the larger part of the norm of the gradient."""


@pytest.fixture(scope="module")
def numbers(trainers, folders, model_folder):
    """The numbers of a layout by the name of the model; with experts, also of the auxiliary losses of their routers."""
    rows, known = random_rows(VOCAB_SIZE, num_rows=8, longest=64, seed=3), {}

    def of(name: str, layout: str = "", dtype: str = "float16", exact: bool = False) -> list:
        key = (name, layout, dtype, exact)
        if key not in known:
            folder = model_folder if name == "qwen3" else folders[name]
            parallel = parse_layout(layout) if layout else ParallelConfig()
            scale = MegatronConfig(optimizer={"initial_loss_scale": 2.0**10})  # of qwen3_next 2^16 overflows
            policy = PolicyConfig(parallel=parallel, megatron=scale, **(LOSSES if name == "qwen3_moe" else {}))
            known[key] = trainers.run(
                "one_update",
                parallel.mesh.world_size,
                folder=folder,
                model=ModelConfig(path=folder, dtype=dtype),
                policy=policy,
                shares=deal_rows(folder, parallel, rows, NUM_MICROBATCHES if layout else 1),
                exact=exact,
            )
        return known[key]

    return of


@pytest.mark.parametrize("name, layout", cover.essential(GRADIENTS, ("qwen3_moe", "dp2-ep2")))
def test_every_layout_is_as_near_to_float64_as_one_process(numbers, name, layout):
    exact = numbers(name, dtype="float32", exact=True)[0]
    one = difference(ONE_PROCESS, numbers(name)[0], exact)
    assert one.norm_difference < 0.01, "a term without the loss scale would be as good as missing"
    results = numbers(name, layout)
    assert {result[:2] for result in results} == {results[0][:2]}, "every rank reports the same bits"
    assert too_far(difference(layout, results[0], exact), one) == []


@pytest.mark.deep
def test_float16_is_nearer_to_float64_than_bfloat16(numbers):
    """It has three more bits, so rounding is an eighth."""
    exact = numbers("qwen3", dtype="float32", exact=True)[0]
    far, near = (difference("", numbers("qwen3", dtype=dtype)[0], exact) for dtype in ("bfloat16", "float16"))
    assert near.gradient_difference < far.gradient_difference / 4


def scaled(layout: Layout, initial: float, **settings) -> Layout:
    settings = {"initial_loss_scale": initial, **settings}
    return replace(layout, dtype="float16", megatron=MegatronConfig(optimizer=settings))


LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(Mesh(tensor=2), num_microbatches=2),
    "dp2": Layout(Mesh(data=2), num_microbatches=2),
    "pp2": Layout(Mesh(pipeline=2, virtual=2), num_microbatches=2),
    "cp2": Layout(Mesh(context=2), num_microbatches=2),
}
FIRST = 2.0**12


@pytest.mark.parametrize("name", cover.essential(LAYOUTS, "dp2"))
def test_an_update_that_overflows_is_computed_again_with_half_the_scale(
    trainers, model_folder, samples, tmp_path, name
):
    """Update 0 overflows, and halves the scale. All updates are, to the bit, those of a run that begins with half the
    scale. A run that is resumed, or that continues a mirror, between two overflows continues to the bit."""
    arguments = dict(folder=model_folder, samples=samples)
    layout, half, size = (
        scaled(LAYOUTS[name], FIRST, loss_scale_window=2),
        scaled(LAYOUTS[name], FIRST / 2, loss_scale_window=2),
        LAYOUTS[name].mesh.world_size,
    )
    repeated = trainers.run("float16_scenarios.updates", size, layout=layout, steps=(2, 1), spoilt=(0,), **arguments)
    plain = trainers.run("float16_scenarios.updates", size, layout=half, steps=(2, 1), **arguments)
    assert len({str(metrics) for metrics, *_ in repeated}) == 1, "all ranks report the same"
    for (metrics, changed, state, made), (expected, _, expected_state, _) in zip(repeated, plain, strict=True):
        assert [update["update_repeated"] for update in metrics] == [1, 0, 0] and made == 3 and all(changed)
        assert [update["loss_scale"] for update in metrics] == [FIRST / 2, FIRST / 2, FIRST], "two in a row double it"
        for one, other in zip(metrics, expected, strict=True):
            assert one | {"update_repeated": 0} == other
        assert state.keys() == expected_state.keys()
        assert all(np.array_equal(state[key], expected_state[key]) for key in state)
    saved = dict(arguments, layout=layout, checkpoint=tmp_path / "after 2")
    whole = trainers.run("float16_scenarios.updates", size, steps=(2, 4), spoilt=(0, 3), **saved)
    resumed = trainers.run("float16_scenarios.updates", size, steps=(4,), spoilt=(1,), resumed=True, **saved)
    for (metrics, _, state, _), (again, _, same, _) in zip(whole, resumed, strict=True):
        for key in ("loss_scale", "grad_norm", "update_repeated"):
            assert [update[key] for update in again] == [update[key] for update in metrics[2:]]
        assert all(np.array_equal(state[key], same[key]) for key in state) and state.keys() == same.keys()


@pytest.mark.parametrize("name", cover.essential(["one", "tp2", "pp2", "dp2"], "pp2"))
def test_an_overflow_at_the_lowest_scale_names_the_layer(trainers, model_folder, samples, name):
    """The gradient of layer 1's output is infinite, and so are those of the layers 0 and 1, and of the embedding."""
    layout, size = scaled(LAYOUTS[name], FIRST, min_loss_scale=FIRST), LAYOUTS[name].mesh.world_size
    results = trainers.run(
        "float16_scenarios.refused", size, folder=model_folder, samples=samples, layout=layout, spoilt=True
    )
    assert len({error for error, _ in results}) == 1
    for error, changed in results:
        assert "gradients overflow float16 first in model.layers.1." in error and "the loss scale 4096" in error
        assert "prompt0#0" in error and "set model.dtype to bfloat16 or float32" in error and not changed


@pytest.mark.deep
def test_the_scale_falls_from_2_to_the_40_within_one_update(trainers, model_folder, samples):
    layout = scaled(LAYOUTS["tp2"], 2.0**40)
    found = trainers.run(
        "float16_scenarios.updates", 2, folder=model_folder, samples=samples, layout=layout, steps=(4,)
    )
    for metrics, _, _, made in found:
        repeats = [update["update_repeated"] for update in metrics]
        assert 3 < repeats[0] < 7 and made == 4 and repeats[-1] == 0
        assert metrics[0]["loss_scale"] == 2.0 ** (41 - 2 ** repeats[0]), "1, 2, 4, 8 and so on halvings"
        assert metrics[-1]["loss"] < metrics[0]["loss"]


def changed_model(folder: Path, target: Path, name: str, factor: float) -> Path:
    shutil.copytree(folder, target)
    weights = load_file(folder / "model.safetensors")
    weights[name] = weights[name] * factor
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("name", cover.essential(["one", "tp2", "pp2"], "tp2"))
def test_an_activation_above_65504_is_an_error_with_its_layer(trainers, model_folder, samples, tmp_path, name):
    folder = changed_model(model_folder, tmp_path / "model", "model.layers.2.mlp.down_proj.weight", 5e4)
    layout, size = replace(LAYOUTS[name], dtype="float16"), LAYOUTS[name].mesh.world_size
    results = trainers.run("float16_scenarios.refused", size, folder=folder, samples=samples, layout=layout)
    assert len({error for error, _ in results}) == 1
    for error, changed in results:
        assert "has a number that is not finite" in error and "prompt" in error and not changed
        assert "the output of layer 2 is the first that is not finite" in error


def test_a_weight_above_65504_is_an_error_with_its_name(trainers, model_folder, samples, tmp_path):
    """When it is read, and when an update makes it so large."""
    name, layout = "model.layers.3.mlp.up_proj.weight", Layout(Mesh(pipeline=2), dtype="float16")
    given = dict(folder=model_folder, weights=changed_model(model_folder, tmp_path / "model", name, 5e5))
    for error in trainers.run("float16_scenarios.unloadable", 2, layout=layout, **given):
        assert name in error and "not finite in float16" in error and "65,504" in error
    assert trainers.run("float16_scenarios.unloadable", 2, layout=LAYOUTS["pp2"], **given) == ["no error"] * 2
    optimizer = AdamConfig(lr=1e5)
    for error, changed in trainers.run(
        "float16_scenarios.refused", 2, folder=model_folder, samples=samples, layout=layout, optimizer=optimizer
    ):
        assert "has a weight above 65,504" in error and "model." in error and changed


KINDS = {
    "muon": dict(optimizer=MuonConfig(lr=1e-3)),
    "offload": dict(optimizer=OPTIMIZER.model_copy(update={"offload": True})),
    "short moments": dict(optimizer=OPTIMIZER.model_copy(update={"moments": "bfloat16"})),
    "lora": dict(lora=LoraConfig(rank=3, alpha=7)),
    "lora fp8": dict(lora=LoraConfig(rank=3, alpha=7, base="fp8")),
    "recompute": dict(),
}


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_training_repeats_and_resumes(trainers, model_folder, samples, tmp_path, kind):
    layout = scaled(Layout(Mesh(tensor=2, data=2), num_microbatches=2), FIRST)
    layout = replace(layout, recompute="full" if kind == "recompute" else "none")
    arguments = dict(
        folder=model_folder, samples=samples, layout=layout, checkpoint=tmp_path / "after 2", **KINDS[kind]
    )
    whole = trainers.run("float16_scenarios.updates", 4, steps=(2, 3), spoilt=(0, 3), **arguments)
    resumed = trainers.run("float16_scenarios.updates", 4, steps=(3,), spoilt=(1,), resumed=True, **arguments)
    for (metrics, changed, state, made), (again, _, same, _) in zip(whole, resumed, strict=True):
        assert all(changed) and made == 5 and [update["update_repeated"] for update in metrics] == [1, 0, 0, 1, 0]
        assert metrics[2:] == again and state.keys() == same.keys()
        assert all(np.array_equal(state[key], same[key]) for key in state)
        assert metrics[-1]["loss"] < metrics[1]["loss"]
