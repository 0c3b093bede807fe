"""Finds the file of each tensor in a Hugging Face folder. Only the files' headers are read.

A damaged or unsuitable folder fails here, before anything starts, with an error that names the file and the reason.
Invariant (tests/unit/models): every tensor belongs to one row of the family's table or is declared there as ignored.
"""

from __future__ import annotations

import json
import logging
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megatron_rl.models.composite import Composite, as_in_files, composite_of
from megatron_rl.models.families import FAMILIES
from megatron_rl.models.family import Family
from megatron_rl.models.quantisation import FP8, Blocks, Form, Int4, Packed, check_unquantised, read_blocks
from megatron_rl.types import Mesh, ModelShape

T = TypeVar("T")
log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
HEAD = "multi_token.safetensors"
"""The file of a multi-token head that is kept, in the folder `hf` of a checkpoint."""
MANIFEST = "manifest.json"
"""The file that says what a converted folder holds; `convert/manifest.py` describes it."""


@dataclass(frozen=True, slots=True)
class HubIndex:
    family: Family
    """The table of these files: the family's, or the same with stacked experts."""
    files: dict[str, Path]
    """The safetensors file of each tensor, by its name in the files (`Family.file_tensors`)."""
    ignored: dict[str, str]
    """The reason why the model does not need a tensor, by the tensor's name."""
    blocks: Form | None = None
    """How the weights are quantised; None if they are not."""
    scales: dict[str, Path] = field(default_factory=dict)
    """The safetensors file of the scales of each quantised tensor, by the tensor's name without the end that quantised
    values have."""
    head: dict[str, Path] = field(default_factory=dict)
    """The safetensors file of each tensor of a multi-token head. They are in `ignored`, too."""
    composite: Composite | None = None
    """How the files name the tensors of the text model, if they hold other parts, too. The names above are the names in
    a folder of the text model alone; in `ignored` tensors of other parts have the files' names."""
    whole_names: dict[str, str] = field(default_factory=dict)
    """The names in the files, by the names that stand here."""

    def own_name(self, name: str) -> str | None:
        """The name that stands here for a tensor of the files; None if it belongs to another part than the text
        model."""
        return self.composite.own_name(name) if self.composite else name

    def of_text(self, tensors: Mapping[str, T]) -> dict[str, T]:
        """What belongs to the tensors of the text model, by the names that stand here, which are noted in
        `whole_names`. What is left out is noted in `ignored`.

        Args:
            tensors: anything, by the names in the files.
        """
        found = {}
        for name, tensor in tensors.items():
            own = self.own_name(name)
            if own is not None:
                found[own], self.whole_names[own] = tensor, name
            elif self.composite:
                self.ignored[name] = f"{self.composite.part(name)}* is another part of the model than its text"
        return found


def check_model(folder: Path, shape: ModelShape, mesh: Mesh) -> None:
    """Check everything about a checkpoint that can be checked before a process starts.

    Raises:
        ValueError: the mesh does not divide the model, or the weights are damaged, incomplete or quantised.
    """
    check_unquantised(folder)
    FAMILIES[shape.family].check_mesh(shape, mesh)
    ignored, needed = scan(folder, shape.served).ignored, FAMILIES[shape.family].file_tensors(shape)
    for reason, count in Counter(reason for name, reason in ignored.items() if name not in needed).items():
        log.warning("%s: %d tensors are ignored: %s", folder, count, reason)


def find_head(folder: Path, shape: ModelShape) -> dict[str, Path]:
    """The safetensors file of each tensor of the multi-token head: of an unquantised folder of a text model, or of the
    folder `hf` of a checkpoint. Empty if there is none.

    Raises:
        ValueError: a file is damaged.
    """
    head = FAMILIES[shape.family].multi_token
    if head is None:
        return {}
    paths = [folder / HEAD] if (folder / HEAD).is_file() else weight_files(folder)
    return {name: path for path in paths for name in read_header(path) if head.matches(name, shape)}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the files that its index names, or all files if it has no index.

    Raises:
        ValueError: the index is damaged, or names a file that is not there.
    """
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} cannot be read ({error!r}); copy it again") from error
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ValueError(
            f"{index} names {absent[0]}, which is not there ({len(absent)} of {len(names)} files are missing); copy "
            f"the checkpoint again"
        )
    return [folder / name for name in names]


def scan(folder: Path, shape: ModelShape) -> HubIndex:
    """Account for every tensor of a folder. Only the files' headers are read.

    Raises:
        ValueError: there is no safetensors file, a file is damaged or truncated, weights are quantised in a way that is
            not supported, or a tensor is missing, unknown, present twice or has other extents than the family's table
            says. The error names it.
    """
    folder = Path(folder)
    files = weight_files(folder)
    if not files:
        raise ValueError(f"model.path: {folder} has no *.safetensors; convert or download the weights")
    composite = composite_of(folder, bool(shape.tower))
    index = HubIndex(FAMILIES[shape.family], {}, {}, read_blocks(folder), composite=composite)
    headers = {path: index.of_text(read_header(path)) for path in files}
    if index.composite:
        found = {name: extents for header in headers.values() for name, (_, extents, _) in header.items()}
        index = replace(index, family=as_in_files(index.family, shape, found))
    family = index.family
    expected = family.file_tensors(shape)
    quantised: dict[str, tuple[int, ...]] = {}
    scales: dict[str, _Scales] = {}
    for path, header in headers.items():
        for name, (dtype, extents, _) in header.items():
            where = f"{path}: tensor {name} {list(extents)}"
            scaled = name.removesuffix((index.blocks or Blocks).scales)
            form = index.blocks
            packed = form if isinstance(form, Packed) and name.endswith(form.values) else None
            if packed:
                name = scaled = name.removesuffix(packed.values)
            elif isinstance(form, Int4) and name.endswith(form.shapes) and name.removesuffix(form.shapes) in expected:
                index.ignored[name] = "the extents of a packed matrix follow from config.json"
                continue
            if name in index.files or name in index.ignored or (name != scaled and scaled in scales):
                raise ValueError(f"{where} is in another file too; remove one of the two")
            if name != scaled:
                scales[scaled] = _Scales(path, dtype, extents)
                continue
            if packed:
                wanted = packed.stored(expected[name].extents) if name in expected else None
                if (dtype, extents) != (packed.value_dtype, wanted):
                    raise ValueError(
                        f"{where} is {dtype}, but as {packed.kind} {name} {_list(wanted)} of {packed.value_dtype} is "
                        f"needed: {family.describe(name)}; copy the checkpoint again"
                    )
                quantised[name], extents = extents, expected[name].extents
            elif dtype == FP8:
                if not isinstance(index.blocks, Blocks) or len(extents) != 2:
                    raise ValueError(
                        f"{where} is {dtype}, but only a matrix can be, and only if config.json has a "
                        f"quantization_config with a weight_block_size; copy the checkpoint again"
                    )
                if name in expected and expected[name].views:
                    raise ValueError(
                        f"{where} is {dtype}, but {family.describe(name)}, of which fp8 cannot be read; take the "
                        f"release of the model in bf16"
                    )
                quantised[name] = extents
            elif dtype not in FLOATS:
                raise ValueError(
                    f"{where} is {dtype}, which is no dtype of weights that can be read; copy the file again, or take "
                    f"the release of the model in bf16"
                )
            if name not in expected:
                index.ignored[name] = _reason(name, where, shape, family)
                if family.multi_token and family.multi_token.matches(name, shape):
                    index.head[name] = path
                continue
            if extents != expected[name].extents:
                rule = family.describe(name)
                raise ValueError(f"{where}, but config.json asks for {list(expected[name].extents)}: {rule}")
            index.files[name] = path
    missing = [name for name in expected if name not in index.files]
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]} "
            f"({family.describe(missing[0])}); is a shard file absent?"
        )
    _match_scales(folder, index, quantised, scales)
    return index


Header = dict[str, tuple[str, tuple[int, ...], int]]
"""See `read_header`."""


FLOATS = {"F64", "F32", "F16", "BF16"}
"""The dtypes of weights that are not quantised, by their names in a safetensors header."""


class _Scales(NamedTuple):
    path: Path
    dtype: str
    extents: tuple[int, ...]


def _match_scales(
    folder: Path, index: HubIndex, quantised: dict[str, tuple[int, ...]], scales: dict[str, _Scales]
) -> None:
    """Check that every quantised tensor has its scales and that there are no others, and complete the index.

    Args:
        quantised: the extents of the quantised tensors, by name.
        scales: the scales, by the name of the tensor that they belong to.
    """
    blocks = index.blocks
    for name, extents in quantised.items():
        assert blocks, "`scan` refuses fp8 without blocks"
        if name not in scales:
            raise ValueError(
                f"{folder}: tensor {name} is {blocks.kind}, but its scales {name}{blocks.scales} are missing; is a "
                f"shard file absent?"
            )
        path, dtype, found = scales[name]
        where, wanted = f"{path}: tensor {name}{blocks.scales} {list(found)}", blocks.scales_of(extents)
        if found != wanted:
            raise ValueError(
                f"{where} must be {list(wanted)}, because {name} is stored as {list(extents)} and config.json says "
                f"that the folder has {blocks}; copy the checkpoint again"
            )
        if dtype not in blocks.scale_dtypes:
            raise ValueError(f"{where} is {dtype}, but scales that can be read are {', '.join(blocks.scale_dtypes)}")
        index.scales[name] = path
    for name, (path, _, found) in scales.items():
        kind, end = (blocks or Blocks).kind, (blocks or Blocks).scales
        if name in index.ignored:
            index.ignored[name + end] = index.ignored[name]
        elif name not in quantised:
            raise ValueError(
                f"{path}: tensor {name}{end} {list(found)} scales the {kind} tensor {name}, but this one is not {kind} "
                f"or not there; copy the checkpoint again"
            )


def _list(extents: tuple[int, ...] | None) -> str:
    return "of no extents" if extents is None else str(list(extents))


def _reason(name: str, where: str, shape: ModelShape, family: Family) -> str:
    """The reason why the model does not need this tensor.

    Raises:
        ValueError: the tensor is not one that may be ignored.
    """
    if shape.tied_embeddings and name == family.output.hf[0].name:
        return "the output layer is tied to the embedding and stored a second time"
    for ignored in family.ignored:
        if ignored.matches(name, shape):
            return ignored.reason
    if row := family.describe(name):
        raise ValueError(f"{where} belongs to {row}, but config.json describes a model without it")
    raise ValueError(f"{where} is unknown to the family {family.name}: no row of its table has this name")


def read_header(path: Path) -> Header:
    """The header of a safetensors file (the length in 8 bytes, then JSON): (dtype, extents, offset of the first byte in
    the file) of each tensor, by name.

    Raises:
        ValueError: the file is truncated, or its header is damaged or does not fit the file's size.
    """
    header, start = _read_json(path)
    header.pop("__metadata__", None)
    try:
        read = {name: _entry(values) for name, values in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # a flipped bit may spoil a key or a value
        raise ValueError(f"{path}: the safetensors header is damaged ({error!r}); copy the file again") from error
    end, size = max((end for _, _, _, end in read.values()), default=0), path.stat().st_size
    if start + end != size:
        raise ValueError(f"{path} has {size} bytes, but its header promises {start + end}; copy it again")
    return {name: (dtype, extents, start + begin) for name, (dtype, extents, begin, _) in read.items()}


def metadata_of(path: Path) -> dict[str, str]:
    """The metadata in the header of a safetensors file.

    Raises:
        ValueError: the file is truncated, or its header is damaged.
    """
    metadata = _read_json(path)[0].get("__metadata__") or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"{path}: the safetensors header is damaged (__metadata__ is no object); copy the file again")
    return metadata


def _read_json(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and the offset of what follows it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if 8 + length > size:
            raise ValueError(f"{path} is truncated or not a safetensors file ({size} bytes); copy it again")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
        except ValueError as error:
            raise ValueError(f"{path}: the safetensors header is damaged ({error!r}); copy the file again") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the safetensors header is no JSON object; copy the file again")
    return header, 8 + length


def _entry(values: dict[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    """The dtype and the extents of a tensor, and where it begins and ends after the header."""
    begin, end = values["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*values["shape"], begin, end)):
        raise ValueError(f"shape or data_offsets of {values} are no whole numbers")
    return values["dtype"], tuple(values["shape"]), begin, end


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse two equal names; the JSON reader would silently keep the last one."""
    result = dict(pairs)
    if len(result) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it contains {name} twice")
    return result
