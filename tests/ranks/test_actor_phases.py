"""A trainer rank lends its memory and takes it back, and nothing else changes."""

from __future__ import annotations

import filecmp

import cover
import numpy as np
import pytest
from scenarios import Layout
from test_actor_families import LAYOUTS as FAMILY_LAYOUTS

from megatron_rl.config.policy import LoraConfig
from megatron_rl.types import Mesh

LAYOUTS = {
    "tp2": Layout(Mesh(tensor=2)),
    "dp2": Layout(Mesh(data=2)),  # the optimizer's parameters are views of the weights
    "dp2_bf16": Layout(Mesh(data=2), dtype="bfloat16"),  # it has fp32 copies of its part of them
    "pp2_virtual_bf16": Layout(Mesh(pipeline=2, virtual=2), num_microbatches=2, dtype="bfloat16"),
}


def check(trainers, tmp_path, folder, samples, layout: Layout, lora: LoraConfig | None = None) -> None:
    runs = {}
    for name in ("alone", "lends"):
        target = tmp_path / name
        target.mkdir()
        arguments = dict(folder=folder, samples=samples, layout=layout, target=target, lora=lora)
        runs[name] = trainers.run("memory_scenarios.lend", layout.mesh.world_size, **arguments, enters=name == "lends")
    for (metrics, _, _), (metrics2, sizes, refusals) in zip(*runs.values(), strict=True):
        assert metrics2 == metrics
        assert sizes["generating"] == 0 < sizes["weight sync"] < sizes["training"] < sizes["after an update"]
        assert [name for name, _ in refusals] == ["begin", "update", "save", "load", "snapshot"] * 3
        for _, message in refusals:
            assert "the trainer is in the phase generating, in which the engines have the memory" in message
    checkpoints = [tmp_path / name / "2" for name in runs]
    files = [[path.relative_to(c) for path in sorted(c.rglob("*")) if path.suffix == ".distcp"] for c in checkpoints]
    assert files[0] == files[1] != []
    for file in files[0]:
        assert filecmp.cmp(checkpoints[0] / file, checkpoints[1] / file, shallow=False), file


@pytest.mark.parametrize("name", cover.essential(LAYOUTS, "dp2_bf16"))
def test_lending_changes_no_bit_and_holds_only_what_the_phase_needs(trainers, model_folder, samples, tmp_path, name):
    check(trainers, tmp_path, model_folder, samples, LAYOUTS[name])


def test_a_critic_refuses_by_name_what_its_phase_does_not_hold(trainers, model_folder, samples, tmp_path):
    layout = Layout(Mesh(data=2))
    arguments = dict(folder=model_folder, samples=samples, layout=layout, target=tmp_path)
    apart, lent = (trainers.run("critic_scenarios.lend", 2, **arguments, enters=enters) for enters in (False, True))
    for (metrics, values, _, _), (metrics2, values2, sizes, refusals) in zip(apart, lent, strict=True):
        assert metrics2 == metrics and values2.keys() == values.keys() != set()
        assert all(np.array_equal(values2[k], values[k]) for k in values)
        assert sizes == {"training": sizes["training"], "weight sync": 0, "generating": 0} and sizes["training"] > 0
        asked = ["values", "set_targets", "update", "save", "load", "snapshot"]
        assert [name for _, name, _ in refusals] == asked * 2
        for phase, _, message in refusals:
            assert f"the critic is in the phase {phase}, in which the engines have the memory of its weights" in message


@pytest.mark.deep
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=3, base="fp8")], ids=["trained", "adapters of a base in fp8"])
def test_experts_are_lent_too(trainers, folders, samples, tmp_path, lora):
    layout = next(layout for name, layout in FAMILY_LAYOUTS.items() if "ep2" in name)
    check(trainers, tmp_path, folders["qwen3_moe"], samples, layout, lora)
