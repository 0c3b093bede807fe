"""Two trainer processes that load distributed checkpoints with Megatron-Core itself, mesh after mesh."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from megatron_rl.actor import platform  # before Megatron: it silences its import

from megatron.core import dist_checkpointing, parallel_state  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # isort: skip
from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # isort: skip
from megatron.core.utils import unwrap_model  # isort: skip
from scenarios import Layout, build  # isort: skip
from megatron_rl.models import megatron_shards, padded_vocabulary, read_shape, scan, slices
from megatron_rl.types import LatentAttention, Mesh, ModelShape

FUSED_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
LATENT_KEYS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Megatron's local layers, under the keys that Transformer Engine's have."""


def load_into_actor(rank: int, world_size: int, url: str, cases: list[tuple[Path, Path, Mesh]]) -> None:
    """(HF folder, checkpoint, mesh): what Megatron-Core loads is what the actor loads from the folder."""
    for i, (folder, checkpoint, mesh) in enumerate(cases):
        actor = build(rank, world_size, f"{url}{i}", folder, Layout(mesh))
        expected = {name: parameter.detach().clone() for name, parameter in actor.parameters().items()}
        gpt = unwrap_model(actor.chunks[-1])
        with platform.running():
            _load(gpt, checkpoint)
        for name, parameter in actor.parameters().items():
            assert torch.equal(parameter, expected[name]), (mesh, rank, name)
        actor.close()


def load_what_was_saved(rank: int, world_size: int, url: str, cases: list[tuple[Path, Path, Mesh]]) -> None:
    """(HF folder, folder for a checkpoint, mesh): Megatron-Core loads what the actor saves, on another mesh, too."""
    for i, (folder, checkpoint, mesh) in enumerate(cases):
        actor = build(rank, world_size, f"{url}{i}", folder, Layout(mesh))
        if not checkpoint.exists():
            actor.save(checkpoint, {})
            actor.finish_save()
        expected = {name: parameter.detach().clone() for name, parameter in actor.parameters().items()}
        with platform.running():
            _load(unwrap_model(actor.chunks[-1]), checkpoint)
        for name, parameter in actor.parameters().items():
            assert torch.equal(parameter, expected[name]), (mesh, rank, name)
        actor.close()


def load_into_gpt(rank: int, world_size: int, url: str, cases: list[tuple[Path, Path, Mesh]]) -> None:
    """(HF folder, checkpoint, mesh): what Megatron-Core loads into its own GPTModel is what the family's table says."""
    for i, (folder, checkpoint, mesh) in enumerate(cases):
        platform.start(rank, world_size, next(dist.rendezvous(f"{url}{i}", rank, world_size))[0])
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            mesh.tensor,
            mesh.pipeline,
            expert_model_parallel_size=mesh.expert,
            expert_tensor_parallel_size=mesh.expert_ways,
        )
        shape = read_shape(folder)
        with platform.running():
            model_parallel_cuda_manual_seed(0)
            gpt = _model(shape, mesh, mesh.coordinates(rank)[1])
            _load(gpt, checkpoint)
        index = scan(folder, shape).files
        live = dict(gpt.named_parameters()) | {k: b for k, b in gpt.named_buffers() if k.endswith("expert_bias")}
        seen = set()
        for shard in megatron_shards(shape, mesh, rank):
            with safe_open(index[shard.hf_name], framework="pt") as file:
                wanted = file.get_slice(shard.hf_name)[slices(shard.hf_box)]
            assert torch.equal(live[shard.local_name][slices(shard.local_box)], wanted), (folder, mesh, rank, shard)
            seen.add(shard.local_name)
        assert seen == live.keys()
        dist.destroy_process_group()


def _load(gpt: GPTModel, checkpoint: Path) -> None:
    for tensor in (*gpt.parameters(), *(b for name, b in gpt.named_buffers() if name.endswith("expert_bias"))):
        tensor.data.fill_(float("nan"))
    state = dist_checkpointing.load({"model": gpt.sharded_state_dict()}, str(checkpoint))
    gpt.load_state_dict(state["model"])


def _model(shape: ModelShape, mesh: Mesh, stage: int) -> GPTModel:
    from megatron_models import NoAttention, config  # it changes torch.cuda, which the test's own process needs

    transformer_config = config(shape, mesh)
    block = get_gpt_decoder_block_spec(transformer_config, use_transformer_engine=False, normalization="RMSNorm")
    if all(layer.mixture for layer in shape.layers):
        transformer_config.moe_layer_freq = 1  # a list would say that layers differ: each then has keys of its own
    first = mesh.layer_range(shape.num_layers, stage).start
    for i, layer in enumerate(block.layer_specs):
        layer.submodules.self_attention.submodules.core_attention = NoAttention
        fused = dict(FUSED_KEYS)
        if shape.layers[first + i].mixture:
            del fused["pre_mlp_layernorm."]
        if isinstance(shape.attention, LatentAttention):
            del fused["input_layernorm."]
            fused |= LATENT_KEYS
        layer.submodules.sharded_state_dict_keys_map = fused
    return GPTModel(
        config=transformer_config,
        transformer_layer_spec=block,
        vocab_size=padded_vocabulary(shape, mesh.tensor),
        max_sequence_length=shape.max_positions,
        pre_process=stage == 0,
        post_process=stage == mesh.pipeline - 1,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
    )
