"""The norms of parameters and updates that an update reports, against parameters before and after it; and the norm of
the gradient, by which it is clipped, against an exact sum."""

from __future__ import annotations

import math

import cover
import pytest
import torch
from norm_scenarios import gradient_of
from scenarios import OPTIMIZER, Layout
from test_actor_layouts import ONE_UPDATE, RELATIVE

from megatron_rl.models import FAMILIES, critic_shape, read_shape
from megatron_rl.types import Mesh


def steps_of(trainers, folder, samples, layout: Layout) -> list:
    """(metrics, parameters) of rank 0 after each of three updates with decay, clipping and a warm-up."""
    results = trainers.run(
        "train_steps",
        layout.mesh.world_size,
        folder=folder,
        samples=samples,
        layout=layout,
        algorithm=ONE_UPDATE["dual_clip"],
        pass_before_update=False,
    )
    for steps, _ in results[1:]:
        assert [metrics for metrics, _ in steps] == [metrics for metrics, _ in results[0][0]]
    return results[0][0]


def norm(tensors) -> float:
    return float(torch.cat([tensor.double().flatten() for tensor in tensors]).norm())


def check_norms(steps) -> None:
    """Of a model that is whole on rank 0."""
    for (_, before), (metrics, after) in zip(steps, steps[1:], strict=False):
        assert metrics["param_norm"] == pytest.approx(norm(after.values()), rel=1e-12)  # sums in float64
        # The update is a difference of fp32 numbers of order 1 whose change is 1e-2: 6 digits of the one are 4 of it.
        change = norm(after[name] - before[name] for name in after)
        assert metrics["update_ratio"] * metrics["param_norm"] == pytest.approx(change, rel=1e-4)


@pytest.fixture(scope="module")
def whole(trainers, model_folder, samples):
    return steps_of(trainers, model_folder, samples, Layout())


def test_norms_on_one_rank(whole):
    check_norms(whole)


LAYOUTS = {
    "recompute": Layout(num_microbatches=3, recompute="full"),
    "tp2": Layout(Mesh(tensor=2)),
    "pp2": Layout(Mesh(pipeline=2)),
    "pp2_vpp2": Layout(Mesh(pipeline=2, virtual=2), num_microbatches=2),
    "dp2": Layout(Mesh(data=2)),
    "cp2": Layout(Mesh(context=2)),
    "tp2_dp2": Layout(Mesh(tensor=2, data=2)),
}


@pytest.mark.parametrize("name", cover.essential(LAYOUTS, "tp2_dp2"))
def test_norms_are_those_of_the_whole_model_in_every_layout(trainers, model_folder, samples, whole, name):
    for (metrics, _), (expected, _) in zip(
        steps_of(trainers, model_folder, samples, LAYOUTS[name]), whole, strict=True
    ):
        for key in ("param_norm", "update_ratio"):
            # The updates themselves differ by 5e-5 after three steps (RELATIVE_OF_UPDATE of test_actor_layouts).
            assert metrics[key] == pytest.approx(expected[key], rel=10 * RELATIVE)


@pytest.mark.parametrize("mesh", cover.essential([Mesh(), Mesh(pipeline=2)], Mesh(pipeline=2)), ids=str)
def test_a_tied_embedding_counts_once(trainers, tied_model_folder, samples, mesh):
    steps = steps_of(trainers, tied_model_folder, samples, Layout(mesh))
    if mesh == Mesh():
        return check_norms(steps)
    expected = steps_of(trainers, tied_model_folder, samples, Layout())
    for (metrics, _), (alone, _) in zip(steps, expected, strict=True):
        assert metrics["param_norm"] == pytest.approx(alone["param_norm"], rel=10 * RELATIVE)


OF_EXPERTS = (Mesh(data=2, expert=2), Mesh(tensor=2, data=2, expert=2))


@pytest.mark.parametrize("mesh", cover.essential(OF_EXPERTS, Mesh(data=2, expert=2)), ids=str)
def test_experts_are_counted_once(trainers, folders, samples, mesh):
    alone = steps_of(trainers, folders["qwen3_moe"], samples, Layout())
    check_norms(alone)
    for (metrics, _), (expected, _) in zip(
        steps_of(trainers, folders["qwen3_moe"], samples, Layout(mesh)), alone, strict=True
    ):
        for key in ("param_norm", "update_ratio"):
            assert metrics[key] == pytest.approx(expected[key], rel=10 * RELATIVE)


@pytest.mark.parametrize(
    ("mesh", "dtype", "settings"),
    cover.essential(
        [
            (Mesh(data=2), "bfloat16", {}),
            (Mesh(data=2), "float16", {}),
            (Mesh(tensor=2), "bfloat16", {"offload": True}),
            (Mesh(pipeline=2), "bfloat16", {"moments": "bfloat16"}),
            (Mesh(data=2), "bfloat16", {"rounding": "nearest"}),
            (Mesh(data=2), "float16", {"rounding": "nearest"}),
        ],
        (Mesh(data=2), "bfloat16", {}),
    ),
    ids=str,
)
def test_weights_are_their_copies_with_the_dither_or_to_the_nearest_number(
    trainers, model_folder, mesh, dtype, settings
):
    shape = read_shape(model_folder)
    arguments = dict(folder=model_folder, layout=Layout(mesh, dtype=dtype), settings=settings)
    extents = FAMILIES[shape.family].hf_tensors(shape)
    for total, from_dither, from_nearest in trainers.run(
        "norm_scenarios.rounded_weights", mesh.world_size, extents=extents, **arguments
    ):
        if settings.get("rounding") == "nearest":
            assert from_nearest == 0 < from_dither
        else:
            assert from_dither == 0 and total / 20 < from_nearest < total


@pytest.mark.deep
def test_norms_of_a_bf16_model_are_those_of_its_fp32_copies(trainers, model_folder, samples, whole):
    """bf16 has 8 bits, so gradients are off by 1 %; Adam's steps are of nearly the same size."""
    steps = steps_of(trainers, model_folder, samples, Layout(Mesh(data=2), dtype="bfloat16"))
    for (metrics, _), (expected, _) in zip(steps, whole, strict=True):
        assert metrics["param_norm"] == pytest.approx(expected["param_norm"], rel=0.01)
        assert metrics["update_ratio"] == pytest.approx(expected["update_ratio"], rel=0.1)
        assert "update_changed" not in expected
    for (_, before), (metrics, after) in zip(steps, steps[1:], strict=False):
        changed = [(after[name] != before[name]).flatten() for name in after]
        share = float(torch.cat(changed).double().mean())
        # The weight before the update is computed from the fp32 copy and Adam's moments, with the rounding of fp32.
        assert 0.1 < share < 0.99 and metrics["update_changed"] == pytest.approx(share, abs=1e-3)


TP2, DP2, OFFLOAD = Mesh(tensor=2), Mesh(data=2), {"settings": {"offload": True}}
EXPERTS_WHOLE = Layout(Mesh(tensor=2, data=2, expert=2, expert_tensor=1))
CLIPPED = {
    "qwen3": ("qwen3", Layout(), {}),
    "qwen3_tp2": ("qwen3", Layout(TP2), {}),
    "qwen3_tp2_supervised": ("qwen3", Layout(TP2), {"algorithm": None}),
    "qwen3_tp4_two_kv_heads": ("qwen3", Layout(Mesh(tensor=4)), {}),
    "qwen3_pp2_vpp2_cp2": ("qwen3", Layout(Mesh(pipeline=2, virtual=2, context=2)), {}),
    "qwen3_dp2_bf16": ("qwen3", Layout(DP2, dtype="bfloat16"), {}),
    "qwen3_dp2_offload": ("qwen3", Layout(DP2), OFFLOAD),
    "qwen3_tp2_bf16_offload": ("qwen3", Layout(TP2, dtype="bfloat16"), OFFLOAD),
    "qwen3_critic_tp2_dp2": ("qwen3", Layout(Mesh(tensor=2, data=2)), {"trains_critic": True}),
    "tied": ("tied", Layout(), {}),
    "tied_tp2_pp2": ("tied", Layout(Mesh(tensor=2, pipeline=2)), {}),
    "qwen3_moe": ("qwen3_moe", Layout(), {}),
    "qwen3_moe_cp2_ep2": ("qwen3_moe", Layout(Mesh(context=2, expert=2)), {}),
    "qwen3_moe_tp2_ep2_whole": ("qwen3_moe", Layout(Mesh(tensor=2, expert=2, expert_tensor=1)), {}),
    "qwen3_moe_tp2_dp2_ep2": ("qwen3_moe", Layout(Mesh(tensor=2, data=2, expert=2)), {}),
    "qwen3_moe_tp2_dp2_ep2_whole_offload": ("qwen3_moe", EXPERTS_WHOLE, OFFLOAD),
    "deepseek_v3_pp2_dp2_ep2": ("deepseek_v3", Layout(Mesh(pipeline=2, data=2, expert=2)), {}),
}
ESSENTIAL = ("tied_tp2_pp2", "qwen3_moe_tp2_dp2_ep2_whole_offload")


@pytest.mark.parametrize("name", cover.essential(CLIPPED, *ESSENTIAL))
def test_the_norm_that_clips_is_exact_in_every_layout(trainers, folders, model_folder, tied_model_folder, name):
    model, layout, settings = CLIPPED[name]
    folder = {"qwen3": model_folder, "tied": tied_model_folder}.get(model) or folders[model]
    shape = read_shape(folder)
    family = FAMILIES[shape.family]
    extents = family.hf_tensors(critic_shape(shape) if "trains_critic" in settings else shape)
    squares = [
        math.fsum(gradient_of(name, sizes).astype(float).ravel() ** 2)
        for name, sizes in extents.items()
        if not family.is_float32(name)  # the bias of a router
    ]
    arguments = dict(folder=folder, layout=layout, extents=extents, **settings)
    results = trainers.run("norm_scenarios.clipped_norm", layout.mesh.world_size, **arguments)
    norm = results[0][0]
    assert norm == pytest.approx(math.sqrt(math.fsum(squares)), rel=1e-12)  # float64 adds in another order
    for found, *quotients in results:
        assert found == norm, "every rank reports the same bits"
        # fp32 rounds the factor, and each product.
        assert quotients == pytest.approx([OPTIMIZER.clip_grad / (norm + 1e-6)] * 2, rel=2e-7)
