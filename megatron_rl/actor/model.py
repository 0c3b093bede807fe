"""The model: Megatron-Core's GPTModel, built from a ModelShape, that ends with hidden states (logprobs.py).

With Transformer Engine and bf16 the layers are its fused ones (not run); otherwise they are Megatron's own
linear layers with our norm and packed attention. Megatron initialises the weights although they are loaded
afterwards (weights.py): without that it does not mark which are split over TP, and gradient norms come out
wrong. Invariant (tests/dist): logits equal those of transformers for the same Hugging Face folder.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.actor import platform
from megatron_rl.actor.attention import PackedAttention
from megatron_rl.actor.logprobs import OutputLayer
from megatron_rl.actor.norm import Norm
from megatron_rl.config.schema import ModelConfig, ParallelConfig
from megatron_rl.layout import padded_vocabulary
from megatron_rl.types import ModelShape


def uses_fused_layers(model: ModelConfig) -> bool:
    return platform.HAS_TRANSFORMER_ENGINE and model.dtype == "bfloat16"


def transformer_config(shape: ModelShape, model: ModelConfig, parallel: ParallelConfig) -> TransformerConfig:
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[model.dtype]
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
        qk_layernorm=True,  # beside the spec's argument: it sums the q and k norms' gradients over TP
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
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
    )


def build_model(shape: ModelShape, model: ModelConfig, parallel: ParallelConfig, stage: int) -> DistributedDataParallel:
    """This rank's pipeline stage, wrapped for bf16 and data parallelism."""
    config = transformer_config(shape, model, parallel)
    fused = uses_fused_layers(model)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=_fused_spec() if fused else _local_spec(shape.num_layers // parallel.pipeline),
        vocab_size=padded_vocabulary(shape, parallel.tensor),
        max_sequence_length=shape.max_positions,
        pre_process=stage == 0,
        post_process=stage == parallel.pipeline - 1,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope" if fused else "none",  # PackedAttention rotates by itself
        rotary_base=int(shape.rope_theta),
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


def _fused_spec():
    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)


def _local_spec(num_layers: int) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    layer.submodules.input_layernorm = Norm
    layer.submodules.pre_mlp_layernorm = Norm
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = Norm
    attention.core_attention = PackedAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=Norm)
