"""DeepSeek-V3 has latent attention, routed and shared experts, and dense first layers (arXiv:2412.19437).

The router's bias has no gradient; it is a parameter in HF and vLLM and a float32 buffer in Megatron
(`router.expert_bias`). Rotary dims are interleaved pairs on all sides, so no row is permuted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.layout.families.rows import ENDS, GATED_MLP, INPUT_NORM, MLP_NORM, mixture_rows
from megatron_rl.layout.family import Family
from megatron_rl.layout.rule import HfTensor, Ignored, Rule
from megatron_rl.layout.splits import COLUMNS, LATENT_DOWN, LATENT_KV_DOWN, REPLICATED, ROWS, query_rank
from megatron_rl.types import Experts, LatentAttention, ModelShape


def _low_rank(shape: ModelShape) -> bool:
    return query_rank(shape) > 0


def _direct(shape: ModelShape) -> bool:
    return query_rank(shape) == 0


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

_SHARED_EXPERTS = (
    Rule(
        REPLICATED,
        hf=(HfTensor("mlp.gate.e_score_correction_bias", ("experts",)),),
        megatron="mlp.router.expert_bias",
        float32=True,  # its updates are so small that bfloat16 would round them away
    ),
    Rule(
        ROWS,
        hf=(
            HfTensor("mlp.shared_experts.gate_proj.weight", ("shared_ffn", "hidden")),
            HfTensor("mlp.shared_experts.up_proj.weight", ("shared_ffn", "hidden")),
        ),
        megatron="mlp.shared_experts.linear_fc1.weight",
        vllm="mlp.shared_experts.gate_up_proj.weight",
    ),
    Rule(
        COLUMNS,
        hf=(HfTensor("mlp.shared_experts.down_proj.weight", ("hidden", "shared_ffn")),),
        megatron="mlp.shared_experts.linear_fc2.weight",
    ),
)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    known = {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "num_key_value_heads": config["num_attention_heads"],
    }
    for key, value in known.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} is {config[key]!r}; only {value!r} is supported")
    latent = LatentAttention(
        query_rank=config["q_lora_rank"] or 0,
        kv_rank=config["kv_lora_rank"],
        nope_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
    )
    experts = Experts(
        num_experts=config["n_routed_experts"],
        num_active=config["num_experts_per_tok"],
        ffn_size=config["moe_intermediate_size"],
        shared_ffn_size=config["n_shared_experts"] * config["moe_intermediate_size"],
        first_dense_layers=config["first_k_dense_replace"],
        score="sigmoid",
        normalised=config["norm_topk_prob"],
        num_groups=config["n_group"],
        num_active_groups=config["topk_group"],
        scaling_factor=config["routed_scaling_factor"],
    )
    return {"latent": latent, "experts": experts, "head_dim": latent.nope_dim + latent.rope_dim}


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    vllm_model="DeepseekV3ForCausalLM",
    attention=_ATTENTION,
    dense=(MLP_NORM, *GATED_MLP),
    mixture=(*mixture_rows("mlp", "gate_proj", "up_proj", "down_proj"), *_SHARED_EXPERTS),
    read_config=_read,
    ignored=(Ignored(r"model\.layers\.NUM_LAYERS\..*", "multi-token prediction is neither trained nor served"),),
    **ENDS,
)
