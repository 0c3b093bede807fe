"""Llama 3 has pre-norm layers, grouped-query attention, a gated MLP and no biases (arXiv:2407.21783)."""

from __future__ import annotations

from megatron_rl.models.families.rows import ENDS, GATED_MLP, LLAMA_ATTENTION, MLP_NORM
from megatron_rl.models.family import WINDOWLESS, Family
from megatron_rl.models.rule import Ignored

LLAMA = Family(
    name="llama",
    vllm_model="LlamaForCausalLM",
    attention=LLAMA_ATTENTION,
    dense=(MLP_NORM, *GATED_MLP),
    ignored=(
        Ignored(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", "rotary buffers follow from config.json"),
    ),
    known=WINDOWLESS | {"bias": False, "qkv_bias": False, "logit_scale": 1.0},
    **ENDS,
)
