"""The numbers of the dry run, by hand on a small mixture and against the mesh's own ranks."""

from __future__ import annotations

import io
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from small_models import model

from megatron_rl.commands.dry_run import describe_placement, describe_policy, describe_rollout
from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.models import FAMILIES
from megatron_rl.planning.parameters import checkpoint_bytes, expert_data_ways, optimizer_ways, rank_parameters
from megatron_rl.planning.shapes import planned_shape
from megatron_rl.types import Mesh, Mixture

MIXTURE = model("qwen3_moe", 2, 4, 4, 2, 2, 8, 64, mlp=Mixture(num_experts=4, num_active=2, ffn_size=6))


def test_a_mixture_by_hand():
    """TP2 x DP4, EP4 with whole experts: 8 ranks, each with one expert of a layer, which two ranks hold."""
    mesh = Mesh(tensor=2, data=4, expert=4, expert_tensor=1)
    held = rank_parameters(MIXTURE, mesh, 0)
    # Of a layer, on one of two tensor ranks: q, k, v (8 + 4 + 4) x 4 / 2, output 4 x 8 / 2; whole on each: two norms
    # of 4, q and k norm of 2, the router 4 x 4.
    layer = 32 + 16 + 8 + 4 + 16
    # Embedding and output layer 64 x 4 / 2 each, and the final norm.
    assert held.dense == 2 * layer + 2 * 128 + 4 == 412
    # One expert of each layer: gate, up and down, 6 x 4 each.
    assert held.expert == 2 * 3 * 24 == 144
    assert optimizer_ways(mesh) == (4, 2)
    # bf16: two moments and the fp32 copy, 12 bytes; fp32: the moments alone.
    assert held.state_bytes(mesh, "bfloat16") == 412 / 4 * 12 + 144 / 2 * 12 == 2100
    assert held.state_bytes(mesh, "float32") == 412 / 4 * 8 + 144 / 2 * 8
    # Once: all experts, and the rest without its copies on the tensor ranks.
    assert checkpoint_bytes(MIXTURE, "bfloat16") == (2 * (96 + 12 + 16) + 512 + 4 + 2 * 4 * 72) * 14


def test_experts_are_not_divided_by_data_parallelism():
    """Qwen3-235B's case in small: EP takes all data-parallel ranks, so nobody shares an expert's state."""
    mesh = Mesh(tensor=1, data=4, expert=4)
    held = rank_parameters(MIXTURE, mesh, 0)
    assert optimizer_ways(mesh) == (4, 1)
    assert held.state_bytes(mesh, "bfloat16") == 12 * (held.dense / 4 + 144)


def test_the_plain_optimizer_splits_nothing():
    mesh = Mesh(tensor=4, data=1, expert=2, expert_tensor=1)
    assert expert_data_ways(mesh) == 2 and optimizer_ways(mesh) == (1, 1)


@st.composite
def meshes(draw) -> Mesh:
    tensor, pipeline, data = (draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2])), draw(st.integers(2, 4)))
    context = draw(st.sampled_from([1, 2]))
    expert_tensor = draw(st.sampled_from([1, tensor]))
    stage = tensor * context * data
    fits = [expert for expert in (1, 2, 4) if stage % (expert * expert_tensor) == 0]
    return Mesh(tensor, pipeline, data, context, draw(st.sampled_from(fits)), expert_tensor)


@given(meshes())
def test_the_state_of_all_ranks_is_that_of_the_model(mesh):
    """Who holds the same part is counted from the coordinates of the mesh, rank by rank."""
    dense_ways, expert_ways = optimizer_ways(mesh)
    ranks = range(mesh.world_size)
    dense_owners = Counter(mesh.coordinates(rank)[:2] for rank in ranks)
    expert_owners = Counter((rank // mesh.stage_size, *mesh.expert_coordinates(rank)[:2]) for rank in ranks)
    assert set(dense_owners.values()) == {dense_ways} and set(expert_owners.values()) == {expert_ways}
    tensors = FAMILIES["qwen3_moe"].hf_tensors(MIXTURE)
    of_experts = sum(extents[0] * extents[1] for name, extents in tensors.items() if ".experts." in name)
    held = [rank_parameters(MIXTURE, mesh, rank) for rank in ranks]
    assert sum(one.expert for one in held) == of_experts * expert_ways
    # Norms and the router are whole on every tensor rank: 28 in a layer and 4 at the end.
    repeated = (mesh.tensor - 1) * (2 * 28 + 4)
    dense = sum(one.dense for one in held)
    assert dense == (FAMILIES["qwen3_moe"].num_parameters(MIXTURE) - of_experts + repeated) * dense_ways


def planned(model: str, **parallel: int) -> str:
    return printed(describe_policy, model, parallel, {}, {})


def printed(describe, model: str, parallel: dict, rollout: dict, cluster: dict, slurm: dict | None = None) -> str:
    config = validate(
        GrpoRunConfig,
        {
            "run": {"name": "plan", "steps": 1},
            "model": {"path": f"models/{model}", "dtype": "bfloat16"},
            "policy": {"parallel": parallel},
            "data": {"train": "rows.jsonl"},
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 8}
            | {"max_response_tokens": 8}
            | rollout,
            "balance": {"max_tokens_per_microbatch": 16},
            "cluster": cluster,
            "slurm": slurm,
        },
    )
    screen = io.StringIO()
    describe(config, Console(file=screen, width=140, color_system=None))
    return screen.getvalue()


def test_a_large_mixture_is_told_with_its_experts_split():
    text = planned("Qwen3-235B-A22B", tensor=4, pipeline=2, data=16, expert=16)
    assert "TP4 x PP2 x DP16 = 128 ranks, bfloat16; experts: EP16 x ETP4 x expert-DP1" in text
    # 47 of 94 layers, 8 of 128 experts, a quarter of each: 3 x 1536 x 4096 x 8 x 47 / 4 = 1,774,190,592 parameters at
    # 12 bytes are 21.3 GB for the experts alone.
    [line] = [line for line in text.splitlines() if "optimizer state, dense over DP, experts over expert-DP" in line]
    assert 21.3 <= float(line.split("│")[2].split()[0]) < 22.5


def test_a_plan_without_gpus_says_so_unless_the_configuration_did():
    sizes = "Qwen3-32B", {"tensor": 4}, {}
    assert "cluster.device=gpu plans for GPUs" in printed(describe_policy, *sizes, {})
    assert "plans for GPUs" not in printed(describe_policy, *sizes, {"device": "cpu"})
    assert "plans for GPUs" not in printed(describe_policy, *sizes, {"gpus_per_trainer": 1})


def test_more_stages_of_an_engine_than_layers_are_named():
    sizes = "Qwen3-32B", {"tensor": 4}
    with pytest.raises(
        ValueError, match="^an engine of 65 pipeline stages cannot have the 64 .*rollout.parallel.pipeline$"
    ):
        printed(
            lambda run, screen: describe_rollout(run, planned_shape(run), screen),
            *sizes,
            {"parallel": {"pipeline": 65}},
            {},
        )


def test_a_dense_model_speaks_of_no_experts():
    text = planned("Qwen3-32B", tensor=4, pipeline=4, data=2)
    assert "expert" not in text and "optimizer state, split over DP │ 12.87 GB" in text


def test_the_nodes_are_told_with_the_parts_of_engines_that_are_wider_than_a_node():
    cluster = {"gpus_per_trainer": 1, "gpus_per_engine_rank": 1, "gpus_per_node": 8}
    cluster["pools"] = {"engine": "rollout"}
    rollout = {"parallel": {"tensor": 12}, "num_engines": 2}
    text = printed(describe_placement, "Qwen3-32B", {"tensor": 4, "data": 3}, rollout, cluster)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert rows == [
        ["node 1", "0-7", "", "", "8 of 8"],
        ["node 2", "8-11", "", "here", "4 of 8"],
        ["node 3 (rollout)", "", "0 (ranks 0-7)", "", "8 of 8"],
        ["node 4 (rollout)", "", "0 (ranks 8-11), 1 (ranks 8-11)", "", "8 of 8"],
        ["node 5 (rollout)", "", "1 (ranks 0-7)", "", "8 of 8"],
    ]
    given = describe_placement, "Qwen3-32B", {"tensor": 4, "data": 3}, rollout, cluster
    assert "slurm" not in printed(*given, {"nodes": 2, "rollout_nodes": 3})
    text = printed(*given, {"nodes": 4, "rollout_nodes": 3})
    assert "slurm.nodes is 4, and the plan needs 2: the other nodes stay empty" in text
    with pytest.raises(ValueError, match="slurm.rollout_nodes is 2.*needs 3"):
        printed(*given, {"nodes": 4, "rollout_nodes": 2})
    del cluster["pools"]
    assert "slurm" not in printed(*given, {"nodes": 2, "rollout_nodes": 3}), "the job's script sets the pools"
    assert "slurm.nodes is 6, and the plan needs 5: the other nodes stay empty" in printed(*given, {"nodes": 6})
    cluster["gpus_per_node"] = None
    assert printed(describe_placement, "Qwen3-32B", {"tensor": 4, "data": 3}, rollout, cluster) == ""
