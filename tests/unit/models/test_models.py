"""Transfers of the layout room are exact, orders equal those written by hand, and errors name the tensor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import cover
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import SHAPES, carry_out, cut, numbered, plan_shards
from random_layouts import meshes, shapes
from small_models import changed, model

from megatron_rl.config.policy import PolicyConfig
from megatron_rl.models import FAMILIES, check_parameters, megatron_shards, padded_vocabulary, read_shape, vllm_shards
from megatron_rl.models.shards import Shard, is_vocabulary, local_extents
from megatron_rl.models.splits import QKV
from megatron_rl.types import TOWER, DeltaNet, GatedMlp, Mesh, Mixture, Rope, SoftmaxAttention


@pytest.mark.parametrize("part", cover.essential(range(4), 0))  # each has examples of its own
@given(st.data(), st.booleans(), st.booleans())
@settings(max_examples=cover.examples(28))
def test_every_element_moves_from_mesh_to_mesh(part, data, fused, other_fused):
    """Elements of all families move from any mesh to any other."""
    shape = data.draw(shapes())
    one, other, hf = data.draw(meshes(shape)), data.draw(meshes(shape)), numbered(shape)
    sources = [megatron_shards(shape, one, rank, fused) for rank in range(one.world_size)]
    destinations = [megatron_shards(shape, other, rank, other_fused) for rank in range(other.world_size)]
    carry_out(
        plan_shards(sources, destinations),
        [cut(shards, hf) for shards in sources],
        [cut(shards, hf) for shards in destinations],
    )


def test_qkv_order_by_hand():
    """The model has 2 query groups of 2 heads of size 1. Megatron interleaves the groups, vLLM stacks q, k and v."""
    shape = model("qwen3", 1, 4, 4, 2, 1, 4, 3)
    hf = {name: np.zeros(extent, int) for name, extent in FAMILIES["qwen3"].hf_tensors(shape).items()}
    prefix = "model.layers.0.self_attn."
    hf[prefix + "q_proj.weight"][:] = np.array([[10], [11], [12], [13]])
    hf[prefix + "k_proj.weight"][:] = np.array([[20], [21]])
    hf[prefix + "v_proj.weight"][:] = np.array([[30], [31]])
    one = cut(megatron_shards(shape, Mesh(), 0), hf)["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert one[:, 0].tolist() == [10, 11, 20, 30, 12, 13, 21, 31]
    second = cut(megatron_shards(shape, Mesh(tensor=2), 1), hf)["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert second[:, 0].tolist() == [12, 13, 21, 31]
    sizes = shape.sizes(shape.layers[0])
    quarter = [(piece.tensor, piece.start, piece.stop) for piece in QKV.megatron(sizes, (4, 2, 2), 4, 2)]
    assert quarter == [(0, 2, 4)], "4 ranks share 2 groups: rank 2 has the first half of the second"
    engine = cut(vllm_shards(shape, 4, 3), hf)["model.layers.0.self_attn.qkv_proj.weight"]
    assert engine[:, 0].tolist() == [13, 21, 31], "4 ranks share 2 KV heads: rank 3 has the second one"


def test_a_gap_in_the_sources_is_named():
    shape = model("qwen3", 2, 8, 2, 2, 4, 8, 16)
    mesh = Mesh(tensor=2)
    only_first_rank = [megatron_shards(shape, mesh, 0)]
    with pytest.raises(ValueError, match=r"q_proj\.weight .*32 of the 64"):
        plan_shards(only_first_rank, [vllm_shards(shape, 1, 0)])


def test_parameters_that_no_rule_covers_are_named():
    shape = model("qwen3", 1, 8, 2, 2, 4, 8, 16)
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
        ("twelve_heads", Mesh(tensor=6), "4 KV heads, which policy.parallel.tensor=6"),
        ("olmo3", Mesh(tensor=8), "4 KV heads.*tensor=8 .*normalises the heads of all ranks.* set it to 4 or less"),
        ("minimax_m2", Mesh(tensor=8), "4 KV heads.*tensor=8 .*minimax_m2 model normalises .* set it to 4 or less"),
        ("qwen3", Mesh(data=2, expert=2), "policy.parallel.expert=2, but a qwen3 model has no experts"),
        ("mixtral", Mesh(data=3, expert=3), "8 experts, which policy.parallel.expert=3"),
        ("mixtral", Mesh(data=3, expert_tensor=3), "8 FFN size of an expert, which policy.parallel.expert_tensor=3"),
    ],
)
def test_mesh_that_does_not_divide_names_the_number(name, mesh, message):
    with pytest.raises(ValueError, match=message):
        megatron_shards(SHAPES.get(name, changed(SHAPES["qwen3"], attention={"num_heads": 12})), mesh, 0)


def test_a_tensor_that_does_not_divide_is_named():
    """Only Megatron's local layers split the down projections of latent attention."""
    shape = changed(SHAPES["deepseek_v3"], attention={"query_rank": 6})
    megatron_shards(shape, Mesh(tensor=4), 0, fused_norms=True)
    with pytest.raises(ValueError, match="q_a_proj.weight: 6 does.*into 4"):
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
    """vLLM stacks the projection of k and v below the query's and holds both whole; Megatron's local layers split each
    over TP."""
    shape = SHAPES["deepseek_v3"]
    engine = {s.hf_name: (s.local_name, s.local_box) for s in vllm_shards(shape, 2, 1)}
    trainer = {s.hf_name: s for s in megatron_shards(shape, Mesh(tensor=2), 1)}
    prefix = "model.layers.0.self_attn."
    fused = prefix + "fused_qkv_a_proj.weight"
    assert engine[prefix + "q_a_proj.weight"] == (fused, ((0, 8), (0, 5)))
    assert engine[prefix + "kv_a_proj_with_mqa.weight"] == (fused, ((8, 16), (0, 5)))
    assert trainer[prefix + "kv_a_proj_with_mqa.weight"].hf_box == ((4, 8), (0, 5))


def test_what_the_tables_say_of_a_family():
    found = {
        name: (
            shape.attention.norms,
            shape.attention.qkv_bias,
            shape.layers[0].post_norm,
            bool(shape.mixture and shape.mixture.router_bias),
        )
        for name, shape in SHAPES.items()
    }
    plain = changed(SHAPES["glm4_moe"], family="glm4_moe", attention={"qkv_bias": False, "norms": "none"})
    assert plain.attention.norms == "none" and not plain.attention.qkv_bias
    assert found == {
        "gpt_oss": ("none", True, False, False),
        "llama": ("none", False, False, False),
        "mistral": ("none", False, False, False),
        "qwen2": ("none", True, False, False),
        "qwen3": ("head", False, False, False),
        "qwen3_tied": ("head", False, False, False),
        "qwen3_moe": ("head", False, False, False),
        "mixtral": ("none", False, False, False),
        "olmo2": ("full", False, True, False),
        "olmo3": ("full", False, True, False),
        "deepseek_v3": ("none", False, False, True),
        "deepseek_v3_head": ("none", False, False, True),
        "deepseek_v3_direct": ("none", False, False, True),
        "kimi_k2": ("none", False, False, True),
        "glm4_moe_lite": ("none", False, False, True),
        "glm4_moe": ("head", True, False, True),
        "minimax_m2": ("full", False, False, True),
        "gemma3_text": ("head", False, True, False),
        "nemotron_h": ("none", False, False, True),
        **{name: ("head", False, False, False) for name in (*GATED, "qwen3_5_head")},
    }
    assert [name for name, shape in SHAPES.items() if shape.attention.sinks] == ["gpt_oss"]
    assert [name for name, shape in SHAPES.items() if shape.attention.output_bias] == ["gpt_oss"]
    assert [name for name, shape in SHAPES.items() if shape.mixture and shape.mixture.linear_bias] == ["gpt_oss"]
    assert {name for name, family in FAMILIES.items() if family.linear} == GATED | {"nemotron_h"}
    assert {shape.family for shape in SHAPES.values() if shape.attention.gated} == GATED
    assert {shape.family for shape in SHAPES.values() if shape.layers[0].zero_centred} == GATED | {"gemma3_text"}
    assert [name for name, shape in SHAPES.items() if shape.layers[0].norms_on_both_sides] == ["gemma3_text"]


GATED = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}


def test_a_trait_is_of_the_row_and_not_of_its_name_in_checkpoints():
    def renamed(family, **names):
        def of(tensor):
            return replace(tensor, name=next((new for old, new in names.items() if old in tensor.name), tensor.name))

        rows = {
            kind: tuple(replace(rule, hf=tuple(map(of, rule.hf))) for rule in getattr(family, kind))
            for kind in ("attention", "dense", "mixture")
        }
        return replace(family, **rows)

    glm = renamed(FAMILIES["glm4_moe"], e_score_correction_bias="block_sparse_moe.bias")
    [attention], mlp = SHAPES["glm4_moe"].attentions, Mixture(8, 2, 8)
    assert glm.layer(attention, mlp).mixture.router_bias and glm.is_router_bias("model.layers.3.block_sparse_moe.bias")
    assert not glm.is_router_bias("model.layers.3.mlp.gate.weight")
    assert not FAMILIES["qwen3_moe"].layer(attention, mlp).mixture.router_bias
    olmo = renamed(FAMILIES["olmo3"], post_feedforward_layernorm="after.weight", q_norm="query.norm")
    layer = olmo.layer(SoftmaxAttention(2, 2, 4, Rope(1e4)), GatedMlp(8))
    assert layer.post_norm and layer.attention.norms == "full"


def linear(name, delta):
    return changed(SHAPES[name], (0, 1, 2, 4), attention=delta)


def test_a_rank_has_the_rows_of_its_heads_of_linear_attention():
    """By hand: rank 1 of 2, of 2 key heads of 3 rows, 4 value heads of 2 rows, and a hidden size of 5."""
    delta = DeltaNet(num_key_heads=2, num_value_heads=4, key_size=3, value_size=2, convolution=4, interleaved=True)
    shape = linear("qwen3_next", delta)
    name, columns = "decoder.layers.0.self_attention.in_proj.weight", (0, 5)

    def rows(shape, name):
        return [(s.hf_name.rpartition("attn.")[2], s.hf_box[0], s.local_box[0])
                for s in megatron_shards(shape, Mesh(tensor=2), 1) if s.local_name == name]  # fmt: skip

    # [q ; k ; two values ; two gates] of each key head are 14 rows, [two strengths ; two decays] are 4.
    assert rows(shape, name) == [("in_proj_qkvz.weight", (14, 28), (0, 14)), ("in_proj_ba.weight", (4, 8), (14, 18))]
    # All q are 6 rows, all k 6, all values 8.
    flat = linear("qwen3_5_text", replace(delta, interleaved=False))
    assert rows(flat, name) == [
        ("in_proj_qkv.weight", (3, 6), (0, 3)),
        ("in_proj_qkv.weight", (9, 12), (3, 6)),
        ("in_proj_qkv.weight", (16, 20), (6, 10)),
        ("in_proj_z.weight", (4, 8), (10, 14)),
        ("in_proj_b.weight", (2, 4), (14, 16)),
        ("in_proj_a.weight", (2, 4), (16, 18)),
    ]
    engine = {
        s.local_name: s for s in vllm_shards(flat, 2, 1) if s.hf_name.endswith("layers.0.linear_attn.in_proj_a.weight")
    }
    ((local, shard),) = engine.items()
    assert local == "model.layers.0.linear_attn.in_proj_ba.weight"
    assert shard.hf_box == ((2, 4), columns) and shard.local_box == ((2, 4), columns)
    assert rows(flat, "decoder.layers.3.self_attention.in_proj.weight") == []


PUBLISHED = Path(__file__).parents[3] / "configs" / "model"
REFUSED = {
    "attn_output_gate is False; only true": {"attn_output_gate": False},
    "output_gate_type is 'sigmoid'; supported are silu and swish": {"output_gate_type": "sigmoid"},
    "layer_types has sliding_attention; only linear_attention": {"layer_types": ["sliding_attention"] * 40},
    "all 40 layers have linear attention; at least one": {"layer_types": ["linear_attention"] * 40},
    "layer_types has 1 entries, but num_hidden_layers is 40": {"layer_types": ["full_attention"]},
    "mrope_section is .11, 11, 11.; only three numbers whose sum is 32": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 11]}
    },
    "linear_num_value_heads is 24, which must be a multiple of linear_num_key_heads, 16": {
        "linear_num_value_heads": 24
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_linear_attention_does_not_support_is_named(message, tmp_path):
    config = json.loads((PUBLISHED / "Qwen3.5-35B-A3B-text.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | REFUSED[message]))
    with pytest.raises(ValueError, match=message):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen3-Next-80B-A3B-Instruct", 79.67), ("Qwen3.5-35B-A3B-text", 34.66), ("Qwen3.5-397B-A17B-text", 396.35)],
)
def test_the_published_sizes_add_up_to_the_models_names(name, billions):
    shape = read_shape(PUBLISHED / f"{name}.json")
    assert FAMILIES[shape.family].num_parameters(shape) / 1e9 == pytest.approx(billions, abs=0.01)
    num_linear = sum(number for block, number in shape.attentions.items() if block.is_linear)
    assert num_linear == 3 * shape.num_layers // 4 and shape.attention.rotary_dim == 64


def test_qwen3_5_has_the_published_number_of_parameters():
    """396,346,350,336 is the number of the text model's elements in the release of Qwen3.5-397B-A17B (revision
    8472618112ab), without its vision tower and its multi-token head."""
    shape = read_shape(PUBLISHED / "Qwen3.5-397B-A17B-text.json")
    assert FAMILIES[shape.family].num_parameters(shape) == 396_346_350_336


@pytest.mark.parametrize(("name", "number"), [("MiniMax-M2", 228_689_764_864), ("gemma-3-1b-it", 999_885_952)])
def test_other_models_have_the_published_number_of_parameters(name, number):
    """The numbers of the hub for MiniMaxAI/MiniMax-M2 and google/gemma-3-1b-it."""
    shape = read_shape(PUBLISHED / f"{name}.json")
    assert FAMILIES[shape.family].num_parameters(shape) == number


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("Qwen2.5-VL-32B-Instruct", 33_452_718_336),
        ("Qwen2.5-VL-72B-Instruct", 73_410_777_344),
        ("Qwen3-VL-235B-A22B-Instruct", 235_670_022_896),
    ],
)
def test_models_with_towers_have_the_published_number_of_parameters(name, number):
    """The numbers of the hub for the first two; the hub says 236B of the third."""
    shape = read_shape(PUBLISHED / f"{name}.json")
    assert FAMILIES[shape.family].num_parameters(shape) + shape.vision.num_parameters == number


@pytest.mark.parametrize("name", ["Qwen2.5-VL-72B-Instruct", "Qwen3-VL-235B-A22B-Instruct"])
def test_a_trained_tower_is_whole_on_the_ranks_of_the_first_stage(name):
    frozen = read_shape(PUBLISHED / f"{name}.json")
    shape, family = PolicyConfig(vision_tower="trained").adapted(frozen), FAMILIES[frozen.family]
    number = family.num_parameters(frozen) + frozen.vision.num_parameters
    assert family.num_parameters(shape) == number and PolicyConfig().adapted(frozen) == frozen
    shards = [megatron_shards(shape, Mesh(tensor=2, pipeline=2), rank) for rank in range(4)]
    held = [{shard for shard in one if shard.hf_name.startswith(TOWER)} for one in shards]
    whole = {Shard(key, box, key, box) for key, box in ((k, tuple((0, n) for n in e)) for k, e in shape.vision.tower)}
    assert held == [whole, whole, set(), set()]
    assert not any(is_vocabulary(shard.local_name) for shard in whole)


def test_kimi_has_the_published_number_of_tensors():
    """The release of Kimi-K2.5 has 208,550 tensors. An expert's matrix has three in int4, the tower and the projector
    have 335."""
    shape = read_shape(PUBLISHED / "Kimi-K2.5-text.json")
    names = FAMILIES[shape.family].file_tensors(shape)
    quantised = sum(".experts." in name for name in names)
    assert quantised == 60 * 384 * 3 and len(names) + 2 * quantised + 335 == 208_550


def test_the_sections_of_a_vision_model_change_nothing_for_text(tmp_path):
    config = json.loads((PUBLISHED / "Qwen3.5-35B-A3B-text.json").read_text())
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    assert read_shape(tmp_path) == read_shape(PUBLISHED / "Qwen3.5-35B-A3B-text.json")
