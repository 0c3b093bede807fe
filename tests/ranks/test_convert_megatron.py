"""The distributed checkpoint that the converter writes without Megatron, loaded by Megatron-Core itself on several
meshes."""

from __future__ import annotations

from pathlib import Path

import convert_ranks
import pytest
import torch
import torch.multiprocessing
import transformers

from megatron_rl.convert import Options, carry_out, open_checkpoint, to_open
from megatron_rl.types import Mesh

SIZES = dict(
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=60,
    max_position_embeddings=128,
    pad_token_id=0,
    initializer_range=0.2,
)
MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=12)
LATENT = dict(
    q_lora_rank=20,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    n_shared_experts=2,
    num_key_value_heads=4,
)
MODELS = {
    "llama_tied": ("Llama", dict(tie_word_embeddings=True)),
    "qwen2": ("Qwen2", {}),
    "qwen3_moe": ("Qwen3Moe", MIXTURE),
    "qwen3_moe_dense": ("Qwen3Moe", MIXTURE | dict(mlp_only_layers=[0])),
    "deepseek_v3": ("DeepseekV3", LATENT),
}
"""Layers that are all alike, with and without experts, and layers that are not."""


def convert(folder: Path, max_file_bytes: int = 50_000) -> Path:
    checkpoint = folder.with_name(folder.name + "-megatron")
    if not checkpoint.exists():
        carry_out(
            to_open(open_checkpoint(folder), Options(max_file_bytes=max_file_bytes)), checkpoint, 2, lambda n: None
        )
    return checkpoint


def run(function, cases: list, tmp_path: Path) -> None:
    arguments = (2, f"file://{tmp_path}/store", cases)
    torch.multiprocessing.spawn(function, arguments, nprocs=2)


@pytest.mark.deep
def test_megatron_loads_what_the_actor_loads_from_the_folder(model_folder, tied_model_folder, tmp_path):
    cases = [
        (folder, convert(folder), mesh)
        for folder in (model_folder, tied_model_folder)
        for mesh in (Mesh(data=2), Mesh(tensor=2), Mesh(pipeline=2))
    ]
    run(convert_ranks.load_into_actor, cases, tmp_path)


@pytest.mark.deep
def test_megatron_loads_what_the_actor_saves(model_folder, tied_model_folder, tmp_path):
    """Saved on the first mesh, loaded on all of them."""
    cases = [
        (folder, tmp_path / folder.name, mesh)
        for folder in (model_folder, tied_model_folder)
        for mesh in (Mesh(data=2), Mesh(tensor=2), Mesh(pipeline=2))
    ]
    run(convert_ranks.load_what_was_saved, cases, tmp_path)


@pytest.mark.deep
def test_megatrons_own_models_load_it_in_any_layout(tmp_path):
    cases = []
    for name, (family, more) in MODELS.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**(SIZES | more))
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        for tensor in model.state_dict().values():
            torch.nn.init.normal_(tensor)
        model.save_pretrained(tmp_path / name)
        meshes = [Mesh(tensor=2), Mesh(pipeline=2)]
        if "moe" in name or "deepseek" in name:
            meshes += [Mesh(data=2, expert=2), Mesh(tensor=2, expert=2, expert_tensor=1)]
        cases += [(tmp_path / name, convert(tmp_path / name), mesh) for mesh in meshes]
    run(convert_ranks.load_into_gpt, cases, tmp_path)
