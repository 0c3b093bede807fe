"""Folders of adapters in PEFT's form: `adapter_config.json`, and `adapter_model.safetensors` with the tensors' names
behind `base_model.model.`. https://huggingface.co/docs/peft/developer_guides/checkpoint describes it; vLLM,
transformers and PEFT read it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.layout import FAMILIES, linear_layers
from megatron_rl.layout.adapters import is_adapter
from megatron_rl.layout.hub import MANIFEST, metadata_of, read_header
from megatron_rl.types import Adapters, ModelShape

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE = "base_digest"
"""The key of the tensors' metadata that has the digest of the base model."""
FORM = "base_form"
"""The key of the tensors' metadata that says how the trainer held the weights of the base model (`Adapters.base`)."""
SAMPLE = 64
"""The bytes of each tensor that a digest of a base model reads."""
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


def base_digest(folder: Path) -> str:
    """A digest of a model's weights that reads little of them: of the names, dtypes and extents of all tensors, and of
    the first SAMPLE bytes of each; in a folder without safetensors files, of the manifest, which has a checksum of
    every tensor. What stands before the colon says which of the two it is.

    Raises:
        ValueError: the folder has no weights, or a file is damaged.
    """
    digest, entries = hashlib.sha256(), {}
    for path in sorted(folder.glob("*.safetensors")):
        header = read_header(path)
        ends = sorted([start for _, _, start in header.values()] + [path.stat().st_size])
        following = dict(zip(ends, ends[1:], strict=False))
        with path.open("rb") as file:
            for name, (dtype, extents, start) in header.items():
                file.seek(start)
                entries[name] = (dtype, extents, file.read(min(SAMPLE, following[start] - start)))
    if entries:
        for name, entry in sorted(entries.items()):
            digest.update(repr((name, *entry)).encode())
        return f"tensors:{digest.hexdigest()[:16]}"
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise ValueError(f"{folder} has neither safetensors files nor a {MANIFEST}")
    digest.update(manifest.read_bytes())
    return f"manifest:{digest.hexdigest()[:16]}"


def require_base(told: str, folder: Path, whose: str) -> None:
    """Check that a model is the base model of adapters, as far as digests of one kind are known.

    Args:
        told: the digest of the base model that the adapters say; empty if they do not.
        whose: what the error calls the adapters.

    Raises:
        ValueError: it is another model.
    """
    found = base_digest(folder)
    if told.partition(":")[0] == found.partition(":")[0] and told != found:
        raise ValueError(
            f"{folder} is not the base model that {whose} were trained on: its weights have the digest {found}, and "
            f"theirs had {told}; give their base model, and not a model that they are already added to"
        )


def metadata_for(shape: ModelShape, base: str) -> dict[str, str]:
    """The metadata of the file of tensors.

    Args:
        base: the digest of the base model.
    """
    assert shape.adapters is not None, "a model without adapters has no such file"
    return {"format": "pt", BASE: base, FORM: shape.adapters.base}


def is_base_in_fp8(folder: Path) -> bool:
    """Whether the adapters in a folder were trained on weights that are rounded to fp8."""
    return metadata_of(folder / TENSORS).get(FORM) == "fp8"


def base_of(folder: Path) -> str:
    """The digest of the base model of the adapters in a folder; empty if another program wrote them."""
    return metadata_of(folder / TENSORS).get(BASE, "")


def require_fitting(folder: Path, shape: ModelShape, model: Path) -> None:
    """Check that a folder has the tensors of a model's adapters, as far as its header tells.

    Args:
        shape: the model's, with the adapters.
        model: what the error calls the model.

    Raises:
        ValueError: a tensor is missing, has other extents, or belongs to no layer with adapters.
    """
    path = folder / TENSORS
    if not path.is_file():
        raise ValueError(f"{folder} has no {TENSORS}; copy the folder again, or let PEFT save it with safetensors")
    held = {name: tuple(extents) for name, (_, extents, _) in read_header(path).items()}
    expected = {PREFIX + name: extents for name, extents in tensors_of(shape).items()}
    wrong = sorted(name for name, _ in held.items() ^ expected.items())
    if not wrong:
        return
    name = wrong[0]
    if name not in held:
        fault = f"it lacks {name}"
    elif name.endswith(".base_layer.weight"):
        fault = (
            f"{name} is PEFT's copy of a weight of the base model; save the adapters again, with "
            "save_pretrained(..., save_embedding_layers=False)"
        )
    elif name not in expected:
        fault = f"{name} belongs to no layer with adapters there"
    else:
        fault = f"{name} has the extents {held[name]}, and should have {expected[name]}"
    others = len(set(wrong)) - 1
    raise ValueError(f"{path} does not fit {model}: {fault}{f', and {others:,} more tensors' if others else ''}")
