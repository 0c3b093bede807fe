"""Reads config.json into a ModelShape. If the model has a feature that its family's table does not describe, an error
names the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, cast

from megatron_rl.models.composite import COMPOSITES, text_of
from megatron_rl.models.config_values import flag, kinds_of_layers, number, size
from megatron_rl.models.families import FAMILIES
from megatron_rl.models.families.windows import FULL, SCALED, SLIDING
from megatron_rl.models.family import Family
from megatron_rl.types import (
    Attention,
    DeltaNet,
    GatedMlp,
    LatentAttention,
    Layer,
    Llama3Rope,
    Mixture,
    Mlp,
    ModelShape,
    Rope,
    SoftmaxAttention,
    YarnRope,
)

_CAUSAL, _CLASSIFIES = "ForCausalLM", "ForSequenceClassification"
"""The ends of the names of transformers' classes: models of logits, and models of one number for a sequence."""
_MROPE = ("mrope_section", "mrope_interleaved")
"""Keys that have no meaning for text alone; `families.delta` checks them."""
_YARN = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"}


class Special(TypedDict, total=False):
    """What `Family.read_config` finds."""

    mixture: Mixture
    dense_layers: int
    """The number of layers before the first mixture."""
    latent: dict[str, int]
    """The sizes of `LatentAttention`, which takes the place of softmax attention."""
    softmax: dict[str, Any]
    """Further fields of `SoftmaxAttention`."""
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
    if folder.suffix == ".gguf":
        raise ValueError(
            f"model.path: {folder} is a GGUF file, with which no run can begin; make a folder of it with "
            f"`megatron-rl convert from-gguf {folder} {folder.with_suffix('')}` and give that"
        )
    if not path.is_file():
        found = "has no config.json" if folder.is_dir() else "has no config.json, because it does not exist"
        needed = "give the folder of a Hugging Face checkpoint"
        if (folder / "adapter_config.json").is_file():
            needed = "it holds adapters: give their base model, and the adapters as policy.lora.start, or merge the two"
        raise ValueError(f"model.path: {folder} {found}; {needed}{hub_hint(folder)}")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:  # bytes that are no UTF-8, too
        raise ValueError(f"{path} is no JSON ({error}); copy the checkpoint again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no mapping; give the folder of a Hugging Face checkpoint")
    family = config.get("model_type")
    if family not in FAMILIES and family not in COMPOSITES:
        supported = ", ".join(sorted({*FAMILIES, *COMPOSITES}))
        raise ValueError(
            f"{path}: model_type {family!r} is not supported; supported: {supported}. For another model `megatron-rl "
            f"family {path.parent}`, in a clone, proposes what to add (docs/models.md)"
        )
    try:
        config = text_of(config)
        family = config["model_type"]
        _check_class(FAMILIES[family], config)
        if "sliding_window" in FAMILIES[family].known:
            kinds_of_layers(config, (FULL,), f" for the family {family}")
        return shape_of(FAMILIES[family], config)
    except KeyError as error:
        raise ValueError(f"{path}: the key {error} is missing; is this the config.json of a {family} model?") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (TypeError, AttributeError) as error:
        empty = ", ".join(key for key, value in config.items() if value is None)
        said = f"these keys are null: {empty}" if empty else str(error)
        raise ValueError(f"{path}: a value has the wrong type ({said}); is this the config.json of a model?") from error


def shape_of(table: Family, config: Mapping[str, Any]) -> ModelShape:
    """The sizes of a model of a family, by its config.json.

    Raises:
        ValueError, KeyError, TypeError: see `read_shape`; the message does not name the file.
    """
    for key, value in table.known.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} is {config[key]!r}; for the family {table.name} only {value!r} is supported")
    heads, hidden = size(config, "num_attention_heads"), size(config, "hidden_size")
    # transformers leaves the number out where a list names the block of each layer.
    num_layers = size(config, "num_hidden_layers", derived=len(config.get("layers_block_type") or ()) or None)
    vocab_size = size(config, "vocab_size")
    theta, scaling = _rope(config, table)
    rope = Rope(theta, scaling, _rotary_share(config, table))
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
        sliding = _windowed(attention, table, special)
        if config.get("head_dim") is None and "head_dim" not in table.absent and hidden % heads:
            raise ValueError(f"hidden_size {hidden} does not divide into {heads} heads; it needs head_dim")
        if attention.rotary_dim % 2 and rope.share != 1.0:
            raise ValueError(
                f"partial_rotary_factor is {rope.share}, which rotates {attention.rotary_dim} of the {head_dim} "
                "dims of a head; only even numbers are supported"
            )
    if (blocks := special.get("blocks")) is None:
        blocks = _blocks(special, sliding, [GatedMlp(ffn_size)] * num_layers)
    mixture = next((mlp for _, mlp in blocks if isinstance(mlp, Mixture)), None)
    _check_experts(config, mixture)
    shape = ModelShape(
        family=table.name,
        hidden_size=hidden,
        vocab_size=vocab_size,
        norm_eps=special.get("norm_eps") or number(config, "rms_norm_eps"),
        max_positions=size(config, "max_position_embeddings"),
        tied_embeddings=flag(config, "tie_word_embeddings"),
        layers=_layers(table, [(own or attention, mlp) for own, mlp in blocks]),
    )
    return critic_shape(shape) if _ends_with_value(config) else shape


def _windowed(attention: SoftmaxAttention, table: Family, special: Special) -> SoftmaxAttention:
    """The attention of the layers with a window."""
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
    return replace(shape, tied_embeddings=False, value_head=True)


def critic_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model with a value head: transformers loads the model as
    `AutoModelForSequenceClassification`."""
    names = [name.replace(_CAUSAL, _CLASSIFIES) for name in config.get("architectures", [])]
    one_label = {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    return config | one_label | {"architectures": names, "tie_word_embeddings": False}


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


def _rope_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What transformers reads: `rope_scaling` alone, if there is one, and else `rope_parameters`. So with both of them
    `rope_theta` in `rope_parameters` is lost, which nobody means.

    Raises:
        ValueError: both are there and differ, or one is no mapping.
    """
    sections = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    for key, section in sections.items():
        if not isinstance(section, Mapping):
            raise ValueError(f"{key} must be a mapping, but it is {section!r}")
    if len(sections) == 2 and sections["rope_parameters"] != sections["rope_scaling"]:
        whole = {**sections["rope_parameters"], **sections["rope_scaling"]}
        raise ValueError(
            "it has both rope_parameters and rope_scaling; transformers reads rope_scaling alone, and forgets "
            f"what only rope_parameters has. Remove rope_scaling, and write rope_parameters: {json.dumps(whole)}"
        )
    return next(iter(sections.values()), {})


def _of_expert(config: Mapping[str, Any]) -> int | None:
    """The size of an expert, which stands for the MLP's in families without dense layers."""
    return config.get("moe_intermediate_size")


def _rotary_share(config: Mapping[str, Any], family: Family) -> float:
    """The share of each head's dims that are rotated. As in transformers, a value inside the section about rotation
    comes first, then a value outside the section; then the family's.

    Raises:
        ValueError: the family rotates whole heads, or this is no share.
    """
    if family.rotary_share == 0.0:  # no class reads the keys
        return 0.0
    section = _rope_section(config)
    section = section.get(FULL) or section
    where = section if "partial_rotary_factor" in section else config
    share = float(number(where, "partial_rotary_factor", family.rotary_share or 1.0))
    if share != 1.0 and family.rotary_share is None:
        raise ValueError(f"partial_rotary_factor is {share}, but heads of the family {family.name} are rotated whole")
    if not 0.0 < share <= 1.0:
        raise ValueError(f"partial_rotary_factor must be above 0 and at most 1, but it is {share}")
    return share


def _rope(config: Mapping[str, Any], table: Family) -> tuple[float, Llama3Rope | YarnRope | None]:
    """The base and the scaling of the rotary embeddings. transformers 5 writes them as rope_parameters, and for OLMo 3
    separately for each kind of attention; earlier versions wrote rope_theta and rope_scaling."""
    rope = dict(_rope_section(config))
    where = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    default = table.absent.get("rope_theta", 10_000.0)
    apart = sorted(rope.keys() & {FULL, SLIDING})
    if SCALED.get(table.name) is False:
        rope = _of_full_attention(config, rope, where, default)
    elif apart:
        raise ValueError(
            f"{where} has the section {apart[0]}, but all layers of the family {table.name} are rotated alike, and "
            f"transformers reads no section; write the keys of the section into {where} itself"
        )
    theta = float(number(rope if "rope_theta" in rope else config, "rope_theta", default))
    rope.pop("rope_theta", None)
    kind = rope.pop("rope_type", None) or rope.pop("type", "default")
    rope.pop("type", None)
    rope.pop("partial_rotary_factor", None)  # `_rotary_share` reads it
    scaling: Llama3Rope | YarnRope | None = None
    known: set[str] = set()
    # transformers prefers the number outside the section to the one in it.
    if kind in ("llama3", "yarn") and config.get("original_max_position_embeddings") is not None:
        rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    if kind == "llama3":
        known = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
        scaling = Llama3Rope(
            factor=number(rope, "factor"),
            low_freq_factor=number(rope, "low_freq_factor"),
            high_freq_factor=number(rope, "high_freq_factor"),
            original_max_positions=number(rope, "original_max_position_embeddings"),
        )
    elif kind == "yarn":
        known = {"factor", "original_max_position_embeddings", "truncate", *_YARN}
        scaling = YarnRope(
            factor=number(rope, "factor"),
            original_max_positions=number(
                rope, "original_max_position_embeddings", size(config, "max_position_embeddings")
            ),
            truncate=flag(rope, "truncate", absent=True),
            # 0 switches an mscale off.
            **{key: rope[key] and number(rope, key) for key in _YARN if rope.get(key) is not None},
        )
    elif kind != "default":
        raise ValueError(f"{where}.rope_type: rope scaling {kind!r} is not supported; supported are llama3 and yarn")
    if foreign := sorted(rope.keys() - known - set(_MROPE if table.linear else ())):
        raise ValueError(f"{where}: rope scaling {kind!r} has the key {foreign[0]!r}, which is not supported")
    return theta, scaling


def _of_full_attention(
    config: Mapping[str, Any], rope: Mapping[str, Any], where: str, default: float
) -> dict[str, Any]:
    """The rotation of the layers without a window, of a family that has one for each kind of layers. The section of a
    kind may be missing, as in transformers: it is then unscaled. A `rope_theta` outside the sections and a
    `rope_scaling` are of the layers without a window alone.

    Raises:
        ValueError: there are other keys than sections, which transformers would ignore, or layers with a window are
            rotated otherwise than unscaled with the same base.
    """
    if where == "rope_scaling":
        rope = {FULL: rope}
    if foreign := sorted(rope.keys() - {FULL, SLIDING}):
        raise ValueError(
            f"{where} has the key {foreign[0]!r} outside the sections {FULL} and {SLIDING}, where transformers reads "
            "nothing; write it into both"
        )
    sections = {kind: rope.get(kind) or {} for kind in (FULL, SLIDING)}
    for kind, section in sections.items():
        if not isinstance(section, Mapping):
            raise ValueError(f"{where}.{kind} must be a mapping, but it is {json.dumps(section)}")
    outside = sections[FULL] if "rope_theta" in sections[FULL] else config
    base, of_windows = number(outside, "rope_theta", default), number(sections[SLIDING], "rope_theta", default)
    kind = sections[SLIDING].get("rope_type", "default")
    if kind != "default" or base != of_windows:
        raise ValueError(
            f"layers with a window must be rotated by rope_type 'default' and the rope_theta of the others, {base:g}, "
            f"but transformers rotates them by {kind!r} and {of_windows:g}; see {SLIDING} of rope_parameters"
        )
    return dict(sections[FULL])
