"""Qwen3 (dense) has pre-norm layers, grouped-query attention with per-head q and k norms, a gated MLP and no biases
(arXiv:2505.09388)."""

from __future__ import annotations

from megatron_rl.models.families.rows import (
    ATTENTION_OUTPUT,
    ENDS,
    GATED_MLP,
    HEAD_NORMS,
    INPUT_NORM,
    MLP_NORM,
    QKV_WEIGHT,
)
from megatron_rl.models.families.windows import upper_layers
from megatron_rl.models.family import DESCRIBED, Family

QWEN3 = Family(
    name="qwen3",
    absent={"num_key_value_heads": 32, "head_dim": 128},
    vllm_model="Qwen3ForCausalLM",
    attention=(INPUT_NORM, QKV_WEIGHT, *HEAD_NORMS, ATTENTION_OUTPUT),
    dense=(MLP_NORM, *GATED_MLP),
    read_config=upper_layers,
    known=DESCRIBED | {"dual_chunk_attention_config": None},
    **ENDS,
)
