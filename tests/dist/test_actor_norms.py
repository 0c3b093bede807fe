"""The norms of parameters and updates that an update reports, against parameters before and after it."""

from __future__ import annotations

import cover
import pytest
import torch
from scenarios import Layout
from test_actor_layouts import ONE_UPDATE, RELATIVE

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
        # The update is a difference of fp32 numbers of order 1 whose change is 1e-2: 6 digits of the one are 4 of it.
        assert metrics["param_norm"] == pytest.approx(norm(after.values()), rel=1e-6)
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


@pytest.mark.deep
def test_norms_of_a_bf16_model_are_those_of_its_fp32_copies(trainers, model_folder, samples, whole):
    """bf16 has 8 bits, so gradients are off by 1 %; Adam's steps are of nearly the same size."""
    steps = steps_of(trainers, model_folder, samples, Layout(Mesh(data=2), dtype="bfloat16"))
    for (metrics, _), (expected, _) in zip(steps, whole, strict=True):
        assert metrics["param_norm"] == pytest.approx(expected["param_norm"], rel=0.01)
        assert metrics["update_ratio"] == pytest.approx(expected["update_ratio"], rel=0.1)
