"""Folders of adapters in PEFT's form: `adapter_config.json`, and `adapter_model.safetensors` with the tensors' names
behind `base_model.model.`. https://huggingface.co/docs/peft/developer_guides/checkpoint describes it; vLLM,
transformers and PEFT read it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from megatron_rl.models import FAMILIES, linear_layers
from megatron_rl.models.adapters import is_adapter
from megatron_rl.models.composite import in_whole
from megatron_rl.models.config_values import flag, number, size
from megatron_rl.models.hub import FLOATS, MANIFEST, metadata_of, read_header
from megatron_rl.types import TOWER, Adapters, ModelShape

T = TypeVar("T")
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
    "task_type": "CAUSAL_LM",
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
"""Keys that change what an adapter computes, with the value that this project has and exports. Absent or null means the
same."""
_FREE = {
    *("r", "lora_alpha", "use_rslora", "target_modules", "init_lora_weights"),  # `read_adapters` reads them
    "exclude_modules",  # the names of the tensors tell
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
    *("lora_dropout", "runtime_config"),  # for training alone
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # init_lora_weights says whether they were used
    *("megatron_config", "megatron_core", "ensure_weight_tying"),  # they change names or number of tensors, if anything
    "qalora_group_size",  # use_qalora says whether it was used
}
"""The keys that may have any value, because a trained adapter computes the same. As of PEFT 0.21.2."""
_INITIAL = {"true", "false", "none", "gaussian", "orthogonal", "eva", "mica"}
"""The values of init_lora_weights that leave the base model as it is. pissa, olora, corda, loftq and lora_ga take
something out of its weights."""


def read_adapters(folder: Path) -> Adapters:
    """What the adapters of a folder are, without their tensors.

    Raises:
        ValueError: the folder has no adapters in PEFT's form, or adapters of another kind; the message has the key.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{folder} has no {CONFIG}; give a folder that PEFT or an export has written") from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no mapping; give a folder that PEFT or an export has written")
    try:
        _check_kind(config)
        rank, alpha, stabilised = size(config, "r"), number(config, "lora_alpha"), flag(config, "use_rslora")
        return Adapters(rank, float(alpha), _targets(config.get("target_modules")), stabilised)
    except KeyError as error:
        raise ValueError(f"{path} lacks the key {error}; give a folder that PEFT or an export has written") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_kind(config: Mapping[str, Any]) -> None:
    """A key that is not known counts as one that changes what the adapter computes, unless it is null, false or empty:
    a newer PEFT writes its new features so if they are not used."""
    for key, value in _ONLY.items():
        found = value if config.get(key) is None else config[key]
        if found != value and (found or value):
            raise ValueError(f"{key} is {found!r}, and only {value!r} is supported")
    initial = config.get("init_lora_weights")
    if str(initial).lower() not in _INITIAL:
        raise ValueError(
            f"init_lora_weights is {initial!r}, which changes the base model; save the adapters with PEFT's "
            "path_initial_model_for_weight_conversion, or save the changed base model, give that one, and set the key "
            "to true"
        )
    for key in sorted(config.keys() - _ONLY.keys() - _FREE):
        if config[key]:
            raise ValueError(
                f"{key} is {config[key]!r}, which is not supported, because it may change what the adapters compute; "
                "if it does not, remove the key"
            )


def _targets(given: Any) -> tuple[str, ...]:
    """The last parts of the names; empty for all linear layers."""
    if given == "all-linear":
        return ()
    if not isinstance(given, list) or not given or not all(isinstance(name, str) and name for name in given):
        raise ValueError(f"target_modules is {given!r}, and only a list of names, or all-linear, is supported")
    return tuple(sorted({name.rpartition(".")[2] for name in given}))


def config_of(shape: ModelShape, base: str) -> str:
    """The text of adapter_config.json.

    Args:
        base: what `base_model_name_or_path` says.
    """
    adapters = shape.adapters
    assert adapters is not None, "a model without adapters has no such file"
    config = dict(_ONLY) | {
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "use_rslora": adapters.rank_stabilised,
        "target_modules": sorted(adapters.targets or linear_layers(shape)),
    }
    if shape.vision is not None:  # some layers of towers have the same names
        config["exclude_modules"] = f".*{re.escape(TOWER)}.*"
    return json.dumps(config, indent=2) + "\n"


def tensors_of(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The extents of all tensors of a model's adapters, by their HF names, without PEFT's prefix."""
    tensors = FAMILIES[shape.family].hf_tensors(shape)
    return {name: extents for name, extents in tensors.items() if is_adapter(name)}


def in_file(shape: ModelShape, tensors: Mapping[str, T]) -> dict[str, T]:
    """What belongs to tensors of a model's adapters, by their names in the file: of a model that sees images the names
    that the whole model gives its text model's layers."""
    return {PREFIX + name: value for name, value in in_whole(shape, tensors).items()}


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


def require_base(told: str, folder: Path, whose: str) -> bool:
    """Check that a model is the base model of adapters, as far as digests of one kind are known. Returns whether they
    are.

    Args:
        told: the digest of the base model that the adapters say; empty if they do not.
        whose: what the error calls the adapters.

    Raises:
        ValueError: it is another model.
    """
    found = base_digest(folder)
    is_known = told.partition(":")[0] == found.partition(":")[0]
    if is_known and told != found:
        raise ValueError(
            f"{folder} is not the base model that {whose} were trained on: its weights have the digest {found}, and "
            f"theirs had {told}; give their base model, and not a model that they are already added to"
        )
    return is_known


def metadata_for(shape: ModelShape, base: str) -> dict[str, str]:
    """The metadata of the file of tensors.

    Args:
        base: the digest of the base model.
    """
    assert shape.adapters is not None, "a model without adapters has no such file"
    return {"format": "pt", BASE: base, FORM: shape.adapters.base}


def base_form(folder: Path) -> str:
    """How the trainer of the adapters in a folder held the base model (`Adapters.base`); empty if another program wrote
    them."""
    return metadata_of(folder / TENSORS).get(FORM, "")


def base_of(folder: Path) -> str:
    """The digest of the base model of the adapters in a folder; empty if another program wrote them."""
    return metadata_of(folder / TENSORS).get(BASE, "")


def require_fitting(folder: Path, shape: ModelShape, model: Path) -> None:
    """Check that a folder has a model's adapters, as far as its configuration and its header tell.

    Args:
        shape: the model's, with the adapters.
        model: what the error calls the model.

    Raises:
        ValueError: they have another rank or scale, a tensor is missing, has other extents or no floating-point
            numbers, or belongs to no layer with adapters.
    """
    found, mine, path = read_adapters(folder), shape.adapters, folder / TENSORS
    assert mine is not None, "a model without adapters has no such file"
    if (found.rank, found.scale) != (mine.rank, mine.scale):
        raise ValueError(
            f"the adapters in {folder} have the rank {found.rank} and the scale {found.scale}, and policy.lora has "
            f"{mine.rank} and {mine.scale}"
        )
    if not path.is_file():
        raise ValueError(f"{folder} has no {TENSORS}; copy the folder again, or let PEFT save it with safetensors")
    header = read_header(path)
    held = {name: tuple(extents) for name, (_, extents, _) in header.items()}
    expected = in_file(shape, tensors_of(shape))
    wrong = sorted(name for name, _ in held.items() ^ expected.items())
    if not wrong:
        for name, (dtype, _, _) in header.items():
            if dtype not in FLOATS:
                raise ValueError(
                    f"{path}: tensor {name} is {dtype}, and only {', '.join(sorted(FLOATS))} are supported; save the "
                    "adapters again, unquantised"
                )
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
