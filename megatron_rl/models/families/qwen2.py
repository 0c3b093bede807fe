"""Qwen2.5 (dense) has Llama's layers with biases in q, k and v (arXiv:2412.15115)."""

from __future__ import annotations

from megatron_rl.models.families.rows import (
    ATTENTION_OUTPUT,
    ENDS,
    GATED_MLP,
    INPUT_NORM,
    MLP_NORM,
    QKV_BIAS,
    QKV_WEIGHT,
)
from megatron_rl.models.families.windows import upper_layers
from megatron_rl.models.family import DESCRIBED, Family

QWEN2 = Family(
    name="qwen2",
    absent={"num_key_value_heads": 32},
    vllm_model="Qwen2ForCausalLM",
    attention=(INPUT_NORM, QKV_WEIGHT, QKV_BIAS, ATTENTION_OUTPUT),
    dense=(MLP_NORM, *GATED_MLP),
    read_config=upper_layers,
    known=DESCRIBED | {"qk_norm": False, "dual_chunk_attention_config": None},
    **ENDS,
)
