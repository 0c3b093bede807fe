"""Builds the model from a ModelShape: Megatron-Core's GPTModel, which ends with hidden states here (logprobs.py).

With Transformer Engine and bf16 the layers are Transformer Engine's fused ones (not run yet). Otherwise they are
Megatron's own linear layers with our norms and packed attention. The family's table (`layout`) says what its layers
have. Megatron initialises the weights although they are loaded afterwards (weights.py): without initialisation it does
not mark which weights are split over TP, and gradient norms are wrong. Invariant (tests/dist): logits equal those of
transformers for the same Hugging Face folder.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_rl.actor import platform
from megatron_rl.actor.attention import PackedAttention
from megatron_rl.actor.latent import LatentAttention, LatentCoreAttention
from megatron_rl.actor.logprobs import OutputLayer
from megatron_rl.actor.norm import Norm, PostNormLayer, WideNorm
from megatron_rl.actor.router import BiasedRouter, keep_biases_in_float32
from megatron_rl.config.schema import ModelConfig, ParallelConfig
from megatron_rl.layout import FAMILIES, padded_vocabulary
from megatron_rl.types import Llama3Rope, ModelShape, YarnRope


def uses_fused_layers(model: ModelConfig) -> bool:
    return platform.HAS_TRANSFORMER_ENGINE and model.dtype == "bfloat16"


def check_fused_layers(shape: ModelShape) -> None:
    """Check that Transformer Engine's layers, as Megatron uses them, can express the model.

    Raises:
        ValueError: the model has norms after its blocks, latent attention, or a rotary scaling that Megatron does not
            pass on.
    """
    rope, advice = shape.rope_scaling, "; set model.dtype to float32, which runs Megatron's own layers"
    if FAMILIES[shape.family].post_norm:
        raise ValueError(f"{shape.family} has norms after its blocks, Transformer Engine's layers have none{advice}")
    if shape.latent:
        raise ValueError(f"{shape.family}'s latent attention does not run on Transformer Engine's layers yet{advice}")
    if rope is not None and rope != Llama3Rope(rope.factor, 1.0, 4.0, 8192):
        raise ValueError(f"with Transformer Engine's layers Megatron supports only Llama 3.1's rotary scaling{advice}")


def transformer_config(shape: ModelShape, model: ModelConfig, parallel: ParallelConfig) -> TransformerConfig:
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[model.dtype]
    family, mesh = FAMILIES[shape.family], parallel.mesh
    fused = uses_fused_layers(model)
    recompute = model.recompute == "full"
    kind = MLATransformerConfig if shape.latent else TransformerConfig
    return kind(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=family.qk_norm == "head",  # it also sums the q and k norms' gradients over TP
        add_qkv_bias=family.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        expert_model_parallel_size=mesh.expert,
        expert_tensor_parallel_size=mesh.expert_ways,
        context_parallel_size=mesh.context,
        sequence_parallel=parallel.sequence_parallel,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths requires it, even for dense models
        deallocate_pipeline_outputs=True,
        calculate_per_token_loss=True,  # gradients are summed over micro-batches and DP (step.py)
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        apply_rope_fusion=fused,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        **_window(shape),
        **_latent(shape),
        **_mixture(shape, fused),
    )


def _window(shape: ModelShape) -> dict[str, Any]:
    if not shape.sliding_layers:
        return {}
    slides = [int(layer in shape.sliding_layers) for layer in range(shape.num_layers)]
    return {"window_size": (shape.sliding_window - 1, 0), "window_attn_skip_freq": slides}


def _latent(shape: ModelShape) -> dict[str, Any]:
    """Megatron computes the scale of the softmax from the last two; latent.py rotates."""
    latent, rope = shape.latent, shape.rope_scaling
    if latent is None:
        return {}
    yarn = {"rotary_scaling_factor": 1.0}
    if isinstance(rope, YarnRope):
        yarn = {"rotary_scaling_factor": rope.factor, "mscale_all_dim": rope.mscale_all_dim}
    return {
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_type": "rope",
        **yarn,
    }


def _mixture(shape: ModelShape, fused: bool) -> dict[str, Any]:
    """There is no auxiliary loss and no capacity: every token goes to the experts that the router scores highest, as in
    the engine. The router computes in fp32, because in bf16 close scores would round to ties."""
    experts = shape.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.num_active,
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_layer_freq": [int(shape.has_experts(layer)) for layer in range(shape.num_layers)],
        "moe_router_score_function": experts.score,
        "moe_router_pre_softmax": not experts.normalised,  # False: the softmax is over the active experts only
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": FAMILIES[shape.family].router_bias,
        "moe_router_num_groups": experts.num_groups if experts.num_groups > 1 else None,
        "moe_router_group_topk": experts.num_active_groups if experts.num_groups > 1 else None,
        "moe_router_topk_scaling_factor": experts.scaling_factor,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size or None,
        "moe_grouped_gemm": fused,
    }


def build_model(shape: ModelShape, model: ModelConfig, parallel: ParallelConfig, stage: int) -> DistributedDataParallel:
    """Build this rank's pipeline stage, wrapped for bf16 and data parallelism."""
    config = transformer_config(shape, model, parallel)
    fused = uses_fused_layers(model)
    if fused:
        check_fused_layers(shape)
    elif parallel.context > 1 and platform.device().type != "cpu":
        raise ValueError(
            "policy.parallel.context above 1 needs Transformer Engine's layers on GPUs, because context.py has kernels "
            "for CPUs only; install Transformer Engine and set model.dtype to bfloat16, or set context to 1"
        )
    scaling = shape.rope_scaling if fused else None
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, True) if fused else _local_block(config, shape),
        vocab_size=padded_vocabulary(shape, parallel.tensor),
        max_sequence_length=shape.max_positions,
        pre_process=stage == 0,
        post_process=stage == parallel.pipeline - 1,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope" if fused else "none",  # PackedAttention rotates by itself
        rotary_base=int(shape.rope_theta),
        rope_scaling=scaling is not None,
        rope_scaling_factor=scaling.factor if scaling else 1.0,
    )
    if gpt.post_process:
        gpt.output_layer.__class__ = OutputLayer  # GPTModel has no option for this class; only `forward` differs
    gpt.to(platform.device())
    wrapped = Float16Module(config, gpt) if config.bf16 else gpt
    keep_biases_in_float32(gpt)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.data * parallel.context > 1,
    )
    return DistributedDataParallel(config, ddp, wrapped)


def _local_block(config: TransformerConfig, shape: ModelShape) -> TransformerBlockSubmodules:
    """The spec of this stage's layers: Megatron's own, with our norms and attention."""
    family = FAMILIES[shape.family]
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in block.layer_specs:  # layers of one kind share one spec
        norm = Norm
        if family.post_norm:
            layer.module, norm = PostNormLayer, IdentityOp
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        if family.router_bias and layer.submodules.mlp.module is MoELayer:
            layer.submodules.mlp.submodules.router = BiasedRouter
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if shape.latent:
            layer.submodules.self_attention.module = LatentAttention
            attention.core_attention = LatentCoreAttention
            attention.q_layernorm = attention.kv_layernorm = Norm
        elif family.qk_norm == "head":
            attention.q_layernorm = attention.k_layernorm = Norm
        elif family.qk_norm == "full":
            attention.q_layernorm = ModuleSpec(WideNorm, params={"num_heads": shape.num_heads})
            attention.k_layernorm = ModuleSpec(WideNorm, params={"num_heads": shape.num_kv_heads})
    block.layer_norm = Norm
    return block
