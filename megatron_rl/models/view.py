"""The place of a tensor inside a file's tensor, if the file has another form.

Only code that reads or writes files uses it. All other code has the Hugging Face (HF) tensors of a family's table:
[rows, columns], one for each expert, gate and up separate. Some models are published in other forms, but every element
of such a tensor is an element of the file: experts stacked in one tensor, matrices transposed, gate and up as parts of
one matrix. A first element and a step for each dim describe each of these forms. Invariant (tests/unit/models): the
views of a file's tensor hold each of its elements once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from megatron_rl.models.shards import Box, extents


@dataclass(frozen=True, slots=True)
class View:
    """An HF tensor as a part of a file's tensor. Both are in row-major order; steps are counted in elements."""

    name: str
    """The name of the file's tensor."""
    extents: tuple[int, ...]
    """The extents of the file's tensor."""
    offset: int
    """The element of the file's tensor that is the first one of the HF tensor."""
    strides: tuple[int, ...]
    """The step in the file's tensor from an element to the next one, for each dim of the HF tensor."""

    def start(self, box: Box) -> int:
        """The element of the file's tensor that is the first one of a rectangle of the HF tensor."""
        return self.offset + sum(first * stride for (first, _), stride in zip(box, self.strides, strict=True))

    def swapped(self) -> View:
        """The same HF tensor in a file's tensor that has its last two dims exchanged."""
        *front, rows, columns = self.extents

        def moved(step: int) -> int:
            row = step // columns
            return (row // rows * columns + step % columns) * rows + row % rows

        return View(self.name, (*front, columns, rows), moved(self.offset), tuple(map(moved, self.strides)))

    def clip(self, box: Box, first: int, last: int) -> Box | None:
        """The part of a rectangle of the HF tensor that lies in the rows [first, last) of the file's tensor, that is,
        along its first dim; None if no part does."""
        row = prod(self.extents[1:])
        clipped, begin = list(box), self.offset // row
        along = [dim for dim, stride in enumerate(self.strides) if stride % row == 0 and extents(box)[dim] > 1]
        if not along:  # the rectangle is in one row
            return box if first <= self.start(box) // row < last else None
        assert len(along) == 1, f"{self}: two dims lie along the first one"
        dim = along[0]
        step = self.strides[dim] // row
        start, stop = (-((begin - edge) // step) for edge in (first, last))
        clipped[dim] = max(box[dim][0], start), min(box[dim][1], stop)
        return tuple(clipped) if clipped[dim][0] < clipped[dim][1] else None

    def common(
        self, offset: int, sizes: Sequence[int], strides: Sequence[int], full: Sequence[int]
    ) -> tuple[Box, tuple[slice, ...]] | None:
        """What the HF tensor has in common with a view of the file's tensor that may hold parts of others, too.

        Args:
            offset, sizes, strides: the view of the file's tensor, as in `box_of`.
            full: the extents of the HF tensor.

        Returns:
            The rectangle of the HF tensor, and the same elements as an index of the view; None if there are none, or
            if the view is no rectangle of the file's tensor.
        """
        steps = [prod(self.extents[axis + 1 :]) for axis in range(len(self.extents))]
        axes = [steps.index(stride) if stride in steps else -1 for stride in strides]
        if -1 in axes or len(set(axes)) < len(axes):
            return None
        begin, mine = _place(offset, steps), _place(self.offset, steps)
        size = [1] * len(steps)
        for axis, length in zip(axes, sizes, strict=True):
            size[axis] = length
        index = {axis: slice(mine[axis] - begin[axis], mine[axis] - begin[axis] + 1) for axis in range(len(steps))}
        box, order = [], []
        for length, stride in zip(full, self.strides, strict=True):
            axis = next(axis for axis, step in enumerate(steps) if stride % step == 0)
            by = stride // steps[axis]
            start = max(0, -((mine[axis] - begin[axis]) // by))
            stop = min(length, -((mine[axis] - begin[axis] - size[axis]) // by))
            if start >= stop:
                return None
            first = mine[axis] - begin[axis] + by * start
            index[axis] = slice(first, first + by * (stop - start - 1) + 1, by)
            box.append((start, stop))
            order.append(axis)
        if any(not 0 <= index[axis].start < size[axis] for axis in index) or order != [a for a in axes if a in order]:
            return None
        return tuple(box), tuple(index[axis] for axis in axes)

    def box_of(self, offset: int, sizes: Sequence[int], strides: Sequence[int], full: Sequence[int]) -> Box | None:
        """The rectangle of the HF tensor that a view of the file's tensor is.

        Args:
            offset, sizes, strides: the view of the file's tensor as PyTorch describes it: its first element, and its
                strides in elements.
            full: the extents of the HF tensor.

        Returns:
            The rectangle that has the view's elements, in their order. None if there is no such rectangle, for example
            because the view has parts of other HF tensors, too.
        """
        left, starts = offset - self.offset, [0] * len(full)
        for dim in sorted(range(len(full)), key=lambda dim: -self.strides[dim]):
            starts[dim], left = divmod(left, self.strides[dim])
        dims, box = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1], []
        for start, length, stride in zip(starts, full, self.strides, strict=True):
            size = dims.pop(0)[0] if dims and dims[0][1] == stride else 1
            if start < 0 or size < 1 or start + size > length:
                return None
            box.append((start, start + size))
        return None if dims or left else tuple(box)


def _place(offset: int, steps: Sequence[int]) -> list[int]:
    """The index of an element along each axis of a tensor whose axes have these steps."""
    place = []
    for step in steps:
        index, offset = divmod(offset, step)
        place.append(index)
    return place


@dataclass(frozen=True, slots=True)
class InFile:
    """How files hold an HF tensor that they do not hold under its own name and in its own form. Examples of a matrix
    [ffn, hidden] of expert e: gpt-oss has row r of `gate` as [e, :, 2 r] of [experts, hidden, 2 ffn] (transposed, part
    0 of 2, interleaved), Llama 4 as [e, :, r] of the same extents (not interleaved).

    Sources of the forms: transformers 5, modeling_gpt_oss.py (GptOssExperts), modeling_llama4.py (Llama4TextExperts),
    modeling_qwen3_5_moe.py (Qwen3_5MoeExperts).
    """

    name: str
    """The name of the file's tensor, without the prefix of the layer. `{}` stands for the number of the expert; without
    it the tensor stacks all experts of the layer along a first dim."""
    part: int = 0
    num_parts: int = 1
    """The number of tensors of equal extents whose rows the file's matrix has; this one is number `part` of them."""
    interleaved: bool = False
    """The rows of the parts alternate. If not, each part's follow each other."""
    transposed: bool = False
    """The file's matrix is [columns, rows]."""

    def view(self, extents: tuple[int, ...], prefix: str, expert: int, num_experts: int) -> View:
        """
        Args:
            extents: the extents of the HF tensor: a matrix, or a vector.
            prefix: the layer's prefix.
        """
        rows, columns = extents[0] * self.num_parts, extents[1:]
        matrix = (*columns, rows) if self.transposed else (rows, *columns)
        step = rows if self.transposed else 1  # of a matrix, from a column to the next one
        first = 1 if self.transposed or not columns else columns[0]  # from a row to the next one
        strides = (first * (self.num_parts if self.interleaved else 1), *([step] if columns else []))
        offset = first * (self.part if self.interleaved else self.part * extents[0])
        if "{}" in self.name:
            return View(prefix + self.name.format(expert), matrix, offset, strides)
        if num_experts:
            matrix, offset = (num_experts, *matrix), offset + expert * prod(matrix)
        return View(prefix + self.name, matrix, offset, strides)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a file."""

    extents: tuple[int, ...]
    views: dict[str, View]
    """The HF tensors that it holds, by name. It is empty if the file's tensor is the HF tensor of this name."""
