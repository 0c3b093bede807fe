"""One rectangle that travels, and how it is cut into smaller ones.

Invariants (tests/unit/layout): the pieces of a copy are the copy, each element once, and the same on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.layout.shards import Box, extents, volume

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One rectangle, on both sides: the same extents, but for a dim of extent 1 in front where experts are stacked."""

    source_name: str
    source_box: Box
    destination_name: str
    destination_box: Box
    dtype: str
    """On the wire."""

    @property
    def num_bytes(self) -> int:
        """On the wire."""
        return volume(self.source_box) * WIDTHS[self.dtype]

    def rows(self, max_bytes: int) -> Iterator[Copy]:
        """Pieces of at most `max_bytes`, cut along the first dim that is longer than 1. A row larger than that is one
        piece."""
        lengths = extents(self.source_box)
        dim = next((d for d, length in enumerate(lengths) if length > 1), None)
        if dim is None or self.num_bytes <= max_bytes:
            yield self
            return
        dim -= len(lengths)  # counted from the end: one side may have a dim more in front
        each = max(max_bytes * lengths[dim] // self.num_bytes, 1)
        for first in range(0, lengths[dim], each):
            last = min(first + each, lengths[dim])
            here, there = (_rows(box, dim, first, last) for box in (self.source_box, self.destination_box))
            yield Copy(self.source_name, here, self.destination_name, there, self.dtype)


def _rows(box: Box, dim: int, first: int, last: int) -> Box:
    intervals = list(box)
    start = box[dim][0]
    intervals[dim] = start + first, start + last
    return tuple(intervals)
