"""What Megatron is told of each kind of block: its settings, and the modules in the spec of a layer. Both have a case
for each class of types/blocks.py and types/mamba.py."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_rl.actor.attention import GatedSelfAttention, PackedAttention
from megatron_rl.actor.latent import LatentCoreAttention, LatentSelfAttention
from megatron_rl.actor.linear_attention import DeltaAttention
from megatron_rl.actor.mamba import MambaMixer
from megatron_rl.actor.moe.experts import ExpertOutput, sigmoid_unit
from megatron_rl.actor.norm import Norm, WideNorm
from megatron_rl.types import (
    Attention,
    DeltaNet,
    GatedMlp,
    LatentAttention,
    Layer,
    Mixture,
    Mlp,
    ModelShape,
    SoftmaxAttention,
    YarnRope,
)
from megatron_rl.types.mamba import NO_ATTENTION, NO_MLP, Mamba2, SquaredReluMixture, SquaredReluMlp


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


@settings_of.register
def _(mlp: SquaredReluMlp, shape: ModelShape, fused: bool) -> dict[str, Any]:
    width = {} if mlp == NO_MLP else {"ffn_hidden_size": mlp.size}
    return {"gated_linear_unit": False, "activation_func": squared_relu, **width}


@settings_of.register
def _(mixture: SquaredReluMixture, shape: ModelShape, fused: bool) -> dict[str, Any]:
    own: dict[str, Any] = settings_of.dispatch(Mixture)(mixture, shape, fused)
    return {**own, "gated_linear_unit": False, "activation_func": squared_relu}


def fit(parts: TransformerLayerSubmodules, layer: Layer) -> None:
    """Put our modules for the blocks of a layer into the spec of one of Megatron's own layers."""
    own = parts.self_attention
    match layer.attention:
        case SoftmaxAttention() as attention:
            own.submodules.core_attention = PackedAttention
            if attention.norms == "head":
                own.submodules.q_layernorm = own.submodules.k_layernorm = Norm
            elif attention.norms == "full":
                own.submodules.q_layernorm = ModuleSpec(WideNorm, params={"num_heads": attention.num_heads})
                own.submodules.k_layernorm = ModuleSpec(WideNorm, params={"num_heads": attention.num_kv_heads})
            if attention.gated:
                own.module = GatedSelfAttention
        case LatentAttention():
            own.module, own.submodules.core_attention = LatentSelfAttention, LatentCoreAttention
            own.submodules.q_layernorm = own.submodules.kv_layernorm = Norm
        case Mamba2() as mamba if mamba != NO_ATTENTION:
            parts.self_attention = ModuleSpec(MambaMixer, params={"mamba": mamba})
        case Mamba2():
            parts.input_layernorm = parts.self_attention = IdentityOp
            parts.self_attn_bda = IdentityFuncOp
        case DeltaNet() as delta:
            parts.self_attention = ModuleSpec(DeltaAttention, params={"delta": delta})
    if layer.mlp == NO_MLP:
        parts.pre_mlp_layernorm = parts.mlp = IdentityOp
        parts.mlp_bda = IdentityFuncOp
    elif layer.mixture and layer.mixture.linear_bias:
        parts.mlp.submodules.experts.submodules.linear_fc2 = ExpertOutput


def gelu_tanh(gate: torch.Tensor) -> torch.Tensor:
    """GELU's approximation with tanh (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return F.gelu(gate, approximate="tanh")
