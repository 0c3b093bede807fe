"""GLM-4.5, 4.6 and 4.7 (arXiv:2508.06471): grouped-query attention that rotates a half of each head, and DeepSeek-V3's
mixture. Checkpoints differ in biases of q, k and v and in q and k norms; vLLM holds the routers in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.models.config_values import flag
from megatron_rl.models.families.biased_mixture import (
    BIASED_MIXTURE,
    TOKEN_AFTER_NEXT,
    fault_in_float16,
    read_experts,
    served_in_float32,
)
from megatron_rl.models.families.rows import (
    ATTENTION_OUTPUT,
    ENDS,
    GATED_MLP,
    HEAD_NORMS,
    INPUT_NORM,
    MLP_NORM,
    QKV_BIAS,
    QKV_WEIGHT,
)
from megatron_rl.models.family import WINDOWLESS, Family


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    bias, norms = flag(config, "attention_bias"), flag(config, "use_qk_norm")
    return {"softmax": {"qkv_bias": bias, "norms": "head" if norms else "none"}, **read_experts(config)}


GLM4_MOE = Family(
    name="glm4_moe",
    absent={"num_key_value_heads": 8},
    vllm_model="Glm4MoeForCausalLM",
    attention=(
        INPUT_NORM,
        QKV_WEIGHT,
        replace(QKV_BIAS, when=lambda attention: attention.qkv_bias),
        *(replace(rule, when=lambda attention: attention.norms == "head") for rule in HEAD_NORMS),
        ATTENTION_OUTPUT,
    ),
    dense=(MLP_NORM, *GATED_MLP),
    mixture=served_in_float32(BIASED_MIXTURE),
    read_config=_read,
    engine_fault=fault_in_float16,
    rotary_share=0.5,
    known={key: value for key, value in WINDOWLESS.items() if key != "attention_bias"},
    ignored=(TOKEN_AFTER_NEXT,),
    **ENDS,
)
