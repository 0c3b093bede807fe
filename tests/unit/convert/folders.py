"""Writes and reads tiny random Hugging Face folders of every family."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.convert import Conversion, Options, Outcome, carry_out, open_checkpoint, to_hub
from megatron_rl.models import FAMILIES, read_shape

_COMMON = {
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "intermediate_size": 24,
    "vocab_size": 70,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}
_LATENT = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "head_dim": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_GLM = {"model_type": "glm4_moe", "num_key_value_heads": 4, "head_dim": 8, "attention_bias": True, "use_qk_norm": True}
_GEMMA = {
    **{"model_type": "gemma3_text", "tie_word_embeddings": True, "sliding_window": 8, "sliding_window_pattern": 2},
    **{"query_pre_attn_scalar": 5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
}
_MINIMAX = {
    **{"model_type": "minimax_m2", "scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": 4, "head_dim": 8},
    **{"num_local_experts": 4, "num_experts_per_tok": 2},
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
}
_LINEAR = {
    "head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 4,
}
_GATED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 16,
}
_HYBRID = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-*E",
    "mamba_num_heads": 8,
    "mamba_head_dim": 3,
    "ssm_state_size": 5,
    "n_groups": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 16,
}
CONFIGS = {
    **{name: _COMMON | {"model_type": name} for name in ("llama", "qwen2", "qwen3", "olmo2")},
    "qwen3_tied": _COMMON | {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": _COMMON | _QWEN3_MOE,
    "qwen3_moe_dense": _COMMON | _QWEN3_MOE | {"mlp_only_layers": [0]},
    "mistral": _COMMON | {"model_type": "mistral", "sliding_window": None},
    "mixtral": _COMMON | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo3": _COMMON | {"model_type": "olmo3", "sliding_window": 8, "rope_theta": 5e5},
    "qwen3_next": _COMMON | _LINEAR | _GATED | {"model_type": "qwen3_next"},
    "qwen3_5_text": _COMMON | _LINEAR | {"model_type": "qwen3_5_text", "tie_word_embeddings": True},
    "qwen3_5_moe_text": _COMMON | _LINEAR | _GATED | {"model_type": "qwen3_5_moe_text"},
    "deepseek_v3": _COMMON | _LATENT,
    "gpt_oss": _COMMON | _GPT_OSS,
    "deepseek_v3_direct": _COMMON | _LATENT | {"q_lora_rank": None},
    **{name: _COMMON | _LATENT | {"model_type": name} for name in ("kimi_k2", "glm4_moe_lite")},
    "gemma3_text": _COMMON | _GEMMA,
    "minimax_m2": _COMMON | _MINIMAX,
    "glm4_moe": _COMMON | _LATENT | _GLM,
    "nemotron_h": _COMMON | _HYBRID,
}
"""The config.json of each model."""
assert {config["model_type"] for config in CONFIGS.values()} == set(FAMILIES)


def write_folder(folder: Path, name: str, dtype: torch.dtype = torch.float32, num_files: int = 2, **changes) -> Path:
    """A folder of several files with random tensors, each of which holds a NaN, an infinity and a negative zero."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    shape = read_shape(folder)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for key, held in FAMILIES[shape.family].file_tensors(shape).items():
        tensors[key] = torch.randn(held.extents, generator=generator).to(dtype)
        tensors[key].view(-1)[:3] = torch.tensor([float("nan"), float("-inf"), -0.0])
    keys = list(tensors)
    for i in range(num_files):
        part = {key: tensors[key] for key in keys[i::num_files]}
        save_file(part, folder / f"model-{i + 1:05d}-of-{num_files:05d}.safetensors", metadata={"format": "pt"})
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of an HF folder, read by safetensors itself."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                assert name not in tensors
                tensors[name] = file.get_tensor(name)
    return tensors


def read_plain(folder: Path) -> dict[str, Tensor]:
    """All HF tensors of a folder in the form that the family's table has."""
    shape, held = read_shape(folder), read(folder)
    family = FAMILIES[shape.family]
    extents, views = family.hf_tensors(shape), family.views(shape)
    return {
        name: held[view.name].as_strided(extents[name], view.strides, view.offset)
        if (view := views.get(name))
        else held[name]
        for name in extents
    }


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and tensor.shape == b[name].shape, name
        assert torch.equal(bits(tensor), bits(b[name])), name


def write(conversion: Conversion, target: Path, num_workers: int = 1) -> Outcome:
    return carry_out(conversion, target, num_workers, lambda done_bytes: None)


def back(folder: Path, target: Path, options: Options = Options()) -> Path:
    write(to_hub(open_checkpoint(folder), options), target)
    return target
