"""Tensors in files: where each one begins, and read-only maps of their bytes.

Invariants (tests/unit/convert): what is read has the bits that were written; a tensor whose bytes differ from the
manifest's is an error that names file and tensor, and nothing made from it is published.
"""

from __future__ import annotations

import json
import mmap
import struct
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_rl.models import Box, slices
from megatron_rl.models.hub import read_header
from megatron_rl.models.quantisation import BYTES, FP4_VALUES, FP8, WORDS, Blocks, Form, Int4, Mxfp4
from megatron_rl.models.shards import extents as extents_of
from megatron_rl.models.view import View

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    FP8: torch.float8_e4m3fn,
    BYTES: torch.uint8,
    WORDS: torch.int32,
    "I64": torch.int64,
}
"""The dtypes by their names in a safetensors header."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Quantised:
    """How the values of a quantised tensor follow from what is stored."""

    blocks: Form
    scales: Stored
    dtype: torch.dtype
    """The dtype that config.json gives to the values, which are computed in float32."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, in row-major order."""

    path: Path
    name: str
    dtype: torch.dtype
    extents: tuple[int, ...]
    start: int
    """The offset of its first byte in the file."""
    quantised: Quantised | None = None
    view: View | None = None
    """The part that is meant, as a tensor of its own: rectangles then refer to the view. None: the whole tensor."""

    @property
    def num_bytes(self) -> int:
        return prod(self.extents) * self.dtype.itemsize

    @property
    def value_dtype(self) -> torch.dtype:
        """The dtype of the values if no other one is asked for."""
        return self.quantised.dtype if self.quantised else self.dtype

    @property
    def paths(self) -> set[Path]:
        """The files that the values are made from."""
        return {self.path, self.quantised.scales.path} if self.quantised else {self.path}


def safetensors_header(tensors: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """The bytes of a safetensors file before its first tensor: the length in 8 bytes, the JSON text, and spaces up to a
    multiple of 8."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, extents in tensors:
        num_bytes = prod(extents) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": extents, "data_offsets": (offset, offset + num_bytes)}
        offset += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file. Only the header is read.

    Raises:
        ValueError: the file is truncated, its header is damaged, or a dtype is not known.
    """
    tensors = {}
    for name, (dtype, extents, start) in read_header(path).items():
        if dtype not in DTYPES:
            raise ValueError(
                f"{path}: tensor {name} is {dtype}, which is no dtype that can be read; copy the file again, or take "
                "another release of the model"
            )
        tensors[name] = Stored(path, name, DTYPES[dtype], extents, start)
    size = path.stat().st_size
    end = max((stored.start + stored.num_bytes for stored in tensors.values()), default=size)
    if end != size:
        raise ValueError(f"{path} has {size} bytes, but its header promises {end}; copy it again")
    return tensors


class Maps:
    """Read-only memory maps of files, each opened once. The kernel can drop their pages at any time, so they need no
    private memory.

    A tensor with a checksum is checked once: when its values are first asked for, or when `conclude` is told the
    checksum that its bytes have.
    """

    def __init__(self, checksums: Mapping[tuple[Path, str], int]):
        """
        Args:
            checksums: the expected crc32, by (file, tensor).
        """
        self._checksums = checksums
        self._maps: dict[Path, mmap.mmap] = {}
        self._checked: set[tuple[Path, str]] = set()

    def has_checksum(self, stored: Stored) -> bool:
        return (stored.path, stored.name) in self._checksums

    def unchecked_bytes(self, stored: Stored) -> memoryview:
        """The tensor's bytes, which are not compared with the manifest."""
        if stored.path not in self._maps:
            with stored.path.open("rb") as file:
                self._maps[stored.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return memoryview(self._maps[stored.path])[stored.start : stored.start + stored.num_bytes]

    def check(self, stored: Stored) -> None:
        """Compare the bytes with the manifest, if it has a checksum of them and this was not done yet.

        Raises:
            ValueError: the bytes are not the manifest's.
        """
        if self.has_checksum(stored) and (stored.path, stored.name) not in self._checked:
            self.conclude(stored, zlib.crc32(self.unchecked_bytes(stored)))

    def conclude(self, stored: Stored, found: int) -> None:
        """Take note that the bytes have the crc32 `found`.

        Raises:
            ValueError: this is not the manifest's.
        """
        key = stored.path, stored.name
        if found != self._checksums[key]:
            raise ValueError(damaged(stored.path, stored.name, found, self._checksums[key]))
        self._checked.add(key)

    def tensor(self, stored: Stored) -> Tensor:
        """A view of the file's bytes, which are checked first: the whole tensor, also of a part.

        Raises:
            ValueError: the bytes are not the manifest's.
        """
        self.check(stored)
        if not stored.num_bytes:
            return torch.empty(stored.extents, dtype=stored.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors; nobody writes to this one
            return torch.frombuffer(self.unchecked_bytes(stored), dtype=stored.dtype).view(stored.extents)

    def values(self, stored: Stored) -> Callable[[Box], Tensor]:
        """A function that returns the values of a rectangle of a tensor: a view of the file's bytes or, of a quantised
        tensor, float32 values that need memory for this rectangle alone.

        Raises:
            ValueError: the bytes are not the manifest's.
        """
        tensor, view = self.tensor(stored), stored.view
        if stored.quantised is None:
            return partial(rectangle, tensor, view) if view else lambda box: tensor[slices(box)]
        blocks, scales = stored.quantised.blocks, self.tensor(stored.quantised.scales)
        if isinstance(blocks, Blocks):
            return partial(dequantised, tensor, scales, blocks)
        if isinstance(blocks, Int4):
            return partial(unpacked_words, tensor, scales, blocks.group)
        assert view is not None, "`scan` refuses mxfp4 elsewhere"
        return partial(unpacked, tensor, scales, view)


def rectangle(tensor: Tensor, view: View, box: Box, first: int = 0) -> Tensor:
    """A rectangle of a view, in the memory of the file's tensor.

    Args:
        tensor: the file's tensor, or its rows from `first` on that have the rectangle.
        box: the rectangle of the HF tensor.
    """
    start = view.start(box) - first * prod(view.extents[1:])
    return tensor.as_strided(extents_of(box), view.strides, tensor.storage_offset() + start)


_FP8_VALUES = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()
"""The value of each of the 256 bytes. A look-up takes a third of the time of torch's conversion."""


def dequantised(values: Tensor, scales: Tensor, blocks: Blocks, box: Box) -> Tensor:
    """A rectangle of a matrix that is stored as fp8 values and one scale for each block: [rows, columns], float32.
    `models/quantisation.py` names the sources of the formula.

    Args:
        values: float8_e4m3fn, the whole matrix.
        scales: one for each block of the whole matrix.
        box: any rectangle; it need not lie on the borders of blocks.
    """
    (first, last), (left, right) = box
    result = torch.from_numpy(_FP8_VALUES[values[slices(box)].view(torch.uint8).numpy()])
    columns = torch.arange(left, right) // blocks.columns
    for row in range(first // blocks.rows, -(-last // blocks.rows)):
        start, stop = max(first, row * blocks.rows), min(last, (row + 1) * blocks.rows)
        result[start - first : stop - first] *= scales[row].float()[columns]
    return result


_FP4_PAIRS = np.array([[4 * FP4_VALUES[byte & 15], 4 * FP4_VALUES[byte >> 4]] for byte in range(256)], np.float32)
"""The two values of each of the 256 bytes, times 4: the factor of the largest scale, 2^128, is no float32."""
_FP4_FACTORS = np.ldexp(np.float32(1), np.arange(256) - 129)
"""The factor of each of the 256 scales, divided by 4."""


def unpacked(values: Tensor, scales: Tensor, view: View, box: Box) -> Tensor:
    """A rectangle of a matrix of an expert that is stored as mxfp4: [rows, columns], float32. `models/quantisation.py`
    names the source of the formula.

    Args:
        values: uint8 [experts, rows, columns / 32, 16], of the file.
        scales: uint8 [experts, rows, columns / 32].
        view: where the expert's matrix lies in the values of the file, [experts, rows, columns]. Its rows may be every
            second one there.
    """
    _, num_rows, num_columns = view.extents
    (first, last), (left, right) = box
    assert view.strides[1] == 1, f"{view}: scales belong to parts of rows"
    step = view.strides[0] // num_columns or 1  # 0: there is one row
    expert, row = divmod(view.start(((first, last), (0, 1))) // num_columns, num_rows)
    rows = slice(row, row + (last - first - 1) * step + 1, step)
    start, stop = left // Mxfp4.group, -(-right // Mxfp4.group)
    result = _FP4_PAIRS[values[expert, rows, start:stop].numpy()].reshape(last - first, stop - start, Mxfp4.group)
    with np.errstate(over="ignore"):
        result *= _FP4_FACTORS[scales[expert, rows, start:stop].numpy()][..., None]
    offset = start * Mxfp4.group
    return torch.from_numpy(result.reshape(last - first, -1)[:, left - offset : right - offset])


def unpacked_words(words: Tensor, scales: Tensor, group: int, box: Box) -> Tensor:
    """A rectangle of a matrix that is stored as int4: [rows, columns], float32. `models/quantisation.py` names the
    source of the formula.

    Args:
        words: int32 [rows, columns / 8], the whole matrix.
        scales: [rows, columns / group].
        group: the number of values that share a scale.
    """
    (first, last), (left, right) = box
    start = left // 8
    pairs = words[first:last, start : -(-right // 8)].contiguous().view(torch.uint8)  # little-endian: the lowest first
    values = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1).float().sub_(8)
    values = values[:, left - 8 * start : right - 8 * start]
    return values.mul_(scales[first:last].float()[:, torch.arange(left, right) // group])


def damaged(path: Path, tensor: str, found: int, expected: int) -> str:
    return (
        f"{path}: tensor {tensor} is damaged: its crc32 is {found:08x}, but the manifest says {expected:08x}; copy "
        f"or convert the file again"
    )
