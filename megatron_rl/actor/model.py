"""The model: Megatron-Core's GPTModel, built from a ModelShape, that ends with hidden states (logprobs.py).

With Transformer Engine and bf16 the layers are its fused ones (not run); otherwise they are Megatron's own linear
layers with our norms and packed attention. What a family has is asked of its table (`layout`).
Megatron initialises the weights although they are loaded afterwards (weights.py): without that it does not mark which
are split over TP, and gradient norms come out wrong. Invariant (tests/dist): logits equal those of transformers for
the same Hugging Face folder.
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
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.actor import platform
from megatron_rl.actor.attention import PackedAttention
from megatron_rl.actor.logprobs import OutputLayer
from megatron_rl.actor.norm import Norm, PostNormLayer, WideNorm
from megatron_rl.config.schema import ModelConfig, ParallelConfig
from megatron_rl.layout import FAMILIES, padded_vocabulary
from megatron_rl.types import Llama3Rope, ModelShape


def uses_fused_layers(model: ModelConfig) -> bool:
    return platform.HAS_TRANSFORMER_ENGINE and model.dtype == "bfloat16"


def check_fused_layers(shape: ModelShape) -> None:
    """Raises ValueError for what Transformer Engine's layers, or what Megatron passes to them, cannot express."""
    rope, advice = shape.rope_scaling, "; set model.dtype to float32, which runs Megatron's own layers"
    if FAMILIES[shape.family].post_norm:
        raise ValueError(f"Transformer Engine's layers have no norm behind a block, {shape.family} has{advice}")
    if rope is not None and rope != Llama3Rope(rope.factor, 1.0, 4.0, 8192):
        raise ValueError(f"with Transformer Engine's layers Megatron has Llama 3.1's rotary scaling alone{advice}")


def transformer_config(shape: ModelShape, model: ModelConfig, parallel: ParallelConfig) -> TransformerConfig:
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[model.dtype]
    family, mesh = FAMILIES[shape.family], parallel.mesh
    fused = uses_fused_layers(model)
    recompute = model.recompute == "full"
    return TransformerConfig(
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
        sequence_parallel=parallel.sequence_parallel,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # asked for by variable_seq_lengths, dense models included
        deallocate_pipeline_outputs=True,
        calculate_per_token_loss=True,  # gradients are summed over micro-batches and DP (step.py)
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        apply_rope_fusion=fused,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        **_window(shape),
        **_mixture(shape, fused),
    )


def _window(shape: ModelShape) -> dict[str, Any]:
    if not shape.sliding_layers:
        return {}
    slides = [int(layer in shape.sliding_layers) for layer in range(shape.num_layers)]
    return {"window_size": (shape.sliding_window - 1, 0), "window_attn_skip_freq": slides}


def _mixture(shape: ModelShape, fused: bool) -> dict[str, Any]:
    """No auxiliary loss and no capacity: every token passes the experts that its router scores highest, as in the
    engine. The router's product is in fp32, where bf16 would round neighbours to ties."""
    experts = shape.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.num_active,
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_layer_freq": [int(shape.has_experts(layer)) for layer in range(shape.num_layers)],
        "moe_router_score_function": experts.score,
        "moe_router_pre_softmax": not experts.normalised,  # else the softmax is over the active experts alone
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": fused,
    }


def build_model(shape: ModelShape, model: ModelConfig, parallel: ParallelConfig, stage: int) -> DistributedDataParallel:
    """This rank's pipeline stage, wrapped for bf16 and data parallelism."""
    config = transformer_config(shape, model, parallel)
    fused = uses_fused_layers(model)
    if fused:
        check_fused_layers(shape)
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
        gpt.output_layer.__class__ = OutputLayer  # GPTModel takes no class for it; only forward differs
    gpt.to(platform.device())
    wrapped = Float16Module(config, gpt) if config.bf16 else gpt
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.data > 1,
    )
    return DistributedDataParallel(config, ddp, wrapped)


def _local_block(config: TransformerConfig, shape: ModelShape) -> TransformerBlockSubmodules:
    """Megatron's own layers of this stage, with our modules in them."""
    family = FAMILIES[shape.family]
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in block.layer_specs:  # layers of one kind share one spec
        norm = Norm
        if family.post_norm:
            layer.module, norm = PostNormLayer, IdentityOp
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if family.qk_norm == "head":
            attention.q_layernorm = attention.k_layernorm = Norm
        elif family.qk_norm == "full":
            attention.q_layernorm = ModuleSpec(WideNorm, params={"num_heads": shape.num_heads})
            attention.k_layernorm = ModuleSpec(WideNorm, params={"num_heads": shape.num_kv_heads})
    block.layer_norm = Norm
    return block
