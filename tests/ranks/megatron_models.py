"""Names and extents of the parameters that Megatron-Core builds for any rank of any mesh, in a process of its own: the
module changes torch and Megatron.

One process stands for one rank after another: torch's fake process group answers for the others, which is enough to
build a model. The router's bias is a buffer; it counts as a parameter here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.actor import platform
from megatron_rl.models import padded_vocabulary, read_shape
from megatron_rl.types import GatedMlp, LatentAttention, Mesh, ModelShape

if not torch.cuda.is_available():  # what Megatron asks for while it builds mixtures, MLA and tied embeddings
    torch.cuda.Stream = lambda *arguments, **options: None
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda tensor: tensor
# Where Transformer Engine is absent Megatron puts mocks in its place, and MLA takes them for the library.
multi_latent_attention.HAVE_TE = platform.HAS_TRANSFORMER_ENGINE


class NoAttention(torch.nn.Module):
    """Megatron's own core attention has no parameters without sinks, and does not take latent attention's arguments."""

    def __init__(self, **arguments):
        super().__init__()


def config(shape: ModelShape, mesh: Mesh) -> TransformerConfig:
    attention, mixture = shape.attention, shape.mixture
    latent = attention if isinstance(attention, LatentAttention) else None
    sizes = [layer.mlp.size for layer in shape.layers if isinstance(layer.mlp, GatedMlp)]
    arguments = dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=attention.num_heads,
        num_query_groups=attention.num_kv_heads,
        kv_channels=attention.head_dim,
        ffn_hidden_size=sizes[0] if sizes else mixture.ffn_size,
        normalization="RMSNorm",
        qk_layernorm=attention.norms == "head" or latent is not None,
        add_qkv_bias=attention.qkv_bias,
        gated_linear_unit=True,
        add_bias_linear=False,
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        virtual_pipeline_model_parallel_size=mesh.virtual if mesh.virtual > 1 else None,
        context_parallel_size=mesh.context,
        expert_model_parallel_size=mesh.expert,
        expert_tensor_parallel_size=mesh.expert_ways,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    if mesh.layers and mesh.virtual == 1:
        arguments |= dict(num_layers_in_first_pipeline_stage=mesh.layers[0])
        arguments |= dict(num_layers_in_last_pipeline_stage=mesh.layers[-1])
    if mixture:
        arguments |= dict(
            num_moe_experts=mixture.num_experts,
            moe_router_topk=mixture.num_active,
            moe_ffn_hidden_size=mixture.ffn_size,
            moe_shared_expert_intermediate_size=mixture.shared_ffn_size or None,
            moe_layer_freq=[int(layer.mixture is not None) for layer in shape.layers],
            moe_router_score_function=mixture.score,
            moe_router_enable_expert_bias=mixture.router_bias,
            moe_token_dispatcher_type="alltoall",
        )
    if latent is None:
        built = TransformerConfig(**arguments)
        built.softmax_type = "learnable" if attention.sinks else "vanilla"
        built.add_bias_linear = attention.output_bias  # as an argument Megatron refuses it with experts over TP
        return built
    return MLATransformerConfig(
        **arguments,
        multi_latent_attention=True,
        q_lora_rank=latent.query_rank or None,
        kv_lora_rank=latent.kv_rank,
        qk_head_dim=latent.nope_dim,
        qk_pos_emb_head_dim=latent.rope_dim,
        v_head_dim=latent.value_dim,
        rope_type="rope",
    )


def parameters(shape: ModelShape, mesh: Mesh, rank: int) -> dict[str, tuple[int, ...]]:
    dist.init_process_group("fake", rank=rank, world_size=mesh.world_size, store=FakeStore())
    parallel_state.initialize_model_parallel(
        mesh.tensor,
        mesh.pipeline,
        mesh.virtual if mesh.virtual > 1 else None,
        context_parallel_size=mesh.context,
        expert_model_parallel_size=mesh.expert,
        expert_tensor_parallel_size=mesh.expert_ways,
        create_gloo_process_groups=False,
    )
    found: dict[str, tuple[int, ...]] = {}
    stage, transformer_config = mesh.coordinates(rank)[1], config(shape, mesh)
    for chunk in range(mesh.virtual):
        vp_stage = chunk if mesh.virtual > 1 else None
        block = get_gpt_decoder_block_spec(
            transformer_config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
        )
        for layer in block.layer_specs:
            if not shape.attention.sinks:
                layer.submodules.self_attention.submodules.core_attention = NoAttention
        model = GPTModel(
            config=transformer_config,
            transformer_layer_spec=block,
            vocab_size=padded_vocabulary(shape, mesh.tensor),
            max_sequence_length=shape.max_positions,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == mesh.pipeline - 1 and chunk == mesh.virtual - 1,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        prefix = f"chunk{chunk}." if mesh.virtual > 1 else ""
        named = [*model.named_parameters(), *(b for b in model.named_buffers() if b[0].endswith("expert_bias"))]
        found |= {prefix + name: tuple(tensor.shape) for name, tensor in named}
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found


def all_parameters(cases: Sequence[tuple[Path, Mesh, int]]) -> list[dict[str, tuple[int, ...]]]:
    """Of each (model's folder, mesh, rank)."""
    return [parameters(read_shape(folder), mesh, rank) for folder, mesh, rank in cases]
