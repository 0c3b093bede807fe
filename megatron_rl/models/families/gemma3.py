"""Gemma 3's model for text (arXiv:2503.19786) has norms before and after attention and MLP, all stored minus 1, a
window in five of six layers, which have a rotation of their own, an MLP with GELU, and an embedding times
sqrt(hidden size).

The published 1B is this model alone; the others have a vision tower, and `composite` has the names of their folders.
Source: transformers, modeling_gemma3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.models.config_values import number, size
from megatron_rl.models.families.olmo import OLMO2
from megatron_rl.models.families.rows import (
    ATTENTION_OUTPUT,
    ENDS_ON_EVERY_STAGE,
    GATED_MLP,
    HEAD_NORMS,
    INPUT_NORM,
    MLP_NORM,
    QKV_WEIGHT,
    Ends,
    rows_of,
)
from megatron_rl.models.families.windows import window
from megatron_rl.models.family import DESCRIBED, Family
from megatron_rl.models.rule import HfTensor


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    every, num_layers = size(config, "sliding_window_pattern", 6), size(config, "num_hidden_layers")
    return {
        "softmax": {"scale": number(config, "query_pre_attn_scalar") ** -0.5},
        "dense": {"activation": "gelu_tanh"},
        **window(config, [layer for layer in range(num_layers) if (layer + 1) % every], needed=True),
    }


_ENDS: Ends = {**ENDS_ON_EVERY_STAGE, "embedding": replace(ENDS_ON_EVERY_STAGE["embedding"], scaled=True)}
GEMMA3_TEXT = Family(
    name="gemma3_text",
    vllm_model="Gemma3ForCausalLM",
    attention=(
        replace(INPUT_NORM, zero_centred=True),
        QKV_WEIGHT,
        *HEAD_NORMS,
        ATTENTION_OUTPUT,
        *rows_of(OLMO2, "post_attention_layernorm.weight", "post_feedforward_layernorm.weight"),
    ),
    dense=(replace(MLP_NORM, hf=(HfTensor("pre_feedforward_layernorm.weight", ("hidden",)),)), *GATED_MLP),
    read_config=_read,
    absent={
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256},
        **{"vocab_size": 262_208, "max_position_embeddings": 131_072, "sliding_window": 4096, "rms_norm_eps": 1e-6},
        **{"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "tie_word_embeddings": True},
    },
    known={key: value for key, value in DESCRIBED.items() if key != "hidden_act"}
    | {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False}
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    **_ENDS,
)
