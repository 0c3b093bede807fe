"""A Hugging Face folder's weights as numbers: which file holds which tensor, from the files' headers alone.

Damaged or foreign folders fail here, with the file and the reason, before anything starts. Invariant
(tests/unit/layout): every tensor is accounted for by one row of the family's table, or declared there as ignored.
"""

from __future__ import annotations

import json
import logging
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.layout.families import FAMILIES
from megatron_rl.types import Mesh, ModelShape

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubIndex:
    files: dict[str, Path]
    """The safetensors file that holds each HF tensor, by name."""
    ignored: dict[str, str]
    """Tensors that are not read, by name, with the reason why the model does without each."""


def check_model(folder: Path, shape: ModelShape, mesh: Mesh) -> None:
    """Everything that can be known of a checkpoint before a process starts.

    Raises:
        ValueError: heads or layers do not divide, or the weights are damaged or incomplete.
    """
    FAMILIES[shape.family].check_mesh(shape, mesh)
    index = scan(folder, shape)
    for reason, count in Counter(index.ignored.values()).items():
        log.warning("%s: %d tensors are not read: %s", folder, count, reason)


def read_index(folder: Path, shape: ModelShape) -> dict[str, Path]:
    """The safetensors file that holds each HF tensor, by name. Raises the errors of `scan`."""
    return scan(folder, shape).files


def scan(folder: Path, shape: ModelShape) -> HubIndex:
    """Account for every tensor of a folder; only the files' headers are read.

    Raises:
        ValueError: no safetensors, a damaged or truncated file, quantised weights, or a tensor that is missing,
            unknown, there twice or of other extents than the family's table says; each by name.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"model.path: {folder} has no *.safetensors; convert or download the weights")
    family = FAMILIES[shape.family]
    expected = family.hf_tensors(shape)
    index = HubIndex({}, {})
    for path in files:
        for name, (dtype, extents, _) in read_header(path).items():
            where = f"{path}: tensor {name} {list(extents)}"
            if dtype not in _DTYPES:
                raise ValueError(
                    f"{where} is {dtype}: quantised checkpoints cannot be trained; dequantise it to BF16 first"
                )
            if name in index.files or name in index.ignored:
                raise ValueError(f"{where} stands in another file too; remove one of them")
            if name not in expected:
                index.ignored[name] = _reason(name, where, shape)
                continue
            if extents != expected[name]:
                rule = family.describe(name)
                raise ValueError(f"{where}, but config.json asks for {list(expected[name])}: {rule}")
            index.files[name] = path
    missing = [name for name in expected if name not in index.files]
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]} "
            f"({family.describe(missing[0])}); is a shard file absent?"
        )
    return index


_DTYPES = {"F64", "F32", "F16", "BF16"}


def _reason(name: str, where: str, shape: ModelShape) -> str:
    family = FAMILIES[shape.family]
    if name.endswith("weight_scale_inv"):
        raise ValueError(
            f"{where} scales an fp8 weight: such checkpoints cannot be trained; dequantise it to BF16 first"
        )
    if shape.tied_embeddings and name == family.output.hf[0].name:
        return "the tied output layer, stored a second time"
    for ignored in family.ignored:
        if ignored.matches(name, shape):
            return ignored.reason
    if row := family.describe(name):
        raise ValueError(f"{where} is of {row}, but config.json describes a model without it")
    raise ValueError(f"{where} is unknown to the family {family.name}: no row of its table has this name")


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Name -> (dtype, extents, first byte in the file) from a safetensors header (8 bytes length, JSON).

    Raises:
        ValueError: the file is truncated, or its header is damaged or does not fit the file's size.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ValueError(f"{path} is truncated or no safetensors file ({size} bytes); copy it again")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_without_twins)
            header.pop("__metadata__", None)
            entries = {
                name: (entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
                for name, entry in header.items()
            }
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # a flipped bit spoils a key or a value
            raise ValueError(f"{path}: the safetensors header is damaged ({error!r}); copy the file again") from error
    if 8 + length + end != size:
        raise ValueError(f"{path} has {size} bytes, its header promises {8 + length + end}; copy it again")
    return entries


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse two equal names; the JSON reader would keep the last one without a word."""
    result = dict(pairs)
    if len(result) < len(pairs):
        twin = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twin} stands there twice")
    return result
