"""Trainers send the rates of Mamba-2 as an engine holds them: -exp(A_log), in float32. No engine of vLLM is there; its
loaders compute the same (test_layout_families.py)."""

from __future__ import annotations

import torch
from patience import deadline
from safetensors.torch import load_file
from scenarios import Layout
from test_actor_families import MODELS, write_models

from megatron_rl.bridge.intake import Intake, Parameters
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.layout import Engines
from megatron_rl.models import read_shape, slices, vllm_shards
from megatron_rl.models.shards import local_extents
from megatron_rl.types import Mesh

CPU = torch.device("cpu")


def test_engines_get_the_negated_exponentials_of_the_rates(trainers, tmp_path):
    """Every other parameter comes as it is, in bfloat16."""
    folder = write_models(tmp_path, {"nemotron_h": MODELS["nemotron_h"]})["nemotron_h"]
    mesh, engines = Mesh(tensor=2, pipeline=2), Engines(1, 2)
    shape = read_shape(folder)
    sizes = dict(timeout_s=deadline(60), bucket_bytes=2000)  # so that weights are cut
    setup = BridgeSetup(shape, mesh, False, engines, "bfloat16", folder=str(tmp_path / "push"), **sizes)
    trainers.run("push_into_files", 4, folder=folder, layout=Layout(mesh, dtype="bfloat16"), setup=setup)
    weights, rates = load_file(folder / "model.safetensors"), set()
    for rank in range(2):
        shards = vllm_shards(shape, 2, rank)
        live = {
            name: torch.full(extents, torch.nan, dtype=torch.float32 if name.endswith(".A") else torch.bfloat16)
            for name, extents in local_extents(shards).items()
        }
        intake = Intake(setup, 0, rank, Parameters(live), CPU)
        intake.receive(0)
        intake.close()
        for shard in shards:
            weight = weights[shard.hf_name][slices(shard.hf_box)]
            if shard.hf_name.endswith("A_log"):
                weight = -torch.exp(weight)
                rates.add(shard.hf_name)
            held = live[shard.local_name][slices(shard.local_box)]
            assert torch.equal(held, weight.to(held.dtype)), shard.local_name
    assert rates == {name for name in weights if name.endswith("A_log")} and len(rates) == 3
