"""The rows of adapters: on any mesh the ranks have each element once, and B's rows are the weight's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

import pytest
from numbered import SHAPES
from small_models import changed

from megatron_rl.models import FAMILIES, linear_layers, megatron_shards, vllm_shards, volume
from megatron_rl.models.adapters import A, B, is_adapter
from megatron_rl.types import Adapters, DeltaNet, Mesh

RANK = 3
MESHES = {
    "tp2-pp2": Mesh(tensor=2, pipeline=2),
    "tp4": Mesh(tensor=4),
    "tp8": Mesh(tensor=8),
    "ep4": Mesh(data=4, expert=4),
    "tp2-ep4-etp1": Mesh(tensor=2, data=2, expert=4, expert_tensor=1),
}
"""With tp8 two ranks share a KV head."""
CASES = [
    *((name, mesh) for name in ("qwen3", "qwen2", "gpt_oss", "deepseek_v3") for mesh in ("tp2-pp2", "tp4")),
    *((name, mesh) for name in ("qwen3_moe", "deepseek_v3") for mesh in ("ep4", "tp2-ep4-etp1")),
    *((name, mesh) for name in ("qwen3_next", "qwen3_5_moe_text") for mesh in ("tp2-pp2", "tp2-ep4-etp1")),
    ("qwen3", "tp8"),
]
SOME = ("v_proj", "q_proj", "o_proj", "lm_head")
SOME_OF = {
    "deepseek_v3": ("q_b_proj", "o_proj", "lm_head"),
    "qwen3_next": ("in_proj_ba", "q_proj", "out_proj"),
    "qwen3_5_moe_text": ("in_proj_z", "in_proj_a", "v_proj"),
}


def adapted(name: str, *targets: str):
    return replace(SHAPES[name], adapters=Adapters(RANK, 6.0, targets))


@pytest.mark.parametrize("fused", [False, True], ids=["local", "fused"])
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_the_ranks_of_a_mesh_partition_a_and_b(name, mesh, fused):
    shape, mesh = adapted(name), MESHES[mesh]
    expected = {k: v for k, v in FAMILIES[shape.family].hf_tensors(shape).items() if is_adapter(k)}
    parts = [(rank, s) for rank in range(mesh.world_size) for s in megatron_shards(shape, mesh, rank, fused)]
    distinct = {(s.hf_name, s.hf_box) for _, s in parts if is_adapter(s.hf_name)}
    elements = Counter()
    for hf_name, box in distinct:
        elements[hf_name] += prod(stop - start for start, stop in box)
    assert elements == {name: prod(extents) for name, extents in expected.items()}
    assert len(expected) == 2 * sum(
        name.removesuffix("weight") + f"{A}.weight" in expected for name in FAMILIES[shape.family].hf_tensors(shape)
    )


@pytest.mark.parametrize(("name", "mesh"), CASES)
@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("fused", [False, True], ids=["local", "fused"])
def test_a_rank_has_the_rows_of_b_and_the_columns_of_a_that_it_has_of_the_weight(name, mesh, some, fused):
    shape, mesh = adapted(name, *(SOME_OF.get(name, SOME) if some else ())), MESHES[mesh]
    for rank in range(mesh.world_size):
        shards = megatron_shards(shape, mesh, rank, fused)
        weights = [s for s in shards if not is_adapter(s.hf_name)]
        columns = {(s.hf_name, s.hf_box[1]) for s in weights if len(s.hf_box) == 2}
        for s in (s for s in shards if f".{A}." in s.hf_name):
            weight = s.hf_name.replace(f"{A}.", "")
            # A rank may have rows of q, and none of the k that another one shares with it.
            assert (weight, s.hf_box[1]) in columns or weight not in {name for name, _ in columns}
            assert s.hf_box[0] == (0, RANK)
        for name_of_b in {s.local_name for s in shards if f".{B}." in s.hf_name}:
            of_b = sorted((s for s in shards if s.local_name == name_of_b), key=lambda s: s.local_box)
            rows = [(s.hf_name.replace(f"{B}.", ""), s.hf_box[0]) for s in of_b]
            of_weight = [s for s in weights if s.local_name == name_of_b.replace(B, "weight")]
            in_order = [(s.hf_name, s.hf_box[0]) for s in sorted(of_weight, key=lambda s: s.local_box)]
            assert rows == [one for one in in_order if one in rows], "in the order of the weight's, without the others"
            starts = [s.local_box[0][0] for s in of_b]
            assert starts == [sum(volume(s.hf_box) // RANK for s in of_b[:k]) for k in range(len(of_b))]


@pytest.mark.parametrize("targets", [(), ("in_proj_qkv", "in_proj_a")], ids=["all", "some"])
def test_projections_into_linear_attention_are_one_layer(targets):
    """By hand: rank 1 of 2, of 2 key heads of 3 rows and 4 value heads of 2 rows: q, k and v are 6, 6 and 8 rows, z is
    8, b and a are 4."""
    delta = DeltaNet(num_key_heads=2, num_value_heads=4, key_size=3, value_size=2, convolution=4, interleaved=False)
    shape = changed(adapted("qwen3_5_text", *targets), (0, 1, 2, 4), attention=delta)
    of_b = [
        ("qkv", (3, 6)),
        ("qkv", (9, 12)),
        ("qkv", (16, 20)),
        *(() if targets else (("z", (4, 8)), ("b", (2, 4)))),
        ("a", (2, 4)),
    ]
    for part, expected in ((A, [(name, (0, RANK)) for name in dict.fromkeys(name for name, _ in of_b)]), (B, of_b)):
        local_name = f"decoder.layers.0.self_attention.in_proj.{part}"
        held = [s for s in megatron_shards(shape, Mesh(tensor=2), 1) if s.local_name == local_name]
        prefix, ending = "model.layers.0.linear_attn.in_proj_", f".{part}.weight"
        found = [(s.hf_name.removeprefix(prefix).removesuffix(ending), s.hf_box[0]) for s in held]
        assert found == expected
        assert [row for s in held for row in range(*s.local_box[0])] == list(range(held[-1].local_box[0][1]))


def test_fused_layers_have_their_own_names():
    shape, mesh = adapted("qwen3_moe"), Mesh(data=2, expert=2)
    names = {s.local_name for s in megatron_shards(shape, mesh, 1, fused_norms=True) if is_adapter(s.local_name)}
    assert {
        "decoder.layers.2.mlp.experts.linear_fc1.lora_A3",
        "decoder.layers.2.mlp.experts.linear_fc2.lora_B0",
    } <= names
    assert "decoder.layers.2.self_attention.linear_proj.lora_A" in names


def test_engines_have_the_base_model():
    shape = adapted("qwen3")
    assert vllm_shards(shape, 2, 1) == vllm_shards(shape.base, 2, 1)


def test_targets_choose_layers_by_name():
    shape = adapted("qwen3", "q_proj", "down_proj")
    names = [name for name in FAMILIES["qwen3"].hf_tensors(shape) if is_adapter(name)]
    assert {name.split(".")[-3] for name in names} == {"q_proj", "down_proj"}
    assert len(names) == 2 * 2 * shape.num_layers
    both = [name for name in FAMILIES["qwen3"].hf_tensors(adapted("qwen3", "q_proj", "lm_head")) if is_adapter(name)]
    assert both[:2] == ["lm_head.lora_A.weight", "lm_head.lora_B.weight"] and len(both) == 2 + 2 * shape.num_layers
    assert linear_layers(SHAPES["qwen3"]) == [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ]


@pytest.mark.parametrize(("stabilised", "scale"), [(False, 4.0), (True, 8.0)])
def test_the_scale(stabilised, scale):
    assert Adapters(4, 16.0, rank_stabilised=stabilised).scale == scale
