"""Target files as values: each is a sequence of literal bytes and tensors, and every size is known beforehand.

A target tensor is made of parts of stored tensors. Its bytes are either runs of stored bytes, or they are made in
blocks of rows, so that memory does not grow with the tensor.
Invariant (tests/unit/convert): every element of a target comes from exactly one part, or is zero in a padding row.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.convert.tensor_files import Maps, Stored, damaged, rectangle, safetensors_header
from megatron_rl.models import Box, slices, volume
from megatron_rl.models.shards import intersect, is_vocabulary, translate
from megatron_rl.models.view import View

BLOCK_BYTES = 2**20
"""A block fits into a core's share of the cache and is large enough to hide Python's overhead. Writes of 4 MiB took
three times as long on Linux: ext4 then asks for larger contiguous pieces of memory than are free."""

Tick = Callable[[int], None]
"""Called with the number of bytes of each finished block; it raises to stop the work."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A rectangle of a stored tensor that fills a rectangle of the target."""

    source: Stored
    source_box: Box
    """The rectangle of the stored tensor."""
    box: Box
    """The rectangle of the target, or of the view."""
    view: View | None = None
    """What part of the target the rectangle is of, as a tensor of its own; None: it is of the target itself."""


@dataclass(frozen=True, slots=True)
class TargetTensor:
    name: str
    dtype: torch.dtype
    extents: tuple[int, ...]
    parts: tuple[StoredPart, ...]

    def __post_init__(self) -> None:
        described = sum(volume(part.box) for part in self.parts)
        padded = is_vocabulary(self.name) and described < prod(self.extents)
        assert described == prod(self.extents) or padded, f"{self.name}: {described} of {self.extents} are described"

    @property
    def num_bytes(self) -> int:
        return prod(self.extents) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TargetFile:
    name: str
    """The path relative to the folder."""
    segments: tuple[bytes | TargetTensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(len(s) if isinstance(s, bytes) else s.num_bytes for s in self.segments)

    def tensors(self) -> Iterator[tuple[TargetTensor, int]]:
        """Each tensor with the offset of its first byte in the file."""
        start = 0
        for segment in self.segments:
            if isinstance(segment, bytes):
                start += len(segment)
            else:
                yield segment, start
                start += segment.num_bytes


def safetensors_file(name: str, tensors: list[TargetTensor]) -> TargetFile:
    """A safetensors file. Tensors of wider dtypes come first, so that each tensor is aligned to its dtype."""
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header = safetensors_header([(tensor.name, tensor.dtype, tensor.extents) for tensor in tensors])
    return TargetFile(name, (header, *tensors))


Rows = tuple[int, int]
"""A half-open interval of a tensor's rows."""


def blocks(tensor: TargetTensor, maps: Maps, rows: Rows | None = None) -> Iterator[Tensor]:
    """The rows of a tensor in blocks. All blocks share one buffer: the next block overwrites the one before.

    Args:
        rows: None means all.

    Raises:
        ValueError: a stored tensor is damaged, or has a number that float16 cannot hold.
    """
    rest = tensor.extents[1:]
    sources = [maps.values(part.source) for part in tensor.parts]
    is_padded = sum(volume(part.box) for part in tensor.parts) < prod(tensor.extents)
    workspace = None
    for start, stop in _row_ranges(tensor, rows or (0, tensor.extents[0])):
        here = ((start, stop), *((0, length) for length in rest))
        if workspace is None:
            workspace = torch.empty((stop - start, *rest), dtype=tensor.dtype)
        block = workspace[: stop - start]
        if is_padded:
            block.zero_()
        for part, source in zip(tensor.parts, sources, strict=True):
            if part.view:
                if box := part.view.clip(part.box, start, stop):
                    target = rectangle(block, part.view, box, first=start)
                    _fill(target, source(translate(box, part.box, part.source_box)), tensor.name)
            elif box := intersect(part.box, here):
                target = block[box[0][0] - start : box[0][1] - start][:, *slices(box[1:])]
                _fill(target, source(translate(box, part.box, part.source_box)), tensor.name)
        yield block


def _fill(target: Tensor, values: Tensor, name: str) -> None:
    """Copy numbers into a part of the tensor `name`, in its dtype. Infinities and NaNs stay.

    Raises:
        ValueError: a number becomes infinite.
    """
    values = values.view(target.shape)
    target.copy_(values)
    if target.dtype == torch.float16 != values.dtype and (values.isfinite() & target.isinf()).any():
        raise ValueError(f"{name} has a number above 65,504, the largest of float16; take bfloat16 or float32")


def _row_ranges(tensor: TargetTensor, rows: Rows) -> Iterator[Rows]:
    row_bytes = prod(tensor.extents[1:]) * tensor.dtype.itemsize
    step = max(1, BLOCK_BYTES // row_bytes) if row_bytes else max(1, rows[1] - rows[0])
    return ((start, min(rows[1], start + step)) for start in range(*rows, step))


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Consecutive bytes of a stored tensor that are the same bytes in the target."""

    source: Stored
    start: int
    """The offset of the first byte in the stored tensor."""
    num_bytes: int


def runs(tensor: TargetTensor, rows: Rows | None = None) -> list[ByteRun] | None:
    """The runs that a tensor consists of, in order. None if it has parts of rows, another form or dtype than its
    source, or padding: its bytes are then no runs.

    Args:
        rows: None means all.
    """
    for part in tensor.parts:
        if part.view or part.source.view:
            return None
        whole_rows = (part.box[1:], part.source_box[1:]) == (_full(tensor.extents), _full(part.source.extents))
        if not whole_rows or part.source.dtype != tensor.dtype:
            return None
    if sum(volume(part.box) for part in tensor.parts) < prod(tensor.extents):
        return None
    row_bytes = prod(tensor.extents[1:]) * tensor.dtype.itemsize
    start, stop = rows or (0, tensor.extents[0])
    found = []
    for part in tensor.parts:
        (first, last), (source_first, _) = part.box[0], part.source_box[0]
        begin, end = max(first, start), min(last, stop)
        if begin < end:
            offset = (begin - first + source_first) * row_bytes
            found.append((begin, ByteRun(part.source, offset, (end - begin) * row_bytes)))
    return [run for _, run in sorted(found, key=lambda item: item[0])]


def _full(extents: tuple[int, ...]) -> Box:
    return tuple((0, length) for length in extents[1:])


def as_bytes(block: Tensor) -> memoryview:
    return block.view(-1).view(torch.uint8).numpy().data


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the file system inside the block, such as a full disk, name the file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_file(path: Path, entry: dict[str, Any], tick: Tick) -> None:
    """Check that a file has the bytes that its entry in the manifest describes.

    Raises:
        ValueError: the file is missing, has another size, or has changed bytes inside or between its tensors.
    """
    _check(path, entry, tick, with_tensors=True)


def check_frame(path: Path, entry: dict[str, Any]) -> None:
    """Check the bytes before, between and after the tensors of a file.

    Raises:
        ValueError: the file is missing, has another size, or has changed bytes there.
    """
    _check(path, entry, lambda num_bytes: None, with_tensors=False)


def _check(path: Path, entry: dict[str, Any], tick: Tick, *, with_tensors: bool) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing, but the manifest names it; copy it again")
    if (size := path.stat().st_size) != entry["bytes"]:
        raise ValueError(f"{path} has {size} bytes, but the manifest says {entry['bytes']}; copy it again")
    frame = 0
    with path.open("rb", buffering=0) as stream:
        for name, tensor in entry.get("tensors", {}).items():
            frame = _checksum(stream, tensor["start"] - stream.tell(), frame, tick)
            if not with_tensors:
                stream.seek(tensor["bytes"], os.SEEK_CUR)
                continue
            found = _checksum(stream, tensor["bytes"], 0, tick)
            if found != int(tensor["crc32"], 16):
                raise ValueError(damaged(path, name, found, int(tensor["crc32"], 16)))
        frame = _checksum(stream, size - stream.tell(), frame, tick)
    if frame != int(entry["crc32"], 16):
        where = "outside its tensors " if "tensors" in entry else ""
        raise ValueError(
            f"{path} is damaged {where}or was changed: its crc32 is {frame:08x}, but the manifest says "
            f"{entry['crc32']}; copy it again"
        )


def _checksum(stream: FileIO, num_bytes: int, checksum: int, tick: Tick) -> int:
    workspace = np.empty(min(num_bytes, BLOCK_BYTES), np.uint8).data
    while num_bytes:
        count = stream.readinto(workspace[:num_bytes])
        assert count, "the file became shorter after its size was checked"
        checksum = zlib.crc32(workspace[:count], checksum)
        num_bytes -= count
        tick(count)
    return checksum
