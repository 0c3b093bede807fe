"""A working folder with a whole run that has no fault, which each test of the preflight spoils."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig, SftRunConfig
from megatron_rl.models import FAMILIES, read_shape
from megatron_rl.preflight.checks import preflight
from megatron_rl.types import ModelShape

CONFIGS = Path(__file__).parents[3] / "configs" / "model"


CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
}


VOCABULARY = ["<eos>", "<unk>", "</think>", "<u>", *"0123456789+= abcdefghijklmnopqrstuvwxyz"]


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "<u>{{ m.content }}<eos>{% endfor %}"
)


def safetensors(tensors: dict[str, tuple[int, ...]], metadata: dict[str, str] | None = None) -> bytes:
    header, at = {"__metadata__": metadata} if metadata else {}, 0
    for name, extents in tensors.items():
        size = 4
        for extent in extents:
            size *= extent
        header[name] = {"dtype": "F32", "shape": list(extents), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def write_tokenizer(folder: Path, vocabulary=VOCABULARY) -> None:
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("<u>|<eos>|</think>|."), "isolated")
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "unk_token": {"content": "<unk>"}}))


def grpo(**changes) -> GrpoRunConfig:
    merged = {
        "run": {"name": "adds/first", "steps": 3},
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl", "eval": "eval.jsonl"},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_response_tokens": 20},
        "balance": {"max_tokens_per_microbatch": 96},
        "rewards": [{"kind": "exact_answer"}, {"kind": "function", "path": "my_rewards:short"}],
    }
    for path, value in changes.items():
        section, _, key = path.partition("__")
        merged[section] = merged.get(section, {}) | {key: value} if key else value
    return validate(GrpoRunConfig, merged)


def sft(**changes) -> SftRunConfig:
    merged = {"run": {"name": "warm", "steps": 3}, "model": {"path": "model"}, "sft": {"rows": "rows.jsonl"} | changes}
    merged["sft"].setdefault("max_tokens", 8)
    return validate(SftRunConfig, merged | {"balance": {"max_tokens_per_microbatch": 96}})


def faults(config, **how) -> list[str]:
    return preflight(config, lambda note: None, **how)


def with_head(home: Path, **head: tuple[int, ...]) -> ModelShape:
    """Make the model a Qwen3-Next with these tensors of a multi-token head."""
    config = CONFIG | {"model_type": "qwen3_next", "layer_types": ["full_attention"] * CONFIG["num_hidden_layers"]}
    config |= {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    (home / "model/config.json").write_text(json.dumps(config | {"shared_expert_intermediate_size": 8}))
    (home / "model/model.safetensors.index.json").unlink(missing_ok=True)
    for path in (home / "model").glob("*.safetensors"):
        path.unlink()
    tensors = FAMILIES["qwen3_next"].hf_tensors(read_shape(home / "model"))
    (home / "model/a.safetensors").write_bytes(safetensors(tensors))
    (home / "model/b.safetensors").write_bytes(safetensors(head))
    return read_shape(home / "model")


def rows(name: str, *lines) -> None:
    Path(name).write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")


GOOD = {"prompt": "1+1=", "ground_truth": "2"}


def truncate(home):
    path = home / "model" / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
