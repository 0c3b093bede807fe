"""Reads config.json into a ModelShape. If the model has a feature that its family's table does not describe, an error
names the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.layout.families import FAMILIES
from megatron_rl.types import Llama3Rope, ModelShape, YarnRope

_FIXED = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
_CLASSIFIES = "ForSequenceClassification"
_YARN = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"}


def read_shape(folder: Path) -> ModelShape:
    """Read the model's sizes from a checkpoint folder's config.json, or from a JSON file of the same form.

    Raises:
        ValueError: the folder or its config.json is missing or unreadable, the family is unknown, or the model has a
            feature that its family's table does not describe.
    """
    path = folder if folder.suffix == ".json" else folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model.path: {folder} has no config.json; give the folder of a Hugging Face checkpoint")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON ({error}); copy the checkpoint again") from error
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{path}: model_type {family!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    try:
        return _shape(family, config)
    except KeyError as error:
        raise ValueError(f"{path}: the key {error} is missing; is this the config.json of a {family} model?") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _shape(family: str, config: Mapping[str, Any]) -> ModelShape:
    for key, value in _FIXED.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} is {config[key]!r}; for the family {family} only {value!r} is supported")
    heads = config["num_attention_heads"]
    theta, scaling = _rope(config, FAMILIES[family].rope_theta)
    fields: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "ffn_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "rope_theta": theta,
        "norm_eps": config["rms_norm_eps"],
        "max_positions": config["max_position_embeddings"],
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "rope_scaling": scaling,
    }
    shape = ModelShape(family, **(fields | FAMILIES[family].read_config(config)))
    if _ends_with_value(config):
        shape = critic_shape(shape)
    if shape.sliding_layers and shape.rope_scaling and family != "olmo3":
        raise ValueError("rope scaling together with sliding windows is supported only for olmo3")
    return shape


def critic_shape(shape: ModelShape) -> ModelShape:
    """The same model with a value head. Its embedding is tied to nothing."""
    return replace(shape, tied_embeddings=False, value_head=True)


def critic_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model with a value head, with which transformers loads it as
    `AutoModelForSequenceClassification`."""
    names = [name.replace("ForCausalLM", _CLASSIFIES) for name in config.get("architectures", [])]
    one_label = {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    return config | one_label | {"architectures": names, "tie_word_embeddings": False}


def _ends_with_value(config: Mapping[str, Any]) -> bool:
    """
    Raises:
        ValueError: the model gives several numbers, or none.
    """
    if not any(name.endswith(_CLASSIFIES) for name in config.get("architectures") or ()):
        return False
    num_labels = len(config.get("id2label", ("", "")))  # transformers' default is two
    if num_labels != 1:
        raise ValueError(f"the model gives {num_labels} numbers (id2label); only models that give one are supported")
    return True


def _rope(config: Mapping[str, Any], default: float) -> tuple[float, Llama3Rope | YarnRope | None]:
    """The base and the scaling of the rotary embeddings. transformers 5 writes them as rope_parameters, and for OLMo 3
    separately for each kind of attention; earlier versions wrote rope_theta and rope_scaling."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "full_attention" in rope:
        rope, sliding = dict(rope["full_attention"]), rope["sliding_attention"]
        if sliding.get("rope_type", "default") != "default" or sliding.get("rope_theta") != rope.get("rope_theta"):
            raise ValueError(
                "rope_parameters: sliding layers must be unscaled and have the same rope_theta as full attention"
            )
    theta = float(rope.pop("rope_theta") if "rope_theta" in rope else config.get("rope_theta", default))
    kind = rope.pop("rope_type", None) or rope.pop("type", "default")
    rope.pop("type", None)
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor: partly rotated heads are not supported")
    scaling: Llama3Rope | YarnRope | None = None
    known: set[str] = set()
    if kind == "llama3":
        known = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
        scaling = Llama3Rope(
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_positions=rope["original_max_position_embeddings"],
        )
    elif kind == "yarn":
        known = {"factor", "original_max_position_embeddings", *_YARN}
        scaling = YarnRope(
            factor=rope["factor"],
            original_max_positions=rope.get("original_max_position_embeddings", config["max_position_embeddings"]),
            **{key: rope[key] for key in _YARN if rope.get(key) is not None},
        )
    elif kind != "default":
        raise ValueError(f"rope scaling {kind!r} is not supported; supported are llama3 and yarn")
    if foreign := sorted(rope.keys() - known):
        raise ValueError(f"rope scaling {kind!r} has the key {foreign[0]!r}, which is not supported")
    return theta, scaling
