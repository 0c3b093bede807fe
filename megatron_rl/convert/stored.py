"""Tensors as they lie in files: where each one begins, and read-only maps of their bytes.

Invariants (tests/unit/convert): what is read back has the bits that were written; a tensor whose bytes are not those
of the manifest is an error that names file and tensor, before any of it is used.
"""

from __future__ import annotations

import json
import mmap
import struct
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.convert.checksum import joined
from megatron_rl.layout.hub import read_header

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""By their names in a safetensors header. Quantised tensors are refused by `layout.scan`."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, rows one after the other."""

    path: Path
    name: str
    dtype: torch.dtype
    extents: tuple[int, ...]
    start: int
    """First byte in the file."""

    @property
    def num_bytes(self) -> int:
        return prod(self.extents) * self.dtype.itemsize


def safetensors_header(tensors: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """The bytes of a safetensors file before its first tensor: 8 bytes length, JSON, spaces up to a multiple of 8."""
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
    """The tensors of a safetensors file, from its header alone.

    Raises:
        ValueError: the file is truncated, its header is damaged, or a dtype is not known.
    """
    try:
        tensors = {
            name: Stored(path, name, DTYPES[dtype], extents, start)
            for name, (dtype, extents, start) in read_header(path).items()
        }
    except KeyError as error:
        raise ValueError(f"{path}: the safetensors header is damaged ({error!r}); copy the file again") from error
    size = path.stat().st_size
    end = max((stored.start + stored.num_bytes for stored in tensors.values()), default=size)
    if end != size:
        raise ValueError(f"{path} has {size} bytes, its header promises {end}; copy it again")
    return tensors


class Maps:
    """Read-only maps of files, opened once. Their pages are the page cache's and can be dropped at any time, so they
    cost no memory of the process.

    A tensor with a checksum is checked once: either when it is first asked for, or, where a conversion runs over its
    bytes anyway, by the checksums of those parts (`saw`), which `settle` puts together.
    """

    def __init__(self, checksums: Mapping[tuple[Path, str], int]):
        """`checksums`: crc32 by (file, tensor)."""
        self._checksums = checksums
        self._maps: dict[Path, mmap.mmap] = {}
        self._checked: set[tuple[Path, str]] = set()
        self._seen: dict[Stored, dict[int, tuple[int, int]]] = {}
        """First byte of each part: its length and crc32."""

    def is_open(self, stored: Stored) -> bool:
        """Whether a tensor has still to be checked."""
        key = stored.path, stored.name
        return key in self._checksums and key not in self._checked

    def tensor(self, stored: Stored, check: bool = True) -> Tensor:
        """A view of the file's bytes.

        Raises:
            ValueError: the bytes are not those of the manifest.
        """
        if stored.path not in self._maps:
            with stored.path.open("rb") as file:
                self._maps[stored.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = self._maps[stored.path]
        if check and self.is_open(stored):
            self._conclude(stored, zlib.crc32(memoryview(view)[stored.start : stored.start + stored.num_bytes]))
        if not stored.num_bytes:
            return torch.empty(stored.extents, dtype=stored.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors; this one is never written
            flat = torch.frombuffer(view, dtype=stored.dtype, count=prod(stored.extents), offset=stored.start)
        return flat.view(stored.extents)

    def saw(self, stored: Stored, start: int, num_bytes: int, checksum: int) -> None:
        """Bytes [start, start + num_bytes) of a tensor that was asked for without a check have this crc32."""
        self._seen.setdefault(stored, {})[start] = num_bytes, checksum

    def settle(self) -> None:
        """Check all tensors of which something was seen. Raises ValueError: the first that is not the manifest's."""
        for stored, parts in self._seen.items():
            stop, whole = 0, 0
            for start, (num_bytes, checksum) in sorted(parts.items()):
                if start != stop:
                    break
                stop, whole = stop + num_bytes, joined(whole, checksum, num_bytes)
            if stop == stored.num_bytes:
                self._conclude(stored, whole)
            else:
                self.tensor(stored)  # the rest belongs to another file
        self._seen.clear()

    def _conclude(self, stored: Stored, found: int) -> None:
        key = stored.path, stored.name
        if found != self._checksums[key]:
            raise ValueError(damaged(stored.path, stored.name, found, self._checksums[key]))
        self._checked.add(key)


def damaged(path: Path, tensor: str, found: int, expected: int) -> str:
    return (
        f"{path}: tensor {tensor} is damaged: its crc32 is {found:08x}, the manifest says {expected:08x}; copy or "
        f"convert it again"
    )
