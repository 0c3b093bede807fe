"""Folders of adapters in PEFT's form: `adapter_config.json`, and `adapter_model.safetensors` with the tensors' names
behind `base_model.model.`. https://huggingface.co/docs/peft/developer_guides/checkpoint describes it; vLLM,
transformers and PEFT read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.layout import FAMILIES, linear_layers
from megatron_rl.layout.adapters import is_adapter
from megatron_rl.types import Adapters, ModelShape

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_ONLY: Mapping[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "lora_bias": False,
}
"""The keys that change what an adapter computes, with the value that this project has. Absent means the same."""


def read_adapters(folder: Path) -> Adapters:
    """What the adapters of a folder are, without their tensors.

    Raises:
        ValueError: the folder has no adapters in PEFT's form, or adapters of another kind; the message has the key.
    """
    path = folder / CONFIG
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{folder} has no {CONFIG}; give a folder that PEFT or an export has written") from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    for key, value in _ONLY.items():
        found = config.get(key, value)
        if found != value and (found or value):
            raise ValueError(f"{path} has {key}: {found!r}, and only {value!r} is supported")
    targets = config.get("target_modules") or ()
    if isinstance(targets, str) and targets != "all-linear":
        raise ValueError(f"{path} has target_modules: {targets!r}; only a list of names, or all-linear, is supported")
    named = () if isinstance(targets, str) else tuple(sorted({target.rpartition(".")[2] for target in targets}))
    return Adapters(config["r"], float(config["lora_alpha"]), named, bool(config.get("use_rslora")))


def config_of(shape: ModelShape, base: str) -> str:
    """The text of adapter_config.json.

    Args:
        base: what `base_model_name_or_path` says.
    """
    adapters = shape.adapters
    assert adapters is not None, "a model without adapters has no such file"
    config = dict(_ONLY) | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "use_rslora": adapters.rank_stabilised,
        "target_modules": sorted(adapters.targets or linear_layers(shape)),
    }
    return json.dumps(config, indent=2) + "\n"


def tensors_of(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The extents of all tensors of a model's adapters, by their HF names, without PEFT's prefix."""
    tensors = FAMILIES[shape.family].hf_tensors(shape)
    return {name: extents for name, extents in tensors.items() if is_adapter(name)}
