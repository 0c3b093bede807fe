"""Tiny shapes of every family that vLLM serves, their Hugging Face weights, and a rank's part of them."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.tools.bench.gpu_day.parts import cut
from megatron_rl.tools.bench.gpu_day.sizes import hf_weights
from megatron_rl.types import Experts, LatentAttention, ModelShape

__all__ = ["SHAPES", "cut", "hf_weights"]

_DENSE = ModelShape("qwen3", 2, 32, 4, 2, 16, 64, 40, 1e4, 1e-6, 128, False)
_EXPERTS = Experts(num_experts=4, num_active=2, ffn_size=24)
SHAPES = {
    "llama": replace(_DENSE, family="llama", tied_embeddings=True),
    "qwen2": replace(_DENSE, family="qwen2"),
    "qwen3": _DENSE,
    "qwen3_moe": replace(_DENSE, family="qwen3_moe", experts=_EXPERTS),
    "mixtral": replace(_DENSE, family="mixtral", experts=_EXPERTS),
    "deepseek_v3": replace(
        _DENSE,
        family="deepseek_v3",
        experts=replace(_EXPERTS, shared_ffn_size=24, first_dense_layers=1, score="sigmoid"),
        latent=LatentAttention(query_rank=16, kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8),
    ),
}
