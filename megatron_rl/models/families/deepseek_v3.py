"""DeepSeek-V3 has latent attention, routed and shared experts, and dense first layers (arXiv:2412.19437). Kimi-K2 and
GLM-4.7-Flash have the same architecture.

Rotary dims are interleaved pairs on all sides, so no row is permuted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.models.config_values import size
from megatron_rl.models.families.biased_mixture import (
    BIASED_MIXTURE,
    TOKEN_AFTER_NEXT,
    fault_in_float16,
    only,
    read_experts,
    served_in_float32,
)
from megatron_rl.models.families.rows import ENDS, GATED_MLP, INPUT_NORM, MLP_NORM
from megatron_rl.models.family import WINDOWLESS, Family
from megatron_rl.models.rule import HfTensor, Rule
from megatron_rl.models.splits import COLUMNS, LATENT_DOWN, LATENT_KV_DOWN, REPLICATED, ROWS
from megatron_rl.types import LatentAttention


def _low_rank(attention: LatentAttention) -> bool:
    return attention.query_rank > 0


def _direct(attention: LatentAttention) -> bool:
    return attention.query_rank == 0


_KV_DOWN = (HfTensor("self_attn.kv_a_proj_with_mqa.weight", ("kv_down", "hidden")),)

_ATTENTION = (
    Rule(REPLICATED, hf=INPUT_NORM.hf, megatron=INPUT_NORM.megatron),  # never fused: three layers read it
    Rule(
        ROWS,
        hf=(HfTensor("self_attn.q_proj.weight", ("q_up", "hidden")),),
        megatron="self_attention.linear_q_proj.weight",
        when=_direct,
    ),
    Rule(
        LATENT_DOWN,
        hf=(HfTensor("self_attn.q_a_proj.weight", ("query_rank", "hidden")),),
        megatron="self_attention.linear_q_down_proj.weight",
        vllm="self_attn.fused_qkv_a_proj.weight",
        when=_low_rank,
    ),
    Rule(
        REPLICATED,
        hf=(HfTensor("self_attn.q_a_layernorm.weight", ("query_rank",)),),
        megatron="self_attention.q_layernorm.weight",
        fused="self_attention.linear_q_up_proj.layer_norm_weight",
        when=_low_rank,
    ),
    Rule(
        ROWS,
        hf=(HfTensor("self_attn.q_b_proj.weight", ("q_up", "query_rank")),),
        megatron="self_attention.linear_q_up_proj.weight",
        when=_low_rank,
    ),
    Rule(
        LATENT_KV_DOWN,
        hf=_KV_DOWN,
        megatron="self_attention.linear_kv_down_proj.weight",
        vllm="self_attn.fused_qkv_a_proj.weight",
        when=_low_rank,
    ),
    Rule(
        LATENT_DOWN,
        hf=_KV_DOWN,
        megatron="self_attention.linear_kv_down_proj.weight",
        when=_direct,
    ),
    Rule(
        REPLICATED,
        hf=(HfTensor("self_attn.kv_a_layernorm.weight", ("kv_rank",)),),
        megatron="self_attention.kv_layernorm.weight",
        fused="self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    Rule(
        ROWS,
        hf=(HfTensor("self_attn.kv_b_proj.weight", ("kv_up", "kv_rank")),),
        megatron="self_attention.linear_kv_up_proj.weight",
    ),
    Rule(
        COLUMNS,
        hf=(HfTensor("self_attn.o_proj.weight", ("hidden", "value")),),
        megatron="self_attention.linear_proj.weight",
    ),
)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    only(config, rope_interleave=True, num_key_value_heads=config["num_attention_heads"])
    latent = dict(
        query_rank=0 if config["q_lora_rank"] is None else size(config, "q_lora_rank"),
        kv_rank=size(config, "kv_lora_rank"),
        nope_dim=size(config, "qk_nope_head_dim"),
        rope_dim=size(config, "qk_rope_head_dim"),
        value_dim=size(config, "v_head_dim"),
    )
    only(config, head_dim=latent["rope_dim"])  # as many dims are rotated by transformers
    return {"latent": latent, **read_experts(config)}


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    vllm_model="DeepseekV3ForCausalLM",
    attention=_ATTENTION,
    dense=(MLP_NORM, *GATED_MLP),
    mixture=BIASED_MIXTURE,
    read_config=_read,
    known=WINDOWLESS | {"index_topk": None, "llama_4_scaling": None, "moe_router_dtype": None},
    ignored=(TOKEN_AFTER_NEXT,),
    **ENDS,
)
KIMI_K2 = replace(DEEPSEEK_V3, name="kimi_k2")
"""Kimi-K2 (arXiv:2507.20534) is DeepSeek-V3 with 384 experts, 64 heads and one dense layer."""
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    vllm_model="Glm4MoeLiteForCausalLM",
    mixture=served_in_float32(BIASED_MIXTURE),
    engine_fault=fault_in_float16,
)
"""GLM-4.7-Flash has DeepSeek-V3's attention and mixture, and vLLM holds its routers in float32."""
