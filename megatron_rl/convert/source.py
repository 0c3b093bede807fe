"""An open checkpoint of any of the three forms: it knows where each rectangle of each Hugging Face (HF) tensor is
stored.

Opening reads only headers and the manifest. Invariant (tests/unit/convert): every tensor of the folder belongs to one
row of the family's table; a tensor that is missing, unknown, truncated or of a wrong shape is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.convert import forms, manifest
from megatron_rl.convert.forms import Described
from megatron_rl.convert.target import StoredPart, TargetTensor, Tick, check_file
from megatron_rl.convert.tensor_files import Maps, Quantised, Stored, read_safetensors
from megatron_rl.models import FAMILIES, Box, Shard, read_shape, scan, volume
from megatron_rl.models.composite import read_config
from megatron_rl.models.hub import HEAD, weight_files
from megatron_rl.models.peft import CONFIG
from megatron_rl.models.quantisation import Form, Mxfp4, Packed
from megatron_rl.models.shards import extents, intersect, translate
from megatron_rl.types import Mesh, ModelShape


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of an HF tensor, and where it is stored."""

    hf_box: Box
    stored: Stored
    box: Box
    """The rectangle of the stored tensor, or of its view."""


@dataclass(slots=True)
class Source:
    folder: Path
    form: str
    shape: ModelShape
    mesh: Mesh | None
    fused_norms: bool
    manifest: dict[str, Any] | None
    regions: dict[str, list[Region]] = field(default_factory=dict)
    """The regions of each HF tensor, by its name. They cover each element once."""
    copies: list[tuple[Region, Region]] = field(default_factory=list)
    """Regions that are stored more than once: the one that is read, and another that must equal it."""
    ignored: dict[str, str] = field(default_factory=dict)
    """The tensors of an HF folder that the model does not need, with the reason."""
    head: dict[str, Stored] = field(default_factory=dict)
    """The tensors of the multi-token head, by name; empty if there is none."""
    checksums: dict[tuple[Path, str], int] = field(default_factory=dict)
    """The manifest's crc32 of each tensor, by (file, tensor)."""

    @property
    def hub_folder(self) -> Path:
        """The folder of config.json and the tokenizer."""
        return self.folder if self.form == manifest.HUB else self.folder / "hf"

    def tensor(self, described: Described, dtype: torch.dtype | None) -> TargetTensor:
        """A tensor of any form, made of parts of this source's tensors.

        Args:
            dtype: the dtype of the result; None keeps the source's, and for quantised tensors config.json's.

        Raises:
            ValueError: `dtype` is None and the parts have different dtypes.
        """
        parts = []
        for shard in described.shards:
            for region in self.regions[shard.hf_name]:
                if hf_box := intersect(shard.hf_box, region.hf_box):
                    box = translate(hf_box, shard.hf_box, shard.local_box[-len(hf_box) :])
                    view = described.views.get(shard.hf_name)
                    parts.append(StoredPart(region.stored, translate(hf_box, region.hf_box, region.box), box, view))
        if dtype is None and len({part.source.value_dtype for part in parts}) > 1:
            named = ", ".join(f"{part.source.name} ({part.source.value_dtype})" for part in parts[:3])
            raise ValueError(
                f"{self.folder}: {described.name} is made of several dtypes, {named}; choose one with --dtype"
            )
        family = FAMILIES[self.shape.family]
        if dtype is None or any(family.is_router_bias(shard.hf_name) for shard in described.shards):
            dtype = (parts[0].source if parts else next(iter(self.regions.values()))[0].stored).value_dtype
        return TargetTensor(described.name, dtype, described.extents, tuple(parts))

    def take_head(self) -> None:
        """Make the multi-token head a part of the model, as it is in a checkpoint of a run that trains it.

        Raises:
            ValueError: there is no head, or it is not the one that the family's table describes.
        """
        if self.shape.multi_token:
            return
        shape = replace(self.shape, multi_token=True)
        if not self.head:
            raise ValueError(
                f"{self.folder} has no multi-token head, which policy.multi_token is to train; take a folder that has "
                f"one, or convert with --multi-token keep"
            )
        wanted = FAMILIES[shape.family].head_tensors(shape)
        if unknown := self.head.keys() - wanted.keys() - FAMILIES[shape.family].file_tensors(shape).keys():
            raise ValueError(
                f"{self.folder}: tensor {min(unknown)} is no tensor of a multi-token head of one layer with single "
                f"experts, which is what can be trained; use policy.multi_token: keep"
            )
        for name, sizes in wanted.items():
            row = FAMILIES[shape.family].describe(name)
            if (stored := self.head.get(name)) is None:
                raise ValueError(f"{self.folder}: tensor {name} of the multi-token head is missing: {row}")
            if stored.extents != sizes:
                raise ValueError(
                    f"{stored.path}: tensor {name} is {list(stored.extents)}, but config.json asks for {list(sizes)}: "
                    f"{row}"
                )
            box = tuple((0, length) for length in sizes)
            self._add(Described(name, sizes, (Shard(name, box, name, box),)), stored)
        self.shape = shape

    def _add(self, described: Described, stored: Stored) -> None:
        for shard in described.shards:
            if view := described.views.get(shard.hf_name):
                is_packed = stored.quantised is not None and isinstance(stored.quantised.blocks, Mxfp4)
                stored = replace(stored, view=view.swapped() if is_packed else view)
            region = Region(shard.hf_box, stored, shard.local_box[-len(shard.hf_box) :])
            known = self.regions.setdefault(shard.hf_name, [])
            first = next((other for other in known if other.hf_box == region.hf_box), None)
            if first:
                self.copies.append((first, region))
            else:
                known.append(region)


def open_checkpoint(
    folder: Path,
    kind: str = manifest.WEIGHTS,
    fields: dict[str, Any] | None = None,
    adapters: bool = False,
    tower: bool = False,
) -> Source:
    """Open a checkpoint of any form.

    Args:
        kind: what to open of a trainer's checkpoint: the weights, or a part of the optimizer's state
            (`manifest.WEIGHTS` names the kinds). Only regions of this kind are opened.
        fields: the folder's manifest, if it has been read already.
        adapters: whether a checkpoint of adapters, without their base model, may be opened.
        tower: whether the vision tower of a Hugging Face folder is opened, too.

    Raises:
        ValueError: the folder has none of the three forms, or it is damaged or incomplete.
    """
    if folder.suffix == ".gguf":
        raise ValueError(
            f"{folder} is a GGUF file; make a Hugging Face folder of it first, with `megatron-rl convert from-gguf "
            f"{folder} TARGET`"
        )
    fields = fields or manifest.read(folder)
    form = fields["form"] if fields else manifest.HUB
    if (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} holds adapters, and no base model; `megatron-rl merge BASE {folder} TARGET` makes a model of "
            "them"
        )
    if fields is None and not (folder / "config.json").is_file():
        found = f"has neither config.json nor {manifest.NAME}" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {found}; give the folder of a model, or of a checkpoint of a known form")
    if fields:
        _check_files(folder, fields)
    shape = read_shape(folder if form == manifest.HUB else folder / "hf")
    if fields and (held := manifest.saved_shape(folder, fields).adapters):
        if not adapters:
            raise ValueError(
                f"{folder} holds the adapters of a run, and no base model; take the folder hf of the run's end, or "
                f"`megatron-rl merge`"
            )
        shape = replace(shape, adapters=held)
    if fields:
        saved = manifest.saved_shape(folder, fields)
        shape, tower = (
            replace(shape, multi_token=saved.multi_token),
            tower if form == manifest.HUB else bool(saved.tower),
        )
    if tower and shape.vision:
        shape = replace(shape, vision=replace(shape.vision, trained=True))
    source = Source(folder, form, shape, None, True, fields)
    if fields:
        manifest.check_shape(folder, fields, shape)
        source.fused_norms = fields["fused_norms"]
        source.checksums = {
            (folder / name, tensor): int(values["crc32"], 16)
            for name, entry in fields["files"].items()
            for tensor, values in entry.get("tensors", {}).items()
        }
    if form != manifest.HUB and (source.hub_folder / HEAD).is_file():
        source.head = read_safetensors(source.hub_folder / HEAD)
    if fields is None or form == manifest.HUB:
        _open_hub(source)
    elif form == manifest.OPEN:
        _open_chunks(source, fields, kind)
    else:
        source.mesh = manifest.read_mesh(fields)
        _open_ranks(source, source.mesh, fields)
    for name, sizes in FAMILIES[shape.family].hf_tensors(shape).items():
        if fields and not manifest.has_part(fields, kind, name, len(sizes)):
            continue
        covered = sum(volume(region.hf_box) for region in source.regions.get(name, ()))
        if covered != prod(sizes):
            raise ValueError(f"{folder}: only {covered} elements of {name} {list(sizes)} are there ({kind})")
    return source


def _check_files(folder: Path, fields: dict[str, Any]) -> None:
    """Check the sizes of all files, and the bytes of the files without tensors."""
    for name, entry in fields["files"].items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing, but {manifest.NAME} names it; copy it again")
        if (size := path.stat().st_size) != entry["bytes"]:
            raise ValueError(f"{path} has {size} bytes, but {manifest.NAME} says {entry['bytes']}; copy it again")
        if "tensors" not in entry and fields["form"] != manifest.HUB:
            check_file(path, entry, lambda num_bytes: None)
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.distcp")):
        if path.name not in fields["files"]:
            raise ValueError(f"{path} is not named by {manifest.NAME}; remove it or convert again")


def _open_hub(source: Source) -> None:
    index = scan(source.folder, source.shape)
    headers = {path: index.of_text(read_safetensors(path)) for path in weight_files(source.folder)}
    if index.scales:
        assert index.blocks is not None, "`scan` refuses scales without blocks"
        dtype = _config_dtype(source.folder, index.blocks)
        end = index.blocks.values if isinstance(index.blocks, Packed) else ""
        for header in headers.values():
            for name in [name for name in index.scales if name + end in header]:
                scales = headers[index.scales[name]][name + index.blocks.scales]
                header[name] = replace(header[name + end], quantised=Quantised(index.blocks, scales, dtype))
    source.head = {name: headers[path][name] for name, path in index.head.items()}
    source.ignored = index.ignored
    for described in forms.hub_tensors(source.shape, index.family):
        source._add(described, headers[index.files[described.name]][described.name])
    output = FAMILIES[source.shape.family].output.hf[0].name
    if output in index.ignored:  # the output layer is tied and stored a second time; both must be equal
        embedding = FAMILIES[source.shape.family].embedding.hf[0].name
        box = source.regions[embedding][0].hf_box
        for header in headers.values():
            if stored := header.get(output):
                source._add(Described(output, stored.extents, (Shard(embedding, box, output, box),)), stored)


def _config_dtype(folder: Path, blocks: Form) -> torch.dtype:
    """The dtype that config.json gives to the model's values. For mxfp4 it is bfloat16 if there is none, as in
    transformers."""
    fields = read_config(folder)
    name = fields.get("dtype", fields.get("torch_dtype"))
    if name is None and isinstance(blocks, Mxfp4):
        name = "bfloat16"
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f'{folder / "config.json"} gives no dtype to quantised weights; add "dtype": "bfloat16"')
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _open_chunks(source: Source, fields: dict[str, Any], kind: str) -> None:
    """The manifest says where each chunk begins. The converter writes a chunk whole, the ranks of a trainer in
    pieces."""
    stored: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for file, entry in fields["files"].items():
        for name, values in entry.get("tensors", {}).items() if file != f"hf/{HEAD}" else ():
            if values.get("kind", manifest.WEIGHTS) == kind:
                stored.setdefault(values.get("tensor", name), []).append((file, name, values))
    for chunk in forms.open_chunks(source.shape):
        described = chunk.tensor
        first = described.shards[0]  # all are of one row of the table
        if not manifest.has_part(fields, kind, first.hf_name, len(first.hf_box)):
            continue
        if described.name not in stored:
            raise ValueError(f"{source.folder}: tensor {described.name} is missing: {_rule(source.shape, described)}")
        for file, name, values in stored.pop(described.name):
            whole = [(0, length) for length in described.extents]
            box = tuple((start, stop) for start, stop in values.get("box", whole))
            dtype, path = getattr(torch, values["dtype"]), source.folder / file
            tensor = Stored(path, name, dtype, extents(box), values["start"])
            if tensor.num_bytes != values["bytes"]:
                raise ValueError(
                    f"{path}: tensor {name} has {values['bytes']} bytes, but config.json asks for "
                    f"{list(tensor.extents)}: {_rule(source.shape, described)}"
                )
            source._add(_piece(described, name, box), tensor)
    if stored:
        name, ((file, *_), *_) = next(iter(stored.items()))
        raise ValueError(f"{source.folder / file}: tensor {name} is unknown to the family {source.shape.family}")


def _piece(described: Described, name: str, box: Box) -> Described:
    """A rectangle of a tensor, as a tensor of its own."""
    at_zero = tuple((0, length) for length in extents(box))
    shards = []
    for shard in described.shards:
        if common := intersect(shard.local_box, box):
            hf_box = translate(common, shard.local_box, shard.hf_box)
            shards.append(Shard(shard.hf_name, hf_box, name, translate(common, box, at_zero)))
    return Described(name, extents(box), tuple(shards))


def _open_ranks(source: Source, mesh: Mesh, fields: dict[str, Any]) -> None:
    for stem, tensors in forms.rank_tensors(source.shape, mesh, source.fused_norms).items():
        found = dict(_stem_tensors(source.folder, fields, stem))
        for described in tensors:
            stored = found.pop(described.name, None)
            if stored is None:
                raise ValueError(
                    f"{source.folder}: tensor {described.name} of {stem} is missing: {_rule(source.shape, described)}; "
                    f"is a file absent?"
                )
            if stored.extents != described.extents:
                raise ValueError(
                    f"{stored.path}: tensor {described.name} is {list(stored.extents)}, but config.json and the mesh "
                    f"ask for {list(described.extents)}: {_rule(source.shape, described)}"
                )
            source._add(described, stored)
        for name, stored in found.items():
            raise ValueError(f"{stored.path}: tensor {name} is unknown to the family {source.shape.family}")


def _stem_tensors(folder: Path, fields: dict[str, Any], stem: str) -> Iterator[tuple[str, Stored]]:
    pattern = re.compile(rf"{stem}(-\d+-of-\d+)?\.safetensors")
    seen = set()
    for name in fields["files"]:
        if pattern.fullmatch(name):
            for tensor, stored in read_safetensors(folder / name).items():
                if tensor in seen:
                    raise ValueError(f"{stored.path}: tensor {tensor} is in another file too; remove one of the two")
                seen.add(tensor)
                yield tensor, stored


def check_copies(source: Source, maps: Maps, tick: Tick) -> None:
    """Check that what is stored more than once (norms over tensor parallelism, tied embeddings) has the same bits
    everywhere.

    Raises:
        ValueError: two copies differ; the error names both files.
    """
    for first, other in source.copies:
        a, b = (maps.values(region.stored)(region.box) for region in (first, other))
        if a.dtype != b.dtype or not same_bits(a, b):
            raise ValueError(
                f"{other.stored.path}: tensor {other.stored.name} differs from {first.stored.name} in "
                f"{first.stored.path}; the two should be the same"
            )
        tick(b.nbytes)


def bits(x: Tensor) -> Tensor:
    """The tensor's bits as integers, so that NaNs compare equal to themselves."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def _rule(shape: ModelShape, described: Described) -> str:
    return FAMILIES[shape.family].describe(described.shards[0].hf_name) or "" if described.shards else "padding rows"
