"""A conversion as a value: it lists every file with its exact size before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_rl.convert import forms, hub, manifest, torch_dist
from megatron_rl.convert.source import Source
from megatron_rl.convert.stored import safetensors_header
from megatron_rl.convert.target import TargetFile, TargetTensor
from megatron_rl.layout.hub import INDEX
from megatron_rl.layout.shards import extents
from megatron_rl.types import Mesh, ModelShape


@dataclass(frozen=True, slots=True)
class Conversion:
    source: Source
    form: str
    mesh: Mesh | None
    fused_norms: bool
    files: tuple[TargetFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def shape(self) -> ModelShape:
        return self.source.shape


@dataclass(frozen=True, slots=True)
class Options:
    dtype: str | None = None
    """The dtype of the result; None keeps each tensor's dtype."""
    max_file_bytes: int = hub.MAX_FILE_BYTES

    def __post_init__(self) -> None:
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {self.dtype!r} is not known; choose float32, bfloat16 or float16")
        if self.max_file_bytes < 1:
            raise ValueError(f"max_file_bytes is {self.max_file_bytes}; it must be at least 1")

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return getattr(torch, self.dtype) if self.dtype else None


def to_hub(source: Source, options: Options = Options()) -> Conversion:
    """Convert to a Hugging Face folder as transformers writes it."""
    tensors = [source.tensor(described, options.torch_dtype) for described in forms.hub_tensors(source.shape)]
    groups = forms.split_into_files(((tensor, tensor.num_bytes) for tensor in tensors), options.max_file_bytes)
    files = [_safetensors(hub.file_name("model", i, len(groups)), group) for i, group in enumerate(groups)]
    if len(groups) > 1:
        total = sum(tensor.num_bytes for tensor in tensors)
        names = [[tensor.name for tensor in group] for group in groups]
        files.append(TargetFile(INDEX, (hub.index_text(names, total).encode(),)))
    files += _literal(hub.companions(source.hub_folder, options.dtype))
    return Conversion(source, manifest.HUB, None, True, tuple(files))


def to_ranks(source: Source, mesh: Mesh, fused_norms: bool, options: Options = Options()) -> Conversion:
    """Convert to the parameters of each rank of a mesh.

    Raises:
        ValueError: the mesh does not divide the model.
    """
    files = []
    for stem, parameters in forms.rank_tensors(source.shape, mesh, fused_norms).items():
        tensors = [source.tensor(described, options.torch_dtype) for described in parameters]
        groups = forms.split_into_files(((tensor, tensor.num_bytes) for tensor in tensors), options.max_file_bytes)
        files += [_safetensors(hub.file_name(stem, i, len(groups)), group) for i, group in enumerate(groups)]
    return Conversion(source, manifest.RANKS, mesh, fused_norms, (*files, *_companions(source, options)))


def to_open(source: Source, options: Options = Options()) -> Conversion:
    """Convert to Megatron-Core's distributed checkpoint."""
    chunks = forms.open_chunks(source.shape)
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
    return Conversion(source, manifest.OPEN, None, True, tuple(files))


def _safetensors(name: str, tensors: list[TargetTensor]) -> TargetFile:
    """A safetensors file. Tensors of wider dtypes come first, so that each tensor is aligned to its dtype."""
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header = safetensors_header([(tensor.name, tensor.dtype, tensor.extents) for tensor in tensors])
    return TargetFile(name, (header, *tensors))


def _companions(source: Source, options: Options) -> list[TargetFile]:
    return _literal(hub.companions(source.hub_folder, options.dtype), lambda name: f"hf/{name}")


def _literal(files: dict[str, bytes], rename: Callable[[str], str] = str) -> list[TargetFile]:
    return [TargetFile(rename(name), (content,)) for name, content in files.items()]
