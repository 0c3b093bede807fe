"""A conversion as a value: it lists every file with its exact size before anything is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from megatron_rl.convert import forms, hub, manifest, torch_dist
from megatron_rl.convert.head import head_tensors
from megatron_rl.convert.source import Source
from megatron_rl.convert.target import TargetFile, TargetTensor, safetensors_file
from megatron_rl.convert.tensor_files import read_safetensors
from megatron_rl.models import FAMILIES
from megatron_rl.models.hub import HEAD, INDEX, scan, weight_files
from megatron_rl.models.shards import extents
from megatron_rl.models.vision import PREFIXES
from megatron_rl.types import Mesh, ModelShape


@dataclass(frozen=True, slots=True)
class Options:
    dtype: str | None = None
    """The dtype of the result; None keeps each tensor's dtype."""
    max_file_bytes: int = hub.MAX_FILE_BYTES
    multi_token: Literal["keep", "drop"] = "keep"
    """What becomes of a multi-token head that the source has."""

    def __post_init__(self) -> None:
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {self.dtype!r} is not known; choose float32, bfloat16 or float16")
        if self.max_file_bytes < 1:
            raise ValueError(f"max_file_bytes is {self.max_file_bytes}; it must be at least 1")

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return getattr(torch, self.dtype) if self.dtype else None


@dataclass(frozen=True, slots=True)
class Conversion:
    source: Source
    form: str
    mesh: Mesh | None
    fused_norms: bool
    files: tuple[TargetFile, ...]
    options: Options
    has_tower: bool = False
    """Whether the folder is of a whole model that sees images."""

    @property
    def num_kept(self) -> int:
        """The number of tensors of a multi-token head that are carried."""
        trained = FAMILIES[self.shape.family].head_tensors(_shape(self.source, self.options))
        return len(_head(self.source, self.options)) + len(trained)

    @property
    def left_out(self) -> dict[str, int]:
        """How many tensors of the source are in no file, by the reason."""
        counts = dict(Counter(self.source.ignored.values()))
        if (seen := self.source.shape.vision) and (seen.trained or self.source.form != manifest.HUB):
            counts["a vision tower is another part of the model than its text"] = len(seen.tower)
        head = FAMILIES[self.shape.family].multi_token
        if head and self.num_kept:
            counts.pop(head.reason, None)
        elif head and (held := self.source.head or FAMILIES[self.shape.family].head_tensors(self.source.shape)):
            counts.setdefault(head.reason, len(held))
        return counts

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def shape(self) -> ModelShape:
        """The model, as the manifest describes it. A Hugging Face folder does not say whether its head was trained."""
        shape = _shape(self.source, self.options)
        if self.has_tower and self.source.shape.vision:
            shape = replace(shape, vision=replace(self.source.shape.vision, trained=False))
        return shape.served if self.form == manifest.HUB else shape


def to_hub(source: Source, options: Options = Options(), whole: Path | None = None) -> Conversion:
    """Convert to a Hugging Face folder as transformers writes it.

    Args:
        whole: the folder of the whole model, if it sees images. The result has its names and extents, and its tower if
            the source has none.

    Raises:
        ValueError: `whole` is no folder of this model; see `models.hub.scan`.
    """
    shape, family, named = _shape(source, options), FAMILIES[source.shape.family], dict[str, str]()
    if whole is not None:
        shape = replace(shape, vision=source.shape.vision)
        index = scan(whole, shape)
        family, named = index.family, index.whole_names
    tensors = [source.tensor(described, options.torch_dtype) for described in forms.hub_tensors(shape, family)]
    tensors = [replace(tensor, name=named.get(tensor.name, tensor.name)) for tensor in tensors]
    tensors += _head(source, options)
    if whole is not None and not shape.tower:
        stored = {name: one for path in weight_files(whole) for name, one in read_safetensors(path).items()}
        tower = {name: one for name, one in stored.items() if name.startswith(PREFIXES)}
        tensors += head_tensors(tower, family, None)
    groups = forms.split_into_files(((tensor, tensor.num_bytes) for tensor in tensors), options.max_file_bytes)
    files = [safetensors_file(hub.file_name("model", i, len(groups)), group) for i, group in enumerate(groups)]
    if len(groups) > 1:
        total = sum(tensor.num_bytes for tensor in tensors)
        names = [[tensor.name for tensor in group] for group in groups]
        files.append(TargetFile(INDEX, (hub.index_text(names, total).encode(),)))
    has_tower = whole is not None
    folder, keeps = whole or source.hub_folder, _keeps(source, options)
    files += _literal(hub.companions(folder, options.dtype, multi_token=keeps, has_tower=has_tower))
    return Conversion(source, manifest.HUB, None, True, tuple(files), options, has_tower)


def to_ranks(source: Source, mesh: Mesh, fused_norms: bool, options: Options = Options()) -> Conversion:
    """Convert to the parameters of each rank of a mesh.

    Raises:
        ValueError: the mesh does not divide the model.
    """
    files = []
    for stem, parameters in forms.rank_tensors(_shape(source, options), mesh, fused_norms).items():
        tensors = [source.tensor(described, options.torch_dtype) for described in parameters]
        groups = forms.split_into_files(((tensor, tensor.num_bytes) for tensor in tensors), options.max_file_bytes)
        files += [safetensors_file(hub.file_name(stem, i, len(groups)), group) for i, group in enumerate(groups)]
    whole = (*files, *_companions(source, options))
    return Conversion(source, manifest.RANKS, mesh, fused_norms, whole, options)


def to_open(source: Source, options: Options = Options()) -> Conversion:
    """Convert to Megatron-Core's distributed checkpoint."""
    chunks = forms.open_chunks(_shape(source, options))
    tensors = [source.tensor(chunk.tensor, options.torch_dtype) for chunk in chunks]
    groups = forms.split_into_files(((i, tensor.num_bytes) for i, tensor in enumerate(tensors)), options.max_file_bytes)
    files, entries = [], []
    for number, group in enumerate(groups):
        name, position = f"__0_{number}.distcp", 0
        segments: list[bytes | TargetTensor] = []
        for i in group:
            size, box = torch_dist.place_of(chunks[i])
            before, after = torch_dist.archive_frame(tensors[i].dtype, extents(box))
            length = len(before) + tensors[i].num_bytes + len(after)
            entries.append(torch_dist.Entry(chunks[i].key, size, box, tensors[i].dtype, (name, position, length)))
            position += length
            segments += [before, tensors[i], after]
        files.append(TargetFile(name, tuple(segments)))
    keys, num_bytes = torch_dist.empty_states(chunks), len(torch_dist.EMPTY_STATE)
    states = {key: (f"__0_{len(groups)}.distcp", i * num_bytes, num_bytes) for i, key in enumerate(keys)}
    files.append(TargetFile(f"__0_{len(groups)}.distcp", (torch_dist.EMPTY_STATE * len(keys),)))
    small = torch_dist.small_files(forms.are_layers_alike(source.shape))
    small[".metadata"] = torch_dist.metadata(entries, states)
    files += [*_literal(small), *_companions(source, options)]
    return Conversion(source, manifest.OPEN, None, True, tuple(files), options)


def _companions(source: Source, options: Options) -> list[TargetFile]:
    kept = _head(source, options)
    files = hub.companions(source.hub_folder, options.dtype, multi_token=_keeps(source, options))
    head = [safetensors_file(f"hf/{HEAD}", kept)] if kept else []
    return _literal(files, lambda name: f"hf/{name}") + head


def _shape(source: Source, options: Options) -> ModelShape:
    """The model that is written: its text, without a head that was trained, if it is dropped."""
    text = replace(source.shape, vision=None)
    return text if options.multi_token == "keep" else text.served


def _keeps(source: Source, options: Options) -> bool | None:
    """Whether a multi-token head is kept; None if there is none."""
    return options.multi_token == "keep" if source.head or source.shape.multi_token else None


def _head(source: Source, options: Options) -> list[TargetTensor]:
    if options.multi_token != "keep":
        return []
    return head_tensors(source.head, FAMILIES[source.shape.family], options.torch_dtype)


def _literal(files: dict[str, bytes], rename: Callable[[str], str] = str) -> list[TargetFile]:
    return [TargetFile(rename(name), (content,)) for name, content in files.items()]
