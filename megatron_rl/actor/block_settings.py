"""Megatron's settings of each kind of block: a case for each class of types/blocks.py."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.actor.moe.experts import sigmoid_unit
from megatron_rl.types import Attention, GatedMlp, LatentAttention, Mixture, Mlp, ModelShape, SoftmaxAttention, YarnRope


@singledispatch
def settings_of(block: Attention | Mlp, shape: ModelShape, fused: bool) -> dict[str, Any]:
    """Megatron's names for what a block is."""
    raise AssertionError(f"{block} has no settings")


@settings_of.register
def _(attention: SoftmaxAttention, shape: ModelShape, fused: bool) -> dict[str, Any]:
    windows = [layer.attention.window for layer in shape.layers]
    sliding: dict[str, Any] = {}
    if window := max((window for window in windows if window), default=None):
        sliding = {"window_size": (window - 1, 0), "window_attn_skip_freq": [int(one is not None) for one in windows]}
    return {
        "attention_output_gate": attention.gated,
        "qk_layernorm": attention.norms == "head",  # it also sums the q and k norms' gradients over TP
        "add_qkv_bias": attention.qkv_bias,
        "softmax_type": "learnable" if attention.sinks else "vanilla",
        "apply_rope_fusion": fused,
        "softmax_scale": attention.scale,
        **sliding,
    }


@settings_of.register
def _(latent: LatentAttention, shape: ModelShape, fused: bool) -> dict[str, Any]:
    """Megatron computes the scale of the softmax from the last two; latent.py rotates."""
    rope, yarn = latent.rope.scaling, {"rotary_scaling_factor": 1.0}
    if isinstance(rope, YarnRope):
        yarn = {"rotary_scaling_factor": rope.factor, "mscale_all_dim": rope.mscale_all_dim}
    return {
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_type": "rope",
        "attention_output_gate": False,
        "add_qkv_bias": False,
        "softmax_type": "vanilla",
        "qk_layernorm": fused,  # it fuses the norms of compressed q and k
        "apply_rope_fusion": False,  # Megatron has it with YaRN alone
        **yarn,
    }


@settings_of.register
def _(mlp: GatedMlp, shape: ModelShape, fused: bool) -> dict[str, Any]:
    return {"ffn_hidden_size": mlp.size, "activation_func": F.silu if mlp.activation == "silu" else gelu_tanh}


@settings_of.register
def _(mixture: Mixture, shape: ModelShape, fused: bool) -> dict[str, Any]:
    """Megatron adds no auxiliary loss (router.py does), and there is no capacity: every token goes to the experts that
    the router scores highest, as in the engine. The router computes in fp32, because in bf16 close scores would round
    to ties."""
    clamped = {"activation_func": sigmoid_unit, "glu_linear_offset": 1.0, "activation_func_clamp_value": mixture.clamp}
    return {
        "ffn_hidden_size": mixture.ffn_size,
        "num_moe_experts": mixture.num_experts,
        "moe_router_topk": mixture.num_active,
        "moe_ffn_hidden_size": mixture.ffn_size,
        "moe_layer_freq": [int(layer.mixture is not None) for layer in shape.layers],
        "moe_router_score_function": mixture.score,
        "moe_router_pre_softmax": not mixture.normalised,  # False: the softmax is over the active experts only
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": mixture.router_bias,
        "moe_router_num_groups": mixture.num_groups if mixture.num_groups > 1 else None,
        "moe_router_group_topk": mixture.num_active_groups if mixture.num_groups > 1 else None,
        "moe_router_topk_scaling_factor": mixture.scaling_factor,
        "moe_shared_expert_intermediate_size": mixture.shared_ffn_size or None,
        "moe_shared_expert_gate": mixture.shared_gate,
        "moe_grouped_gemm": fused,
        **(clamped if mixture.clamp else {}),
    }


def gelu_tanh(gate: torch.Tensor) -> torch.Tensor:
    """GELU's approximation with tanh (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return F.gelu(gate, approximate="tanh")
