"""Tiny shapes of every family that vLLM serves, their Hugging Face weights, and a rank's part of them."""

from __future__ import annotations

from dataclasses import replace

from small_models import changed, model

from megatron_rl.tools.bench.gpu_day.parts import cut
from megatron_rl.tools.bench.gpu_day.sizes import hf_weights
from megatron_rl.types import LatentAttention, Mixture, Rope

__all__ = ["SHAPES", "cut", "hf_weights"]

_DENSE = model("llama", 2, 32, 4, 2, 16, 64, 40, 128)
_EXPERTS = Mixture(num_experts=4, num_active=2, ffn_size=24)
SHAPES = {
    "llama": changed(_DENSE, output="embedding"),
    "qwen2": changed(_DENSE, family="qwen2"),
    "qwen3": changed(_DENSE, family="qwen3"),
    "qwen3_moe": changed(_DENSE, family="qwen3_moe", mlp=_EXPERTS),
    "mixtral": changed(_DENSE, family="mixtral", mlp=_EXPERTS),
    "deepseek_v3": changed(
        changed(_DENSE, (1,), mlp=replace(_EXPERTS, shared_ffn_size=24, score="sigmoid")),
        family="deepseek_v3",
        attention=LatentAttention(4, query_rank=16, kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8, rope=Rope(1e4)),
    ),
}
