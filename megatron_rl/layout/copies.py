"""A rectangle that is sent, and how it is cut into smaller pieces.

Invariants (tests/unit/layout): the pieces of a copy contain each of its elements once; both sides get the same pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.models.shards import Box, extents, volume

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The number of bytes of an element of each dtype."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A rectangle of a parameter of the sender that becomes a rectangle of a parameter of the receiver. Both have the
    same extents; the side that stacks its experts has one more dim of extent 1 in front."""

    source_name: str
    source_box: Box
    destination_name: str
    destination_box: Box
    dtype: str
    """The dtype of the bytes that are sent."""

    @property
    def num_bytes(self) -> int:
        """The number of bytes that are sent."""
        return volume(self.source_box) * WIDTHS[self.dtype]

    def rows(self, max_bytes: int) -> Iterator[Copy]:
        """Pieces of at most `max_bytes`, cut along the first dim that is longer than 1. A row larger than that is one
        piece."""
        lengths = extents(self.source_box)
        dim = next((d for d, length in enumerate(lengths) if length > 1), None)
        if dim is None or self.num_bytes <= max_bytes:
            yield self
            return
        dim -= len(lengths)  # count from the end, because one side may have one more dim in front
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
