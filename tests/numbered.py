"""Tiny models in which every element is its own number, the part of them that a rank holds, and a way to carry out a
plan with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

import numpy as np
from small_models import changed, model

from megatron_rl.layout import Copy, Engines, TransferPlan
from megatron_rl.layout.regions import Side, intersect_sides
from megatron_rl.layout.transfer import plan_regions
from megatron_rl.models import FAMILIES, Shard, slices
from megatron_rl.models.placement import Placed, Placement
from megatron_rl.models.shards import local_extents
from megatron_rl.types import DeltaNet, LatentAttention, Mixture, ModelShape, Rope
from megatron_rl.types.mamba import NO_ATTENTION, NO_MLP, Mamba2, SquaredReluMixture, SquaredReluMlp

_DENSE = model("", 6, 5, 8, 4, 3, 24, 70)
_EXPERTS = Mixture(num_experts=8, num_active=2, ffn_size=8)
_SHARED = replace(_EXPERTS, shared_ffn_size=16)
_LATENT = LatentAttention(8, query_rank=8, kv_rank=6, nope_dim=3, rope_dim=2, value_dim=4, rope=Rope(1e4))
_BIASED = changed(_DENSE, range(2, 6), mlp=_SHARED)
_DEEPSEEK = changed(_BIASED, attention=_LATENT)
_DELTA = DeltaNet(num_key_heads=16, num_value_heads=32, key_size=3, value_size=2, convolution=4, interleaved=False)
_LINEAR = changed(_DENSE, (0, 1, 2, 4), attention=_DELTA)
_MAMBA = Mamba2(num_key_heads=16, num_value_heads=32, key_size=3, value_size=2, convolution=4)
_SQUARED = SquaredReluMixture(num_experts=8, num_active=2, ffn_size=8, shared_ffn_size=16)
_HYBRID = changed(changed(_DENSE, mlp=NO_MLP), (2, 4), attention=_MAMBA)
_HYBRID = changed(_HYBRID, (1, 3), attention=NO_ATTENTION, mlp=_SQUARED)
_HYBRID = changed(_HYBRID, (5,), attention=NO_ATTENTION, mlp=SquaredReluMlp(24))
SHAPES = {
    **{name: changed(_DENSE, family=name) for name in ("llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3")},
    "qwen3_tied": changed(_DENSE, family="qwen3", output="embedding"),
    "qwen3_moe": changed(_DENSE, family="qwen3_moe", mlp=_EXPERTS, output="embedding"),
    "mixtral": changed(_DENSE, family="mixtral", mlp=_EXPERTS),
    "gpt_oss": changed(_DENSE, family="gpt_oss", mlp=replace(_EXPERTS, clamp=7.0)),
    "qwen3_next": changed(
        changed(_LINEAR, range(1, 6), mlp=_SHARED), family="qwen3_next", attention={"interleaved": True}
    ),
    "qwen3_5_head": changed(_LINEAR, family="qwen3_5_text", output="embedding", multi_token=True),
    "qwen3_5_text": changed(_LINEAR, family="qwen3_5_text", output="embedding"),
    "qwen3_5_moe_text": changed(_LINEAR, family="qwen3_5_moe_text", mlp=_SHARED),
    "deepseek_v3": changed(_DEEPSEEK, family="deepseek_v3"),
    "deepseek_v3_head": changed(_DEEPSEEK, family="deepseek_v3", multi_token=True),
    "deepseek_v3_direct": changed(_DEEPSEEK, family="deepseek_v3", attention={"query_rank": 0}),
    **{name: changed(_DEEPSEEK, family=name) for name in ("kimi_k2", "glm4_moe_lite")},
    "gemma3_text": changed(_DENSE, family="gemma3_text", output="embedding"),
    "minimax_m2": changed(_DENSE, family="minimax_m2", mlp=_EXPERTS),
    "nemotron_h": changed(_HYBRID, family="nemotron_h"),
    "glm4_moe": changed(_BIASED, family="glm4_moe", attention={"qkv_bias": True, "norms": "head"}),
}
"""Numbers of heads, FFN sizes and numbers of experts divide by at least 4; the other sizes need not divide by
anything."""
assert {shape.family for shape in SHAPES.values()} == set(FAMILIES)

Tensors = dict[str, np.ndarray]


def numbered(shape: ModelShape) -> Tensors:
    """HF tensors in which each element is a number that no other element has."""
    tensors, count = {}, 0
    for name, extent in FAMILIES[shape.family].hf_tensors(shape).items():
        tensors[name] = np.arange(count, count + prod(extent)).reshape(extent)
        count += prod(extent)
    return tensors


def cut(shards: Iterable[Shard], hf: Tensors) -> Tensors:
    """The local parameters that a rank's shards describe. Every element is written once."""
    shards = list(shards)
    local = {name: np.full(extent, -1) for name, extent in local_extents(shards).items()}
    for shard in shards:
        target = local[shard.local_name][slices(shard.local_box)]
        assert (target == -1).all(), f"{shard} writes an element twice"
        target[...] = hf[shard.hf_name][slices(shard.hf_box)]
    for name, array in local.items():
        assert (array >= 0).all(), f"{name} has elements that no shard describes"
    return local


def join(shards: Iterable[Shard], local: Tensors, hf: Tensors, times: Tensors) -> None:
    """Write a rank's parameters back into HF tensors, and count how often each element was written."""
    for shard in shards:
        source = local[shard.local_name][slices(shard.local_box)]
        hf[shard.hf_name][slices(shard.hf_box)] = source
        times[shard.hf_name][slices(shard.hf_box)] += 1


def plan_shards(sources: Sequence[Sequence[Shard]], destinations: Sequence[Sequence[Shard]]) -> TransferPlan:
    """The plan from any source ranks to any destination ranks, where each rank is given as a list of shards."""
    sides = [
        Side.of(
            [Placed(Placement(s.local_name, ((s.hf_name, s.hf_box, s.local_box),), None), "", "") for s in shards]
            for shards in ranks
        )
        for ranks in (sources, destinations)
    ]
    return plan_regions(intersect_sides(*sides), len(sources), Engines(tensor=len(destinations)))


def carry_out(plan: TransferPlan, sources: list[Tensors], wanted: list[Tensors], max_bytes: int = 2**30) -> None:
    """Carry out a plan as its two sides do, and check what each engine rank holds at the end.

    Each trainer rank asks for what it sends, each engine rank for what it receives; both cut their copies into pieces
    of `max_bytes`, and must come to the same pieces in the same order. Engines in a chain take the pieces from the one
    before. `wanted`: of the ranks of one engine. Every element is written once, and is its own number.
    """
    under_way: dict[tuple[int, int], list[tuple[Copy, np.ndarray]]] = {}
    for source, parameters in enumerate(sources):
        for destination, copies in plan.sent_by(source).items():
            pieces = [piece for copy in copies for piece in copy.rows(max_bytes)]
            under_way[source, destination] = [
                (piece, parameters[piece.source_name][slices(piece.source_box)].ravel()) for piece in pieces
            ]
    ranks: list[Tensors] = []
    for rank in range(plan.num_destinations):
        want, upstream = wanted[rank % len(wanted)], plan.upstream(rank)
        written = {name: np.full_like(array, -1) for name, array in want.items()}
        for source, copies in plan.received_by(rank).items():
            pieces = [piece for copy in copies for piece in copy.rows(max_bytes)]
            if upstream is None:
                sent = under_way.pop((source, rank))
                assert [piece for piece, _ in sent] == pieces, f"{source} and {rank} do not agree"
                arrays = [array for _, array in sent]
            else:
                before = ranks[upstream]
                arrays = [before[piece.destination_name][slices(piece.destination_box)].ravel() for piece in pieces]
            for piece, array in zip(pieces, arrays, strict=True):
                target = written[piece.destination_name][slices(piece.destination_box)]
                assert target.size and (target == -1).all(), f"{piece} writes nothing, or an element twice"
                target[...] = array.reshape(target.shape)
        for name in want:
            np.testing.assert_array_equal(written[name], want[name], f"{name} on engine rank {rank}")
        ranks.append(written)
    assert not under_way, f"these were sent but not received: {list(under_way)}"
