"""Tiny models whose elements carry their own number, and what a rank holds of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

import numpy as np

from megatron_rl.layout import FAMILIES, Shard, slices
from megatron_rl.layout.shards import local_extents
from megatron_rl.types import Experts, LatentAttention, ModelShape

_DENSE = ModelShape(
    family="",
    num_layers=6,
    hidden_size=5,
    num_heads=8,
    num_kv_heads=4,
    head_dim=3,
    ffn_size=24,
    vocab_size=70,
    rope_theta=1e4,
    norm_eps=1e-6,
    max_positions=64,
    tied_embeddings=False,
)
_EXPERTS = Experts(num_experts=8, num_active=2, ffn_size=8)
_LATENT = LatentAttention(query_rank=8, kv_rank=6, nope_dim=3, rope_dim=2, value_dim=4)
_DEEPSEEK = replace(
    _DENSE,
    family="deepseek_v3",
    experts=replace(_EXPERTS, shared_ffn_size=16, first_dense_layers=2),
    latent=_LATENT,
)
SHAPES = {
    **{name: replace(_DENSE, family=name) for name in ("llama", "qwen2", "qwen3", "olmo2", "olmo3")},
    "qwen3_tied": replace(_DENSE, family="qwen3", tied_embeddings=True),
    "qwen3_moe": replace(_DENSE, family="qwen3_moe", experts=_EXPERTS, tied_embeddings=True),
    "mixtral": replace(_DENSE, family="mixtral", experts=_EXPERTS),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v3_direct": replace(_DEEPSEEK, latent=replace(_LATENT, query_rank=0)),
}
"""Heads, FFNs and experts divide by 4 and more, hidden, head size and vocabulary by nothing."""
assert {shape.family for shape in SHAPES.values()} == set(FAMILIES)

Tensors = dict[str, np.ndarray]


def numbered(shape: ModelShape) -> Tensors:
    """HF tensors in which every element is its own global number."""
    tensors, count = {}, 0
    for name, extent in FAMILIES[shape.family].hf_tensors(shape).items():
        tensors[name] = np.arange(count, count + prod(extent)).reshape(extent)
        count += prod(extent)
    return tensors


def cut(shards: Iterable[Shard], hf: Tensors) -> Tensors:
    """The local parameters of a rank, as its shards say; every element is written once."""
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
