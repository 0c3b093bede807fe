"""Folders of tiny models with random weights, as the tests of TRL name them, with one tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import image_models
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from megatron_rl.recipes.tiny.gsm8k import write_model

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "cohere2": ("Cohere2Config", {}),
    "gemma2": ("Gemma2Config", {"head_dim": 32}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 32, "sliding_window": 64}),
    "minimaxm2": (
        "MiniMaxM2Config",
        {
            **{"head_dim": 32, "rotary_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
            **{"scoring_func": "sigmoid", "use_routing_bias": True},
        },
    ),
    "qwen3moe": (
        "Qwen3MoeConfig",
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gptoss": ("GptOssConfig", {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4moe": (
        "Glm4MoeConfig",
        {
            **{"head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            **{"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        },
    ),
    "nemotronh": (
        "NemotronHConfig",
        {
            **{"head_dim": 32, "hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "mamba_num_heads": 4},
            **{"mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1},
        },
    ),
}
REWARDS = {"scorer": "Qwen2Config", "scorer_llama": "LlamaConfig"}
"""Reward models, with one label."""
TOOLS = '{% if tools %}{{ tools | tojson }} Answer <tool_call>{"name": ..., "arguments": {}}</tool_call>{% endif %}'


def write(folder: Path) -> None:
    disable_progress_bar()
    image_models.write_model(folder / "qwen3vl")
    template = folder / "qwen3vl" / "chat_template.jinja"
    template.write_text(TOOLS + template.read_text())
    write_model(folder / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tiny" / "model")
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": tokenizer.eos_token_id}
    for name, model in _models(ids):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    # Without the opened thought, which this template would not write in earlier turns.
    tokenizer.chat_template = TOOLS + tokenizer.chat_template.replace("<think>\n", "")
    tokenizer.save_pretrained(folder / "qwen3moe")
    base = folder / "base"
    base.mkdir()
    for file in (folder / "qwen2").iterdir():
        if file.name != "chat_template.jinja":
            (base / file.name).write_bytes(file.read_bytes())


def _models(ids: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, (kind, own) in FAMILIES.items():
        torch.manual_seed(0)
        yield name, AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{**SIZES, **ids, **own}))
    for name, kind in REWARDS.items():
        torch.manual_seed(1)
        config = getattr(transformers, kind)(**{**SIZES, **ids, "num_labels": 1})
        yield name, AutoModelForSequenceClassification.from_config(config)
