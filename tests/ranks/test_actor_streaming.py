"""An optimizer whose state is streamed, against one that keeps everything on its device."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import cover
import pytest
import torch
from scenarios import Layout
from streaming_scenarios import NUM_ELEMENTS
from test_actor_families import LAYOUTS as FAMILY_LAYOUTS
from test_actor_layouts import OVERLAP

from megatron_rl.actor.checkpoint import read_manifest
from megatron_rl.config.optimizer import IN_FLIGHT, AdamConfig
from megatron_rl.config.policy import MegatronConfig
from megatron_rl.models import read_shape
from megatron_rl.planning.parameters import rank_parameters
from megatron_rl.types import Mesh

OFFLOAD, SHORT = {"offload": True}, {"moments": "bfloat16"}
LAYOUTS = {
    "one_bf16": Layout(dtype="bfloat16"),
    "tp2": Layout(Mesh(tensor=2)),
    "dp2": Layout(Mesh(data=2)),  # the optimizer's parameters are views of the weights
    # It has fp32 copies of its part of them.
    "dp2_bf16": Layout(Mesh(data=2), dtype="bfloat16", megatron=MegatronConfig(ddp=OVERLAP)),
    "pp2_virtual_bf16": Layout(Mesh(pipeline=2, virtual=2), num_microbatches=2, dtype="bfloat16"),
}
NORMS = ("param_norm", "update_ratio")
"""Metrics that are sums over the parts of parameters."""


def check_equal(found, expected, moments=torch.float32) -> None:
    """Metrics and states of all ranks, to the bit. The norms are summed over other parts, so in another order."""
    for (metrics, states), (metrics2, states2) in zip(found, expected, strict=True):
        for one, other in zip(metrics, metrics2, strict=True):
            assert {k: v for k, v in one.items() if k not in NORMS} == {
                k: v for k, v in other.items() if k not in NORMS
            }
            for name in NORMS:
                assert one[name] == pytest.approx(other[name], rel=1e-12)  # float64 sums
        for one, other in zip(states, states2, strict=True):
            assert one.keys() == other.keys()
            for (kind, name), tensor in one.items():
                assert tensor.dtype == (moments if kind.startswith("exp_avg") else other[kind, name].dtype)
                assert torch.equal(tensor.float(), other[kind, name].float()), (kind, name)


@pytest.fixture(scope="module")
def plain(trainers, model_folder, samples):
    """The updates of the layouts without streaming, by (name of the layout, whether moments are rounded)."""
    known: dict = {}

    def updates(name: str, rounds: bool = False):
        if (name, rounds) not in known:
            layout = LAYOUTS[name]
            arguments = dict(folder=model_folder, samples=samples, layout=layout, settings={}, rounds=rounds)
            known[name, rounds] = trainers.run("streaming_scenarios.updates", layout.mesh.world_size, **arguments)
        return known[name, rounds]

    return updates


@pytest.mark.parametrize("name", cover.essential(LAYOUTS, "dp2_bf16"))
def test_offloading_changes_no_bit(trainers, model_folder, samples, plain, name):
    layout = LAYOUTS[name]
    arguments = dict(folder=model_folder, samples=samples, layout=layout, settings=OFFLOAD)
    found = trainers.run("streaming_scenarios.updates", layout.mesh.world_size, **arguments)
    check_equal(found, plain(name))


@pytest.mark.deep
@pytest.mark.parametrize("model", ["qwen3_moe", "glm4_moe", "gpt_oss", "qwen3_next", "kimi_k2"])
def test_offloaded_experts_change_no_bit(trainers, folders, samples, model):
    """Megatron has an optimizer of their own for them."""
    layout = next(layout for name, layout in FAMILY_LAYOUTS.items() if "ep2" in name)
    arguments = dict(folder=folders[model], samples=samples, layout=layout)
    found, expected = (
        trainers.run("streaming_scenarios.updates", layout.mesh.world_size, **arguments, settings=settings)
        for settings in (OFFLOAD, {})
    )
    check_equal(found, expected)


@pytest.mark.deep
@pytest.mark.parametrize(
    "name, settings", [("tp2", SHORT), ("tp2", SHORT | OFFLOAD), ("dp2_bf16", SHORT | OFFLOAD)], ids=str
)
def test_moments_in_bfloat16_are_those_that_are_rounded_after_each_update(
    trainers, model_folder, samples, plain, name, settings
):
    layout = LAYOUTS[name]
    arguments = dict(folder=model_folder, samples=samples, layout=layout, settings=settings)
    found = trainers.run("streaming_scenarios.updates", layout.mesh.world_size, **arguments)
    check_equal(found, plain(name, rounds=True), moments=torch.bfloat16)


@pytest.mark.deep
def test_a_checkpoint_has_no_traces_of_where_the_state_was(trainers, model_folder, samples, tmp_path):
    """Offloaded on one mesh, resumed with everything on the device of another; and with moments in bfloat16, of which
    the files have the bytes."""
    wide, deep = Layout(Mesh(data=2), dtype="bfloat16"), Layout(Mesh(tensor=2), dtype="bfloat16")
    arguments = dict(folder=model_folder, samples=samples)
    for name, settings in {"plain": {}, "offloaded": OFFLOAD, "short": SHORT}.items():
        trainers.run(
            "streaming_scenarios.updates", 2, **arguments, layout=wide, settings=settings, target=tmp_path / name
        )

    def resumed(checkpoint: str, layout: Layout, settings: dict):
        results = trainers.run(
            "streaming_scenarios.resume",
            2,
            **arguments,
            layout=layout,
            settings=settings,
            checkpoint=tmp_path / checkpoint,
        )
        return [([metrics], [state]) for metrics, state in results]

    for layout in (wide, deep):
        expected = resumed("plain", layout, {})
        check_equal(resumed("offloaded", layout, {}), expected)
        check_equal(resumed("plain", layout, OFFLOAD), expected)
    check_equal(resumed("short", deep, SHORT), resumed("short", deep, SHORT | OFFLOAD), moments=torch.bfloat16)
    assert (
        moment_bytes(tmp_path / "plain") == moment_bytes(tmp_path / "offloaded") == 2 * moment_bytes(tmp_path / "short")
    )


def moment_bytes(checkpoint: Path) -> int:
    files = read_manifest(checkpoint)["files"].values()
    parts = [part for file in files for part in file.get("tensors", {}).values()]
    return sum(part["bytes"] for part in parts if part["kind"].startswith("exp_avg"))


WEIGHED = [("tp2", SHORT), ("tp2", SHORT | OFFLOAD), ("dp2_bf16", OFFLOAD), ("dp2_bf16", SHORT | OFFLOAD)]


@pytest.mark.parametrize("name, settings", cover.essential(WEIGHED, WEIGHED[-1]), ids=str)
def test_the_bytes_are_those_of_the_table_of_memory(trainers, model_folder, samples, name, settings):
    layout, optimizer = LAYOUTS[name], AdamConfig(**settings)
    results = trainers.run(
        "streaming_scenarios.memory",
        layout.mesh.world_size,
        folder=model_folder,
        samples=samples,
        layout=layout,
        settings=settings,
    )
    found, expected = defaultdict(float), defaultdict(float)
    for rank, (stored, most, num_pieces) in enumerate(results):
        held, stage = rank_parameters(read_shape(model_folder), layout.mesh, rank), layout.mesh.coordinates(rank)[1]
        found[stage] += stored
        expected[stage] += held.state_bytes(layout.mesh, layout.dtype, optimizer)
        assert num_pieces > 2 * IN_FLIGHT, "more than are there at once"
        if optimizer.offload:
            widths = 12 if layout.dtype == "bfloat16" else 8
            assert 0 < most <= IN_FLIGHT * NUM_ELEMENTS * widths
    assert found == pytest.approx(expected, rel=1e-12)
