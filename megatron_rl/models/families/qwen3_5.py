"""Qwen3.5 has Qwen3-Next's layers with one tensor for each projection of linear attention's input: [q ; k ; v] of all
heads, gates, strengths and decays. It is dense or a mixture.

The published folders hold a composite: this model for text under `model.language_model.`, a vision tower, and layers
for multi-token prediction; `composite` has the names of such folders, and `vision` their towers. transformers writes
models for text alone as `qwen3_5_text` and `qwen3_5_moe_text`. Source: transformers, modeling_qwen3_5.py and
modeling_qwen3_5_moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.models.config_values import size
from megatron_rl.models.families.delta import (
    DELTA_ROWS,
    DESCRIBED_DELTA,
    GATED_ATTENTION,
    HEAD,
    IN_PROJ,
    SHARED_EXPERT,
    delta_layers,
    engine_fault,
)
from megatron_rl.models.families.rows import ENDS, ENDS_ON_EVERY_STAGE, GATED_MLP, MLP_NORM, Ends, mixture_rows
from megatron_rl.models.family import Family
from megatron_rl.models.rule import HfTensor, Rule
from megatron_rl.models.splits import DELTA_SECTIONS, DELTA_STRENGTH
from megatron_rl.types import Mixture

_INPUT = (
    Rule(
        DELTA_SECTIONS,
        hf=(
            HfTensor("linear_attn.in_proj_qkv.weight", ("delta_qkv", "hidden")),
            HfTensor("linear_attn.in_proj_z.weight", ("delta_value", "hidden")),
        ),
        megatron=IN_PROJ,
        vllm="linear_attn.in_proj_qkvz.weight",
    ),
    Rule(
        DELTA_STRENGTH,
        hf=(
            HfTensor("linear_attn.in_proj_b.weight", ("delta_heads", "hidden")),
            HfTensor("linear_attn.in_proj_a.weight", ("delta_heads", "hidden")),
        ),
        megatron=IN_PROJ,
        vllm="linear_attn.in_proj_ba.weight",
    ),
)
_ENDS: Ends = {**ENDS, "embedding": ENDS_ON_EVERY_STAGE["embedding"]}


def _dense(config: Mapping[str, Any]) -> dict[str, Any]:
    return delta_layers(config, interleaved=False)


def _mixture(config: Mapping[str, Any]) -> dict[str, Any]:
    mixture = Mixture(
        num_experts=size(config, "num_experts"),
        num_active=size(config, "num_experts_per_tok", at_most="num_experts"),
        ffn_size=size(config, "moe_intermediate_size"),
        shared_ffn_size=size(config, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return {"mixture": mixture, **_dense(config)}


QWEN3_5_TEXT = Family(
    name="qwen3_5_text",
    vllm_model="Qwen3_5ForCausalLM",
    attention=GATED_ATTENTION,
    linear=(*DELTA_ROWS, *_INPUT),
    dense=(MLP_NORM, *GATED_MLP),
    read_config=_dense,
    engine_fault=engine_fault,
    known=DESCRIBED_DELTA,
    ignored=(HEAD,),
    absent={"num_key_value_heads": 4, "head_dim": 256},
    rotary_share=0.25,
    **_ENDS,
)
QWEN3_5_MOE_TEXT = Family(
    name="qwen3_5_moe_text",
    vllm_model="Qwen3_5MoeForCausalLM",
    attention=GATED_ATTENTION,
    linear=QWEN3_5_TEXT.linear,
    dense=(),
    mixture=(*mixture_rows("mlp", "gate_proj", "up_proj", "down_proj"), *SHARED_EXPERT),
    read_config=_mixture,
    engine_fault=engine_fault,
    known=DESCRIBED_DELTA | {"norm_topk_prob": True},
    ignored=(HEAD,),
    absent={"num_key_value_heads": 2, "head_dim": 256},
    rotary_share=0.25,
    **_ENDS,
)
