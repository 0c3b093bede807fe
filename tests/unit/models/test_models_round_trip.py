"""Every family: HF -> all ranks -> HF is the same bits, and every element has as many copies as it
should. Pure slices, no process."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import cover
import numpy as np
import pytest
from numbered import SHAPES, Tensors, cut, join, numbered
from small_models import changed

from megatron_rl.models import FAMILIES, Shard, megatron_shards, vllm_shards
from megatron_rl.models.vision import read_vision
from megatron_rl.types import Mesh, ModelShape, SoftmaxAttention

PIPELINES = (
    dict(),
    dict(pipeline=2),
    dict(pipeline=2, layers=(4, 2)),
    dict(pipeline=3),
    dict(pipeline=3, layers=(1, 3, 2)),
    dict(pipeline=2, virtual=2, layers=(1, 2, 2, 1)),
    dict(pipeline=3, virtual=2),
)


def round_trip(shape: ModelShape, ranks: list[list[Shard]]) -> Tensors:
    """How often each element came back."""
    hf = numbered(shape)
    back = {name: np.full_like(array, -1) for name, array in hf.items()}
    times = {name: np.zeros_like(array) for name, array in hf.items()}
    for shards in ranks:
        join(shards, cut(shards, hf), back, times)
    for name in hf:
        np.testing.assert_array_equal(back[name], hf[name], name)
    return times


def smallest_data(tensor: int, options: dict) -> int:
    """Data-parallel ranks that EP x ETP asks for."""
    wanted = options["expert"] * (options["expert_tensor"] or tensor)
    return max(1, wanted // (tensor * options["context"]))


def is_whole(name: str, shape: ModelShape, fused: bool) -> bool:
    """Whether each TP rank holds the whole tensor."""
    if "mixer.norm" in name:  # of the heads of Mamba-2
        return False
    if "norm" in name:
        wide = shape.attention.norms == "full" and ("q_norm" in name or "k_norm" in name)
        return not wide
    ends = (".gate.weight", "shared_expert_gate.weight", "e_score_correction_bias", "o_proj.bias", "eh_proj.weight")
    if name.endswith(ends) or ".router." in name or name == "mtp.fc.weight":
        return True
    return fused and ("q_a_proj" in name or "kv_a_proj" in name)


def check_copies(shape: ModelShape, mesh: Mesh, fused: bool) -> None:
    times = round_trip(shape, [megatron_shards(shape, mesh, rank, fused) for rank in range(mesh.world_size)])
    for name, count in times.items():
        if ".experts." in name:
            wanted = mesh.stage_size // (mesh.expert * mesh.expert_ways)
            if name.endswith("down_proj.bias"):  # what all ranks that share an expert hold
                wanted *= mesh.expert_ways
        else:
            wanted = mesh.context * mesh.data * (mesh.tensor if is_whole(name, shape, fused) else 1)
        if "embed_tokens" in name and mesh.pipeline > 1:
            wanted *= 1 + shape.tied_embeddings + shape.multi_token  # the last stage's copies
        assert (count == wanted).all(), f"{name} on {mesh}: {np.unique(count)} copies, not {wanted}"


def test_each_layer_has_the_extents_of_its_own_blocks():
    """Layers of one model differ in heads, in their window and in the size of their MLP."""
    shape = changed(SHAPES["qwen3"], (1, 3), attention={"num_kv_heads": 8, "head_dim": 6, "window": 4}, mlp={"size": 8})
    tensors = FAMILIES["qwen3"].hf_tensors(shape)
    for layer, extents in ((0, ((12, 5), (3,), (24, 5))), (1, ((48, 5), (6,), (8, 5)))):
        ends = ("self_attn.k_proj.weight", "self_attn.q_norm.weight", "mlp.up_proj.weight")
        assert tuple(tensors[f"model.layers.{layer}.{end}"] for end in ends) == extents
    check_copies(shape, Mesh(tensor=2, pipeline=2), False)
    assert repr(shape).count("Layer(") == 5 and "2 x Layer(" in repr(shape), "equal layers in a row are named once"


MIXTURES = [name for name, shape in SHAPES.items() if shape.mixture]


@pytest.mark.parametrize("name", cover.essential(SHAPES, "llama", "qwen2", "qwen3_tied", "olmo3", "deepseek_v3"))
def test_megatron_holds_every_element(name):
    shape = SHAPES[name]
    for tensor, pipeline, fused in cover.cases((1, 2, 4), PIPELINES, (False, True)):
        check_copies(shape, Mesh(tensor=tensor, **pipeline), fused)


STAGES = {"pp1": PIPELINES[0], "pp3": PIPELINES[4], "pp2_vpp2": PIPELINES[5]}


@pytest.mark.parametrize(
    ("stages", "name"),
    cover.essential(product(STAGES, MIXTURES), ("pp1", "qwen3_moe"), ("pp3", "mixtral"), ("pp2_vpp2", "deepseek_v3")),
)
def test_megatron_holds_every_expert(stages, name):
    shape, pipeline = SHAPES[name], STAGES[stages]
    for tensor, expert, ways, context in cover.cases((1, 2, 4), (1, 2, 4), (None, 1, 2), (1, 2)):
        options = dict(expert=expert, expert_tensor=ways, context=context)
        mesh = Mesh(tensor=tensor, data=smallest_data(tensor, options), **pipeline, **options)
        check_copies(shape, mesh, fused=tensor == 2)


@pytest.mark.parametrize("name", cover.essential(SHAPES, "qwen2", "qwen3_tied", "olmo3", "mixtral", "deepseek_v3"))
def test_vllm_holds_every_element(name):
    shape = SHAPES[name].served
    splits_norms = name == "minimax_m2"
    few_ways = (shape.attention.norms == "full" and not splits_norms) or shape.attention.sinks
    for tensor, expert_parallel, pipeline in cover.cases(
        (1, 2, 4) if few_ways else (1, 2, 4, 8), (False, True), (1, 4)
    ):
        ranks = range(tensor * pipeline)
        times = round_trip(shape, [vllm_shards(shape, tensor, rank, expert_parallel, pipeline) for rank in ranks])
        for hf_name, count in times.items():
            if ".experts." in hf_name:
                assert (count == 1).all(), hf_name
            of_kv_heads = ("k_proj", "v_proj", *(("k_norm",) if splits_norms else ()))
            if any(name in hf_name for name in of_kv_heads) and isinstance(shape.attention, SoftmaxAttention):
                assert (count == max(1, tensor // shape.attention.num_kv_heads)).all(), hf_name
            if ("q_norm" in hf_name or "k_norm" in hf_name) and not splits_norms:
                assert (count == tensor).all(), hf_name


@pytest.mark.parametrize(
    ("kind", "whole"),
    [
        ("qwen2_5_vl", ["attn.proj.bias", "mlp.down_proj.bias", "norm1.weight", "norm2.weight"]),
        (
            "qwen3_5",
            ["attn.proj.bias", "mlp.linear_fc2.bias", *(f"norm{n}.{e}" for n in (1, 2) for e in ("bias", "weight"))],
        ),
    ],
)
def test_vllm_holds_every_element_of_a_tower(kind, whole):
    tower = dict(depth=2, hidden_size=8, intermediate_size=12, out_hidden_size=5, patch_size=2)
    config = {
        "model_type": kind,
        "image_token_id": 3,
        "vision_config": tower,
        "rope_scaling": {"mrope_section": [1] * 3},
    }
    shape = replace(SHAPES["qwen3"], vision=replace(read_vision(config), trained=True))
    times = round_trip(shape, [vllm_shards(shape, 4, rank) for rank in range(4)])
    copies = {name: set(np.unique(times[name])) for name in shape.tower}
    assert all(one in ({1}, {4}) for one in copies.values())
    block = "visual.blocks.1."
    assert sorted(n.removeprefix(block) for n, one in copies.items() if one == {4} and n.startswith(block)) == whole
    ends = {
        n for n, one in copies.items() if one == {4} and ".blocks." not in n and "norm" not in n and "ln_q" not in n
    }
    assert len(ends) == (2 if kind == "qwen2_5_vl" else 4), "weights and places of patches, and what the merger adds"


def test_experts_that_do_not_divide_go_to_vllms_first_ranks():
    shape = changed(SHAPES["mixtral"], mlp={"num_experts": 6})
    for rank, experts in enumerate(("01", "23", "4", "5")):
        shards = vllm_shards(shape, 4, rank, expert_parallel=True)
        assert {s.hf_name.split(".")[5] for s in shards if ".experts." in s.hf_name} == set(experts)
