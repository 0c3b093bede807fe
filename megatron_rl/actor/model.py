"""Builds the model from a ModelShape: Megatron-Core's GPTModel, which ends with hidden states here (logprobs.py).

The layers are Transformer Engine's fused ones, or Megatron's own linear layers with our norms and packed
attention; `model.layers` chooses. The family's table (`layout`) says what its layers have. Megatron initialises the
weights although they are loaded afterwards (weights.py): without initialisation it does not mark which weights are
split over TP, and gradient norms are wrong. Invariant (tests/ranks): logits equal transformers' for the same Hugging
Face folder.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_decoder_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import unwrap_model

from megatron_rl.actor import platform
from megatron_rl.actor.adapters import Adapting
from megatron_rl.actor.block_settings import fit, settings_of
from megatron_rl.actor.fp8_weights import linear_layers_in_fp8
from megatron_rl.actor.fused_attention import rotating
from megatron_rl.actor.latent import LatentSelfAttention
from megatron_rl.actor.logprobs import OutputLayer
from megatron_rl.actor.megatron_settings import build
from megatron_rl.actor.moe.router import Router, keep_biases_in_float32, prepare_routers
from megatron_rl.actor.multi_token import add_head
from megatron_rl.actor.norm import Norm, PostNormLayer
from megatron_rl.actor.tower import add_deep, build_tower
from megatron_rl.actor.value_head import add_value_head
from megatron_rl.config.policy import ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.models import FAMILIES, obstacle_to_fused_layers, padded_vocabulary
from megatron_rl.types import Layer, Mesh, ModelShape


def uses_fused_layers(model: ModelConfig, shape: ModelShape, context: int) -> bool:
    """Whether the layers are Transformer Engine's.

    Raises:
        ValueError: model.layers asks for them, and they are not installed or cannot express the model.
    """
    if model.layers == "local":
        return False
    obstacle = obstacle_to_fused_layers(shape, context)
    if model.layers == "auto":
        return platform.HAS_TRANSFORMER_ENGINE and model.dtype != "float32" and obstacle is None
    if not platform.HAS_TRANSFORMER_ENGINE:
        obstacle = "there is no GPU, or Transformer Engine is not installed"
    if obstacle:
        raise ValueError(f"model.layers is transformer_engine, but {obstacle}; set model.layers to local")
    return True


def transformer_config(
    shape: ModelShape, model: ModelConfig, parallel: ParallelConfig, switches: Mapping[str, Any]
) -> TransformerConfig:
    """Megatron's configuration of a model; `switches` is `policy.megatron.transformer`."""
    dtype: torch.dtype = getattr(torch, model.dtype)
    mesh, fused = parallel.mesh, uses_fused_layers(model, shape, parallel.context)
    ours = dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.attention.num_heads,
        num_query_groups=shape.attention.num_kv_heads,
        kv_channels=shape.attention.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        layernorm_zero_centered_gamma=shape.layers[0].zero_centred,
        gated_linear_unit=True,
        activation_func=F.silu,  # of experts
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        virtual_pipeline_model_parallel_size=mesh.virtual if mesh.virtual > 1 else None,
        pipeline_model_parallel_layout=_pipeline_layout(shape, mesh),
        expert_model_parallel_size=mesh.expert,
        expert_tensor_parallel_size=mesh.expert_ways,
        context_parallel_size=mesh.context,
        sequence_parallel=parallel.sequence_parallel,
        # Of two stages each is the other's next and previous one. With virtual stages one call would send in both
        # directions, and messages would be mistaken for each other; with the overlap each direction has its own call.
        overlap_p2p_comm=mesh.virtual > 1,
        batch_p2p_comm=mesh.virtual == 1,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths requires it, even for dense models
        # Between virtual stages Megatron-Core 0.16.1 frees an output whose send may not have ended, and the next stage
        # gets what stands there by then: over Gloo, and over NCCL as well (Megatron-LM's pull request 4047).
        deallocate_pipeline_outputs=mesh.virtual == 1,
        calculate_per_token_loss=True,  # gradients are summed over micro-batches and DP (step.py)
        transformer_impl="transformer_engine" if fused else "local",
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
    )
    for block in (shape.attention, *shape.mlps):
        ours |= settings_of(block, shape, fused)
    if model.recompute == "full":
        ours |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    kind = MLATransformerConfig if "kv_lora_rank" in ours else TransformerConfig
    config: TransformerConfig = build(kind, "transformer", ours, switches, _fast_on_gpus(shape, fused))
    # Megatron does not take this for experts that are split over TP, because it would add their biases several times;
    # `ExpertOutput` adds them once.
    config.add_bias_linear = shape.attention.output_bias
    return config


def _fast_on_gpus(shape: ModelShape, fused: bool) -> dict[str, Any]:
    """What is faster with Transformer Engine's layers and changes numbers by rounding alone. It has not been run."""
    fast: dict[str, Any] = {}
    if fused:
        fast["gradient_accumulation_fusion"] = True
    if fused and shape.mixture:
        fast["moe_permute_fusion"] = True
    return fast


@contextmanager
def _without_apex() -> Iterator[None]:
    """Lets Megatron build its output layer with `gradient_accumulation_fusion` where Apex is not installed. It refuses,
    because its own product adds up gradients with Apex's extension. `OutputLayer` multiplies nothing, and Transformer
    Engine's layers have kernels of their own."""
    known = megatron_layers._grad_accum_fusion_available
    megatron_layers._grad_accum_fusion_available = True
    try:
        yield
    finally:
        megatron_layers._grad_accum_fusion_available = known


def _pipeline_layout(shape: ModelShape, mesh: Mesh) -> list[list[str]] | None:
    """What each part of the pipeline holds, in order of depth, in Megatron's words."""
    if mesh.pipeline == 1:
        return None
    chunks = [(stage, chunk) for chunk in range(mesh.virtual) for stage in range(mesh.pipeline)]
    parts = [["decoder"] * len(mesh.layer_range(shape.num_layers, stage, chunk)) for stage, chunk in chunks]
    parts[0].insert(0, "embedding")
    parts[-1].append("loss")
    return parts


def build_model(
    shape: ModelShape,
    model: ModelConfig,
    policy: PolicyConfig,
    stage: int,
    adapting: Adapting | None = None,
    is_frozen: bool = False,
) -> list[DistributedDataParallel]:
    """Build this rank's pipeline stage, wrapped for its type and data parallelism: one model for each virtual stage,
    in order of depth. A frozen one has no gradients. A trained vision tower is the first one's `visual`."""
    parallel = policy.parallel
    config = transformer_config(shape, model, parallel, policy.megatron.transformer)
    if parallel.context > 1 and platform.device().type != "cpu" and config.transformer_impl == "local":
        obstacle = obstacle_to_fused_layers(shape, parallel.context) or "they are not installed, or not used"
        raise ValueError(
            "policy.parallel.context above 1 needs Transformer Engine's layers on GPUs, because context.py has kernels "
            f"for CPUs only, but {obstacle}; set context to 1, or see model.layers"
        )
    chunks = range(parallel.virtual)
    models = [_build_chunk(shape, config, policy, stage, chunk, adapting, is_frozen) for chunk in chunks]
    if stage == 0 and shape.tower:
        # Megatron's wrapper for two bytes, which is around the model already, would round its rotary frequencies.
        tower = build_tower(Path(model.path), config.params_dtype, model.recompute == "full")
        for parameter in tower.parameters():  # each rank's tokens give a part of its gradient
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # it is Megatron's
        unwrap_model(models[0]).visual = tower
    is_split = parallel.data * parallel.context > 1
    ours = {"grad_reduce_in_fp32": policy.optimizer.gradients == "float32", "use_distributed_optimizer": is_split}
    # On CPUs, communication during the backward pass would take the cores from it.
    fast = dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather"), is_split and platform.HAS_CUDA)
    ddp = build(DistributedDataParallelConfig, "ddp", ours, policy.megatron.ddp, fast)
    return [DistributedDataParallel(config, ddp, model) for model in models]


def _build_chunk(
    shape: ModelShape,
    config: TransformerConfig,
    policy: PolicyConfig,
    stage: int,
    chunk: int,
    adapting: Adapting | None,
    is_frozen: bool,
) -> torch.nn.Module:
    parallel, fused = policy.parallel, config.transformer_impl == "transformer_engine"
    number = chunk if parallel.virtual > 1 else None
    layers = parallel.mesh.layer_range(shape.num_layers, stage, chunk)
    block = _fused_block(config, shape, number) if fused else _local_block(config, shape, number, layers)
    for layer in block.layer_specs:
        _count_load(layer)
    rope = shape.attention.rope
    megatron_rotates = fused and shape.attention.is_rotated_by_megatron and shape.vision is None
    scaling = rope.scaling if megatron_rotates else None
    with (
        _without_apex() if fused else nullcontext(),
        linear_layers_in_fp8() if shape.is_frozen_in_fp8 else nullcontext(),
    ):
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=block,
            vocab_size=padded_vocabulary(shape, parallel.tensor),
            max_sequence_length=shape.max_positions,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == parallel.pipeline - 1 and chunk == parallel.virtual - 1,
            vp_stage=number,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope" if megatron_rotates else "none",
            rotary_percent=rope.share,
            rotary_base=int(rope.theta),
            rope_scaling=scaling is not None,
            rope_scaling_factor=scaling.factor if scaling else 1.0,
        )
    if gpt.pre_process and FAMILIES[shape.family].embedding.scaled:
        gpt.embedding.register_forward_hook(partial(_scaled, shape.hidden_size**0.5))
    if gpt.post_process and shape.value_head:
        add_value_head(gpt)
    elif gpt.post_process:
        gpt.output_layer.__class__ = OutputLayer  # GPTModel has no option for this class; only `forward` differs
    if gpt.post_process and shape.multi_token:
        add_head(gpt, _head_layer(config, shape), block.layer_norm)
    if gpt.pre_process and shape.vision is not None:
        add_deep(gpt, shape.vision)
    prepare_routers(gpt, policy.routing_replay)
    gpt.to(platform.device())
    if adapting is not None:
        adapting.adapt(gpt, "" if number is None else f"chunk{number}.")
    if is_frozen:
        gpt.requires_grad_(False)
    wrapped: torch.nn.Module = Float16Module(config, gpt) if config.bf16 or config.fp16 else gpt
    keep_biases_in_float32([gpt])
    _keep_rates_in_float32(gpt, shape)
    return wrapped


def _keep_rates_in_float32(gpt: GPTModel, shape: ModelShape) -> None:
    """Undo what Megatron's wrapper for bf16 does to parameters whose rows are float32, before weights are loaded."""
    for name, parameter in gpt.named_parameters():
        if FAMILIES[shape.family].is_float32(name):
            parameter.data = parameter.data.float()


def _scaled(scale: float, embedding: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
    """A factor of the embedding's output."""
    return output * torch.tensor(scale, dtype=output.dtype, device=output.device)


def _fused_block(config: TransformerConfig, shape: ModelShape, number: int | None) -> TransformerBlockSubmodules:
    """The spec of the layers of a stage, or of the virtual stage with this number: Transformer Engine's."""
    block = get_gpt_decoder_block_spec(config, True, vp_stage=number)
    for spec in block.layer_specs:
        _fit_fused(spec, shape)
    return block


def _fit_fused(spec: ModuleSpec, shape: ModelShape) -> None:
    if not shape.attention.is_rotated_by_megatron:
        spec.submodules.self_attention.module = LatentSelfAttention
    elif shape.vision is not None:
        own = spec.submodules.self_attention.submodules
        own.core_attention = rotating(own.core_attention)


def _count_load(layer: ModuleSpec) -> None:
    """Give a mixture our router."""
    if getattr(layer.submodules.mlp, "module", None) is MoELayer:
        layer.submodules.mlp.submodules.router = Router


def _head_layer(config: TransformerConfig, shape: ModelShape) -> ModuleSpec:
    """The spec of the layer of a multi-token head: like the model's last one, but never with linear attention."""
    fused = config.transformer_impl == "transformer_engine"
    spec: ModuleSpec = get_gpt_decoder_layer_specs(config, fused, "RMSNorm")[-1]
    if fused:
        _fit_fused(spec, shape)
    else:
        _fit_local(spec, shape.head_layers[0])
    _count_load(spec)
    return spec


def _local_block(
    config: TransformerConfig, shape: ModelShape, number: int | None, layers: range
) -> TransformerBlockSubmodules:
    """The spec of the layers of a stage, or of the virtual stage with this number: Megatron's own, with our norms and
    attention.

    Args:
        layers: the layers of the stage.
    """
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=number)
    own = [shape.layers[n] for n in layers]
    specs = dict(zip(own, map(copy.deepcopy, block.layer_specs), strict=True))  # Megatron's are shared by unlike layers
    for layer, spec in specs.items():
        _fit_local(spec, layer)
    block.layer_specs = [specs[layer] for layer in own]
    block.layer_norm = Norm
    return block


def _fit_local(spec: ModuleSpec, layer: Layer) -> None:
    """Give a layer our norms and attention, and what it has in other ways."""
    norm = Norm if layer.norms_on_both_sides or not layer.post_norm else IdentityOp
    if layer.post_norm:
        spec.module = PostNormLayer
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    fit(spec.submodules, layer)
