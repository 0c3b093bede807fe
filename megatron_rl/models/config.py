"""Reads config.json into a ModelShape. If the model has a feature that its family's table does not describe, an error
names the key."""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, cast

from megatron_rl.models.composite import COMPOSITES, text_of
from megatron_rl.models.config_rope import read_ropes
from megatron_rl.models.config_values import flag, kinds_of_layers, number, size
from megatron_rl.models.families import FAMILIES
from megatron_rl.models.families.windows import FULL, SCALED
from megatron_rl.models.family import Family
from megatron_rl.models.vision import read_vision
from megatron_rl.types import (
    Attention,
    DeltaNet,
    GatedMlp,
    LatentAttention,
    Layer,
    Mixture,
    Mlp,
    ModelShape,
    Rope,
    SoftmaxAttention,
)

_CAUSAL, _CLASSIFIES = "ForCausalLM", "ForSequenceClassification"
"""The ends of the names of transformers' classes: models of logits, and models of one number for a sequence."""


class Special(TypedDict, total=False):
    """What `Family.read_config` finds."""

    mixture: Mixture
    dense_layers: int
    """The number of layers before the first mixture."""
    latent: dict[str, int]
    """The sizes of `LatentAttention`, which takes the place of softmax attention."""
    softmax: dict[str, Any]
    """Further fields of `SoftmaxAttention`."""
    dense: dict[str, Any]
    """Further fields of `GatedMlp`."""
    window: int
    windowed: tuple[int, ...]
    """The indices of the layers with the window."""
    delta: DeltaNet
    linear_layers: tuple[int, ...]
    """The indices of the layers with linear attention."""
    blocks: list[tuple[Attention | None, Mlp]]
    """The blocks of each layer, in the place of all that the keys above say; None: softmax attention."""
    norm_eps: float
    """The epsilon of the norms, if it has another key than `rms_norm_eps`."""


def read_shape(folder: Path) -> ModelShape:
    """Read the model's sizes from a checkpoint folder's config.json, or from a JSON file of the same form.

    Raises:
        ValueError: the folder or its config.json is missing or unreadable, the family is unknown, or the model has a
            feature that its family's table does not describe.
    """
    path = folder if folder.suffix == ".json" else folder / "config.json"
    config = read_fields(path)
    family = config.get("model_type")
    if family not in FAMILIES and family not in COMPOSITES:
        supported = ", ".join(sorted({*FAMILIES, *COMPOSITES}))
        raise ValueError(
            f"{path}: model_type {family!r} is not supported; supported: {supported}. For another model `megatron-rl "
            f"family {path.parent}`, in a clone, proposes what to add (docs/models.md)"
        )
    try:
        vision, config = read_vision(config), text_of(config)
        family = config["model_type"]
        _check_class(FAMILIES[family], config)
        return replace(shape_of(FAMILIES[family], config), vision=vision)
    except KeyError as error:
        raise ValueError(f"{path}: the key {error} is missing; is this the config.json of a {family} model?") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (TypeError, AttributeError) as error:
        empty = ", ".join(key for key, value in config.items() if value is None)
        said = f"these keys are null: {empty}" if empty else str(error)
        raise ValueError(f"{path}: a value has the wrong type ({said}); is this the config.json of a model?") from error


def read_fields(path: Path) -> dict[str, Any]:
    """The config.json at `path`.

    Raises:
        ValueError: it is missing or unreadable; the error says what to do.
    """
    folder = path.parent if path.name == "config.json" else path
    if folder.suffix == ".gguf":
        raise ValueError(
            f"model.path: {folder} is a GGUF file, with which no run can begin; make a folder of it with "
            f"`megatron-rl convert from-gguf {folder} {folder.with_suffix('')}` and give that"
        )
    if not path.is_file():
        why = "" if folder.is_dir() else ", because it is a file" if folder.exists() else ", because it does not exist"
        needed = "give the folder of a Hugging Face checkpoint"
        if (folder / "adapter_config.json").is_file():
            needed = "it holds adapters: give their base model, and the adapters as policy.lora.start, or merge the two"
        raise ValueError(f"model.path: {folder} has no config.json{why}; {needed}{hub_hint(folder)}")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:  # bytes that are no UTF-8, too
        raise ValueError(f"{path} is no JSON ({error}); copy the checkpoint again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no mapping; give the folder of a Hugging Face checkpoint")
    return config


def shape_of(table: Family, config: Mapping[str, Any]) -> ModelShape:
    """The sizes of a model of a family, by its config.json.

    Raises:
        ValueError, KeyError, TypeError: see `read_shape`; the message does not name the file.
    """
    config = ChainMap(cast(MutableMapping[str, Any], config), dict(table.absent))
    for key, value in table.known.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} is {config[key]!r}; for the family {table.name} only {value!r} is supported")
    if "sliding_window" in table.known:
        kinds_of_layers(config, (FULL,), f" for the family {table.name}")
    heads, hidden = size(config, "num_attention_heads"), size(config, "hidden_size")
    # transformers leaves the number out where a list names the block of each layer.
    num_layers = size(config, "num_hidden_layers", derived=len(config.get("layers_block_type") or ()) or None)
    vocab_size = size(config, "vocab_size")
    rope, own = read_ropes(config, table)
    kv_heads = size(config, "num_key_value_heads", table.absent.get("num_key_value_heads"), heads)
    head_dim = size(config, "head_dim", table.absent.get("head_dim"), hidden // heads)
    ffn_size = size(config, "intermediate_size", derived=None if table.dense else _of_expert(config))
    special = cast(Special, table.read_config(config))
    attention: Attention
    sliding: Attention
    if latent := special.get("latent"):
        attention = sliding = LatentAttention(heads, **latent, rope=rope)
    else:
        attention = SoftmaxAttention(heads, kv_heads, head_dim, rope, **special.get("softmax", {}))
        sliding = _windowed(attention, own, table, special)
        if config.get("head_dim") is None and "head_dim" not in table.absent and hidden % heads:
            raise ValueError(f"hidden_size {hidden} does not divide into {heads} heads; it needs head_dim")
        if attention.rotary_dim % 2 and rope.share != 1.0:
            raise ValueError(
                f"partial_rotary_factor is {rope.share}, which rotates {attention.rotary_dim} of the {head_dim} "
                "dims of a head; only even numbers are supported"
            )
        if (dims := config.get("rotary_dim") or attention.rotary_dim) != attention.rotary_dim:
            raise ValueError(
                f"rotary_dim is {dims}, but {attention.rotary_dim} of the {head_dim} dims of a head are rotated"
            )
    if (blocks := special.get("blocks")) is None:
        blocks = _blocks(special, sliding, [GatedMlp(ffn_size, **special.get("dense", {}))] * num_layers)
    mixture = next((mlp for _, mlp in blocks if isinstance(mlp, Mixture)), None)
    _check_experts(config, mixture)
    shape = ModelShape(
        family=table.name,
        hidden_size=hidden,
        vocab_size=vocab_size,
        norm_eps=special.get("norm_eps") or number(config, "rms_norm_eps"),
        max_positions=size(config, "max_position_embeddings"),
        output="embedding" if flag(config, "tie_word_embeddings") else "own",
        layers=_layers(table, [(block or attention, mlp) for block, mlp in blocks]),
    )
    return critic_shape(shape) if _ends_with_value(config) else shape


def _windowed(attention: SoftmaxAttention, own: Rope | None, table: Family, special: Special) -> SoftmaxAttention:
    """The attention of the layers with a window.

    Args:
        own: their rotation, if config.json has one for them.
    """
    if own is not None:
        return replace(attention, window=special.get("window"), rope=own)
    scaled, rope = SCALED.get(table.name), attention.rope
    if special.get("windowed") and rope.scaling and scaled is None:
        raise ValueError(
            f"rope scaling together with sliding windows is supported only for {', '.join(sorted(SCALED))}"
        )
    return replace(attention, window=special.get("window"), rope=rope if scaled else replace(rope, scaling=None))


def _blocks(special: Special, sliding: Attention, mlps: list[Mlp]) -> list[tuple[Attention | None, Mlp]]:
    """`Special.blocks` of a model that has attention and an MLP in each layer.

    Args:
        mlps: of models without a mixture.
    """
    if mixture := special.get("mixture"):
        dense = special.get("dense_layers", 0)
        mlps = mlps[:dense] + [mixture] * (len(mlps) - dense)
    others: dict[int, Attention] = dict.fromkeys(special.get("windowed", ()), sliding)
    others |= {n: special["delta"] for n in special.get("linear_layers", ())}
    return [(others.get(n), mlp) for n, mlp in enumerate(mlps)]


def _layers(table: Family, blocks: list[tuple[Attention, Mlp]]) -> tuple[Layer, ...]:
    """The layers; equal ones are one object."""
    made = {pair: table.layer(*pair) for pair in set(blocks)}
    return tuple(made[pair] for pair in blocks)


def hub_hint(folder: Path) -> str:
    """How a model is fetched, for a path that may be a model's name on the hub of Hugging Face; else an empty text."""
    if folder.exists() or folder.is_absolute() or len(folder.parts) != 2 or Path(folder.parts[0]).exists():
        return ""
    if folder.parts[0] in ("models", "runs", "checkpoints"):  # folders of the documents' examples
        return ""
    target = Path("models", folder.name)
    return (
        f". If {folder} is its name on the hub of Hugging Face, fetch it with `hf download {folder} --local-dir "
        f"{target}` and set model.path to {target}"
    )


def critic_shape(shape: ModelShape) -> ModelShape:
    """The same model with a value head. Its embedding is tied to nothing."""
    return replace(shape, output="value")


def critic_config(config: dict[str, Any], padding: int | None) -> dict[str, Any]:
    """The config.json of a model with a value head: transformers loads the model as
    `AutoModelForSequenceClassification`, which scores a row at its last token that is not the padding token.

    Args:
        padding: the padding token; None if there is none.
    """
    names = [name.replace(_CAUSAL, _CLASSIFIES) for name in config.get("architectures", [])]
    one_label = {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    return config | one_label | {"architectures": names, "tie_word_embeddings": False, "pad_token_id": padding}


def _check_class(family: Family, config: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: `architectures` names another class than the family's, so the model may be another one in spite of
            its `model_type`.
    """
    own, named = family.published_model or family.vllm_model, config.get("architectures")
    critic = own.replace(_CAUSAL, _CLASSIFIES)
    supported = {own, critic, own.replace(_CAUSAL, f"Text{_CLASSIFIES}")}  # the last is transformers' name for Qwen3.5
    if named is not None and (not isinstance(named, list) or not supported.issuperset(map(str, named))):
        raise ValueError(
            f"architectures is {json.dumps(named)}; for the family {family.name} only {own}, or with a value head "
            f"{critic}, is supported"
        )


def _check_experts(config: Mapping[str, Any], mixture: Mixture | None) -> None:
    """
    Raises:
        ValueError: the number of experts is there by two names, which are one to transformers, and they differ.
    """
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if mixture and config.get(key, mixture.num_experts) != mixture.num_experts:
            raise ValueError(
                f"{key} is {json.dumps(config[key])}, but by another key the model has {mixture.num_experts} experts; "
                "make the keys equal"
            )


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


def _of_expert(config: Mapping[str, Any]) -> int | None:
    """The size of an expert, which stands for the MLP's in families without dense layers."""
    return config.get("moe_intermediate_size")
