"""The layout room's promises: exact transfers, orders by hand, named errors. Pure: no process, no vendor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import SHAPES, Tensors, cut, numbered

from megatron_rl.layout import (
    FAMILIES,
    TransferPlan,
    check_parameters,
    megatron_shards,
    padded_vocabulary,
    plan_policy_to_engines,
    plan_transfers,
    slices,
    vllm_shards,
)
from megatron_rl.layout.shards import local_extents
from megatron_rl.layout.splits import QKV
from megatron_rl.types import Mesh, ModelShape


@st.composite
def shapes(draw) -> ModelShape:
    """Any family, with other sizes; heads, FFNs and experts divide by 4, or KV heads divide 4."""
    shape = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
    kv = draw(st.sampled_from([1, 2, 4, 8]))
    changes = dict(
        num_layers=draw(st.integers(4, 5)),
        hidden_size=draw(st.integers(1, 9)),
        num_kv_heads=kv,
        num_heads=kv * 4 * draw(st.integers(1, 2)) // min(kv, 4),
        head_dim=4 * draw(st.integers(1, 2)),
        ffn_size=4 * draw(st.integers(1, 3)),
        vocab_size=draw(st.integers(3, 200)),
        tied_embeddings=draw(st.booleans()),
    )
    if shape.experts:
        num_experts = 4 * draw(st.integers(1, 2))
        changes["experts"] = replace(shape.experts, num_experts=num_experts, ffn_size=4 * draw(st.integers(1, 3)))
    return replace(shape, **changes)


@st.composite
def meshes(draw, shape: ModelShape) -> Mesh:
    tensor = draw(st.sampled_from([n for n in (1, 2) if shape.num_kv_heads % n == 0]))
    context, data = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    chunks, pipeline, virtual = draw(st.sampled_from([(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 2, 2)]))
    cuts = sorted(draw(st.integers(0, shape.num_layers)) for _ in range(chunks - 1))
    layers = tuple(b - a for a, b in zip([0, *cuts], [*cuts, shape.num_layers], strict=True))
    ways = draw(st.sampled_from([n for n in (1, 2, 4) if n <= tensor * context * data]))
    expert_tensor = draw(st.sampled_from([n for n in (1, 2, 4) if n <= ways]))
    experts = dict(expert=ways // expert_tensor, expert_tensor=expert_tensor) if shape.experts else {}
    return Mesh(tensor, pipeline, data, context=context, virtual=virtual, layers=layers, **experts)


def carried_out(plan: TransferPlan, sources: list[Tensors], wanted: list[Tensors]) -> None:
    """Execute a plan: every element of every destination is written once, and with its own number."""
    written = [{name: np.full_like(array, -1) for name, array in one.items()} for one in wanted]
    for (source, destination), copies in plan.routes.items():
        for copy in copies:
            target = written[destination][copy.destination_name][slices(copy.destination_box)]
            assert (target == -1).all()
            target[...] = sources[source][copy.source_name][slices(copy.source_box)]
    for rank, want in enumerate(wanted):
        for name in want:
            np.testing.assert_array_equal(written[rank][name], want[name], name)


@given(st.data(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.booleans(), st.booleans())
@settings(max_examples=150)
def test_every_engine_element_is_written_once_and_from_its_own_source(data, tensor, pipeline, expert_parallel, fused):
    """Each element carries its own number through trainer layout, plan and engine layout."""
    shape = data.draw(shapes().filter(lambda shape: FAMILIES[shape.family].vllm_model))
    mesh, hf = data.draw(meshes(shape)), numbered(shape)
    trainers = [megatron_shards(shape, mesh, rank, fused) for rank in range(mesh.world_size)]
    engines = [vllm_shards(shape, tensor, rank, expert_parallel, pipeline) for rank in range(tensor * pipeline)] * 2
    carried_out(
        plan_transfers(trainers, engines),
        [cut(shards, hf) for shards in trainers],
        [cut(shards, hf) for shards in engines],
    )


@given(st.data(), st.booleans(), st.booleans())
@settings(max_examples=100)
def test_every_element_moves_from_mesh_to_mesh(data, fused, other_fused):
    shape = data.draw(shapes())
    one, other, hf = data.draw(meshes(shape)), data.draw(meshes(shape)), numbered(shape)
    sources = [megatron_shards(shape, one, rank, fused) for rank in range(one.world_size)]
    destinations = [megatron_shards(shape, other, rank, other_fused) for rank in range(other.world_size)]
    carried_out(
        plan_transfers(sources, destinations),
        [cut(shards, hf) for shards in sources],
        [cut(shards, hf) for shards in destinations],
    )


def test_the_bridges_plan_repeats_an_engine():
    shape, mesh = SHAPES["qwen3"], Mesh(tensor=2, pipeline=2)
    plan = plan_policy_to_engines(shape, mesh, fused_norms=False, num_engines=2, engine_tensor=4)
    hf = numbered(shape)
    carried_out(
        plan,
        [cut(megatron_shards(shape, mesh, rank), hf) for rank in range(4)],
        [cut(vllm_shards(shape, 4, rank), hf) for rank in range(4)] * 2,
    )


def test_qkv_order_by_hand():
    """2 query groups of 2 heads, head size 1: Megatron interleaves the groups, vLLM stacks q, k, v."""
    shape = ModelShape("qwen3", 1, 4, 4, 2, 1, 4, 3, 1e4, 1e-6, 64, False)
    hf = {name: np.zeros(extent, int) for name, extent in FAMILIES["qwen3"].hf_tensors(shape).items()}
    prefix = "model.layers.0.self_attn."
    hf[prefix + "q_proj.weight"][:] = np.array([[10], [11], [12], [13]])
    hf[prefix + "k_proj.weight"][:] = np.array([[20], [21]])
    hf[prefix + "v_proj.weight"][:] = np.array([[30], [31]])
    one = cut(megatron_shards(shape, Mesh(), 0), hf)["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert one[:, 0].tolist() == [10, 11, 20, 30, 12, 13, 21, 31]
    second = cut(megatron_shards(shape, Mesh(tensor=2), 1), hf)["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert second[:, 0].tolist() == [12, 13, 21, 31]
    quarter = [(piece.tensor, piece.start, piece.stop) for piece in QKV.megatron(shape, (4, 2, 2), 4, 2)]
    assert quarter == [(0, 2, 4)], "4 ranks share 2 groups: rank 2 has the first half of the second"
    engine = cut(vllm_shards(shape, 4, 3), hf)["model.layers.0.self_attn.qkv_proj.weight"]
    assert engine[:, 0].tolist() == [13, 21, 31], "4 ranks share 2 KV heads: rank 3 has the second one"


def test_replicas_share_the_load():
    """DP4 holds everything four times: no rank sends more than a quarter and the largest single shard."""
    shape = ModelShape("qwen3", 8, 64, 8, 4, 16, 128, 256, 1e4, 1e-6, 64, False)
    plan = plan_policy_to_engines(shape, Mesh(1, 1, 4), fused_norms=False, num_engines=1, engine_tensor=1)
    sent = [plan.num_elements((rank, 0)) for rank in range(4)]
    assert max(sent) - min(sent) <= 256 * 64


def test_a_gap_in_the_sources_is_named():
    shape = ModelShape("qwen3", 2, 8, 2, 2, 4, 8, 16, 1e4, 1e-6, 64, False)
    mesh = Mesh(tensor=2)
    only_first_rank = [megatron_shards(shape, mesh, 0)]
    with pytest.raises(ValueError, match=r"q_proj\.weight .* hold 32 of the 64 elements"):
        plan_transfers(only_first_rank, [vllm_shards(shape, 1, 0)])


def test_parameters_that_no_rule_covers_are_named():
    shape = ModelShape("qwen3", 1, 8, 2, 2, 4, 8, 16, 1e4, 1e-6, 64, False)
    shards = vllm_shards(shape, 1, 0)
    live = local_extents(shards)
    check_parameters(shards, live | {"lm_head.weight": (64, 8)}, "engine")  # padding rows are no error
    with pytest.raises(ValueError, match="strange.bias"):
        check_parameters(shards, live | {"strange.bias": (3,)}, "engine")
    with pytest.raises(ValueError, match="model.norm.weight"):
        check_parameters(shards, {k: v for k, v in live.items() if k != "model.norm.weight"}, "engine")
    with pytest.raises(ValueError, match=r"norm.weight is \(9,\)"):
        check_parameters(shards, live | {"model.norm.weight": (9,)}, "engine")


@pytest.mark.parametrize(
    ("name", "mesh", "message"),
    [
        ("qwen3", Mesh(pipeline=4), "6 layers, which policy.parallel.pipeline=4"),
        ("qwen3", Mesh(pipeline=2, virtual=2), "6 layers, .* into 2 chunks a stage"),
        ("qwen3", Mesh(pipeline=2, layers=(2, 2)), "hold 4 layers, the model has 6"),
        ("qwen3", Mesh(tensor=3), "8 attention heads, which policy.parallel.tensor=3"),
        ("qwen3", Mesh(tensor=8), "4 KV heads, which policy.parallel.tensor=8"),
        ("qwen3", Mesh(data=2, expert=2), "policy.parallel.expert=2, but a qwen3 model has no experts"),
        ("mixtral", Mesh(data=3, expert=3), "8 experts, which policy.parallel.expert=3"),
        ("mixtral", Mesh(data=3, expert_tensor=3), "8 FFN size of an expert, which policy.parallel.expert_tensor=3"),
    ],
)
def test_mesh_that_does_not_divide_names_the_number(name, mesh, message):
    with pytest.raises(ValueError, match=message):
        megatron_shards(SHAPES[name], mesh, 0)


def test_a_tensor_that_does_not_divide_is_named():
    """Down projections of latent attention are split by Megatron's local layers alone."""
    shape = replace(SHAPES["deepseek_v3"], latent=replace(SHAPES["deepseek_v3"].latent, query_rank=6))
    megatron_shards(shape, Mesh(tensor=4), 0, fused_norms=True)
    with pytest.raises(ValueError, match="q_a_proj.weight: 6 does not divide into 4"):
        megatron_shards(shape, Mesh(tensor=4), 0)


def test_padded_vocabulary():
    assert padded_vocabulary(SHAPES["qwen3"], 1) == 96
    assert padded_vocabulary(SHAPES["qwen3"], 2) == 128


def test_names_of_chunks_and_experts_by_hand():
    """Chunk 1 of stage 1 of 2 x 2 holds layers 4 and 5 of (1, 2, 1, 2); rank 3 of EP2 the experts 4 to 7."""
    mesh = Mesh(tensor=2, pipeline=2, expert=2, expert_tensor=1, virtual=2, layers=(1, 2, 1, 2))
    shards = megatron_shards(SHAPES["mixtral"], mesh, 3)
    last = [s for s in shards if s.hf_name == "model.layers.5.block_sparse_moe.experts.6.w3.weight"]
    assert [(s.local_name, s.local_box) for s in last] == [
        ("chunk1.decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight", ((8, 16), (0, 5)))
    ]
    grouped = megatron_shards(SHAPES["mixtral"], mesh, 3, fused_norms=True)
    assert "chunk1.decoder.layers.1.mlp.experts.linear_fc1.weight2" in {s.local_name for s in grouped}
    engine = vllm_shards(SHAPES["mixtral"], 2, 1)
    up = [s for s in engine if s.hf_name == "model.layers.5.block_sparse_moe.experts.6.w3.weight"]
    assert [(s.local_name, s.local_box) for s in up] == [
        ("model.layers.5.block_sparse_moe.experts.routed_experts.w13_weight", ((6, 7), (4, 8), (0, 5)))
    ]


def test_latent_down_projections_by_hand():
    """vLLM stacks k and v's below the query's and holds both whole; Megatron's local layers split each over TP."""
    shape = SHAPES["deepseek_v3"]
    engine = {s.hf_name: (s.local_name, s.local_box) for s in vllm_shards(shape, 2, 1)}
    trainer = {s.hf_name: s for s in megatron_shards(shape, Mesh(tensor=2), 1)}
    prefix = "model.layers.0.self_attn."
    fused = prefix + "fused_qkv_a_proj.weight"
    assert engine[prefix + "q_a_proj.weight"] == (fused, ((0, 8), (0, 5)))
    assert engine[prefix + "kv_a_proj_with_mqa.weight"] == (fused, ((8, 16), (0, 5)))
    assert trainer[prefix + "kv_a_proj_with_mqa.weight"].hf_box == ((4, 8), (0, 5))


def test_what_the_tables_say_of_a_family():
    assert {name: (f.qk_norm, f.qkv_bias, f.post_norm, f.router_bias) for name, f in FAMILIES.items()} == {
        "llama": ("none", False, False, False),
        "qwen2": ("none", True, False, False),
        "qwen3": ("head", False, False, False),
        "qwen3_moe": ("head", False, False, False),
        "mixtral": ("none", False, False, False),
        "olmo2": ("full", False, True, False),
        "olmo3": ("full", False, True, False),
        "deepseek_v3": ("none", False, False, True),
    }
