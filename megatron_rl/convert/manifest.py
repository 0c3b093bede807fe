"""manifest.json says what a folder holds and has checksums that cover every byte. It is written last, so a folder that
has one is complete.

    {"format": 1, "form": "open", "family": "qwen3", "shape": {..}, "mesh": null, "fused_norms": true,
     "dtypes": ["bfloat16"], "files": {
        "__0_0.distcp": {"bytes": 8192, "crc32": "..", "tensors": {"<name>":
            {"dtype": "bfloat16", "start": 512, "bytes": 4096, "crc32": ".."}}}, ..}}

Each tensor has its own checksum, so that an error can name the damaged tensor. A file's checksum covers the bytes
outside its tensors. In a trainer's checkpoint an entry of a tensor also has `tensor` and `box`, the rectangle of the
open form's tensor that it is, and `kind`; and the manifest has `training`, what a resumed run must know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from dataclasses import fields as dataclass_fields
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, NonNegativeInt, TypeAdapter

from megatron_rl.config.optimizer import ADAM_MOMENTS, MUON_MOMENTS, moments
from megatron_rl.models import FAMILIES, is_matrix, read_shape
from megatron_rl.models.adapters import is_adapter
from megatron_rl.models.hub import MANIFEST
from megatron_rl.models.rule import VALUE_HEAD
from megatron_rl.types import Mesh, ModelShape

FORMAT = 1
NAME = MANIFEST
HUB, OPEN, RANKS = "hub", "open", "ranks"
WEIGHTS = "weights"
"""The kind of a tensor that is a part of the model. The other kinds are the parts of the optimizer's state, by
Megatron-Core's names: `fp32_param` is the fp32 copy of a weight in two bytes, and the names in
`config.optimizer.moments` are Adam's moments and Muon's momentum."""


class _Tensor(BaseModel):
    dtype: str
    start: NonNegativeInt
    bytes: NonNegativeInt
    crc32: str = ""


class _File(BaseModel):
    bytes: NonNegativeInt
    crc32: str = ""
    tensors: dict[str, _Tensor] = {}


class _Training(BaseModel):
    format: int
    dtype: str
    optimizer: str = ""
    mesh: dict[str, Any]
    base: str = ""
    num_updates: NonNegativeInt
    loss_scale: dict[str, float] | None = None


_FILES, _TRAINING = TypeAdapter(dict[str, _File]), TypeAdapter(_Training)


def describe(
    form: str, shape: ModelShape, mesh: Mesh | None, fused_norms: bool, files: dict[str, Any], **more: Any
) -> bytes:
    """The content of manifest.json.

    Args:
        files: each file's entry, by file name.
        more: further fields.
    """
    runs = [[len([*run]), asdict(layer)] for layer, run in groupby(shape.layers)]  # of equal layers
    dtypes = {tensor["dtype"] for entry in files.values() for tensor in entry.get("tensors", {}).values()}
    fields = {
        "format": FORMAT,
        "form": form,
        "family": shape.family,
        "shape": asdict(replace(shape, layers=())) | {"num_layers": shape.num_layers, "layers": runs},
        "mesh": asdict(mesh) if mesh else None,
        "fused_norms": fused_norms,
        "dtypes": sorted(dtypes),
        **more,
        "files": files,
    }
    return json.dumps(fields, indent=1).encode()


def check(fields: Mapping[str, Any], with_training: bool = False) -> None:
    """
    Raises:
        ValueError: the manifest has another form, or names a file outside its folder.
    """
    for name in _FILES.validate_python(fields.get("files"), strict=True):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"it names {name!r}, which is outside the folder")
    if with_training:
        _TRAINING.validate_python(fields.get("training"), strict=True)


def read_json(path: Path) -> Any:
    """
    Raises:
        ValueError: the file is no JSON.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def read(folder: Path) -> dict[str, Any] | None:
    """The folder's manifest, or None if it has none.

    Raises:
        ValueError: the manifest is damaged or has another format.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        form, version = fields["form"], fields["format"]
        check(fields)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); copy or convert the folder again") from error
    if version != FORMAT or form not in (HUB, OPEN, RANKS):
        raise ValueError(f"{path} has format {version!r} and form {form!r}, but this version reads format {FORMAT}")
    return fields


def optimizer_kind(fields: dict[str, Any]) -> str:
    """The kind of the optimizer of a trainer's checkpoint. Older ones do not say it, and are Adam's."""
    kind: str = fields["training"].get("optimizer", "adam")
    return kind


def has_part(fields: dict[str, Any], part: str, hf_name: str, num_dims: int) -> bool:
    """Whether a checkpoint has a part of the state of an HF tensor.

    Args:
        part: WEIGHTS, or the name of a part of the optimizer's state.
        num_dims: of the HF tensor.
    """
    if fields["shape"].get("adapters") and not is_adapter(hf_name) and hf_name != VALUE_HEAD.hf[0].name:
        return False  # it is frozen
    if part == WEIGHTS:
        return True
    family = FAMILIES[fields["shape"]["family"]]
    if family.is_router_bias(hf_name):
        return False  # and so it has no optimizer state
    if part in (*ADAM_MOMENTS, *MUON_MOMENTS):
        return part in moments(optimizer_kind(fields), is_matrix(hf_name, num_dims))
    return not family.is_float32(hf_name)  # the fp32 copy of a parameter in two bytes


def check_shape(folder: Path, fields: dict[str, Any], shape: ModelShape) -> None:
    """Check that the configuration next to the weights is the manifest's.

    Raises:
        ValueError: a field of the model's shape differs; the error names the first one.
    """
    saved = saved_shape(folder, fields)
    for field in dataclass_fields(ModelShape):
        now, then = getattr(shape, field.name), getattr(saved, field.name)
        if now != then:
            raise ValueError(f"{folder}: config.json says {field.name} {now}, but {NAME} says {then}")


def saved_shape(folder: Path, fields: dict[str, Any]) -> ModelShape:
    """The parts of a manifest's model. A field that the manifest lacks has its default. Earlier versions
    had two fields for the output. They wrote no list of layers, which are then the ones of config.json next to the
    manifest."""
    saved = dict(fields["shape"])
    if "output" not in saved:
        told = ("value", saved.get("value_head")), ("embedding", saved.get("tied_embeddings"))
        saved["output"] = next((output for output, is_so in told if is_so), "own")
    runs = saved.get("layers")
    saved["layers"] = () if runs is None else [layer for number, layer in runs for _ in range(number)]
    shape: ModelShape = TypeAdapter(ModelShape).validate_python(saved)
    if runs is None:
        return replace(shape, layers=read_shape(folder if fields["form"] == HUB else folder / "hf").layers)
    if shape.vision and "window" not in saved["vision"]:  # as above
        vision = read_shape(folder if fields["form"] == HUB else folder / "hf").vision
        shape = replace(shape, vision=vision and replace(vision, trained=shape.vision.trained))
    equal = {layer: layer for layer in shape.layers}
    return replace(shape, layers=tuple(equal[layer] for layer in shape.layers))


def read_mesh(fields: dict[str, Any]) -> Mesh:
    mesh = dict(fields["mesh"])
    if mesh["layers"] is not None:
        mesh["layers"] = tuple(mesh["layers"])
    return Mesh(**mesh)
