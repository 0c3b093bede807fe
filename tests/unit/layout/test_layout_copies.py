"""The pieces of a copy hold each of its elements once, are the same on both sides, and exceed the bound only as single
rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.layout import Copy
from megatron_rl.layout.copies import WIDTHS
from megatron_rl.models import slices


@st.composite
def copies(draw) -> Copy:
    """Copies of a matrix, a vector or one number. Either side may stack experts, and each side has its own origin."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))

    def box() -> tuple[tuple[int, int], ...]:
        whole = [*([1] * draw(st.integers(0, 1))), *lengths]
        starts = [draw(st.integers(0, 3)) for _ in whole]
        return tuple((start, start + length) for start, length in zip(starts, whole, strict=True))

    return Copy("here", box(), "there", box(), draw(st.sampled_from(["bfloat16", "float32"])))


@given(copies(), st.integers(1, 1500))
def test_pieces_are_the_copy(copy, max_bytes):
    source = np.arange(12**4).reshape([12] * len(copy.source_box) + [-1])[..., 0]
    target = np.full([12] * len(copy.destination_box), -1)
    pieces = list(copy.rows(max_bytes))
    for piece in pieces:
        assert (piece.source_name, piece.destination_name, piece.dtype) == ("here", "there", copy.dtype)
        part = target[slices(piece.destination_box)]
        assert part.size and (part == -1).all(), "a piece is empty or repeats an element"
        part[...] = source[slices(piece.source_box)].reshape(part.shape)
        assert piece.num_bytes == part.size * WIDTHS[copy.dtype]
    whole = target[slices(copy.destination_box)]
    np.testing.assert_array_equal(whole, source[slices(copy.source_box)].reshape(whole.shape))
    assert (target >= 0).sum() == whole.size, "a piece lies outside the copy"

    flat = np.concatenate([source[slices(piece.source_box)].ravel() for piece in pieces])
    np.testing.assert_array_equal(flat, source[slices(copy.source_box)].ravel(), "pieces are in wire order")
    rows = next((length for length in whole.shape if length > 1), 1)
    row_bytes = copy.num_bytes // rows
    assert sum(piece.num_bytes for piece in pieces) == copy.num_bytes
    assert all(piece.num_bytes <= max(max_bytes, row_bytes) for piece in pieces)
    for a, b in zip(pieces, pieces[1:], strict=False):  # no cut is unnecessary
        assert a.num_bytes + row_bytes > max_bytes and b.num_bytes <= a.num_bytes


@pytest.mark.parametrize(
    ("max_bytes", "rows"), [(1000, [5]), (60, [5]), (59, [4, 1]), (24, [2, 2, 1]), (12, [1] * 5), (1, [1] * 5)]
)
def test_a_stacked_expert_by_hand(max_bytes, rows):
    """5 rows of 6 bfloat16 numbers, 12 bytes each: rows 10 to 14 on the trainer, expert 7's rows 3 to 7 in vLLM."""
    copy = Copy("local", ((10, 15), (0, 6)), "stacked", ((7, 8), (3, 8), (2, 8)), "bfloat16")
    assert copy.num_bytes == 60
    ends = [sum(rows[:i]) for i in range(len(rows) + 1)]
    assert list(copy.rows(max_bytes)) == [
        Copy("local", ((10 + a, 10 + b), (0, 6)), "stacked", ((7, 8), (3 + a, 3 + b), (2, 8)), "bfloat16")
        for a, b in zip(ends, ends[1:], strict=False)
    ]
