"""Coordinates equal those written by hand; tests/ranks compares them with Megatron-Core's own groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.types import Mesh


def test_order_by_hand():
    """Ranks are numbered along tensor first, then context, data and pipeline; the experts number the same ranks in
    their own way."""
    mesh = Mesh(tensor=2, pipeline=2, data=2, context=2, expert=4, expert_tensor=1)
    assert mesh.world_size == 16 and mesh.stage_size == 8
    assert [mesh.coordinates(rank) for rank in (0, 1, 2, 4, 8, 15)] == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (1, 1, 1),
    ]
    assert [mesh.context_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [mesh.expert_coordinates(rank) for rank in (0, 1, 3, 4, 9, 15)] == [
        (0, 0, 0),
        (0, 1, 0),
        (0, 3, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 3, 1),
    ]


def test_experts_are_split_like_the_rest_unless_said_otherwise():
    mesh = Mesh(tensor=2, data=4, expert=4)
    assert mesh.expert_ways == 2
    assert [mesh.expert_coordinates(rank) for rank in (0, 1, 2, 7)] == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 3, 0)]


def test_layers_of_chunks_by_hand():
    mesh = Mesh(pipeline=4, virtual=2)
    assert [list(mesh.layer_range(16, 0, chunk)) for chunk in (0, 1)] == [[0, 1], [8, 9]]
    assert [list(mesh.layer_range(16, 3, chunk)) for chunk in (0, 1)] == [[6, 7], [14, 15]]
    uneven = Mesh(pipeline=3, layers=(1, 3, 2))
    assert [list(uneven.layer_range(6, stage)) for stage in range(3)] == [[0], [1, 2, 3], [4, 5]]


@given(st.integers(1, 4), st.integers(1, 2), st.integers(1, 24))
def test_chunks_partition_the_layers(pipeline, virtual, per_chunk):
    if pipeline == 1:
        virtual = 1
    mesh, num_layers = Mesh(pipeline=pipeline, virtual=virtual), pipeline * virtual * per_chunk
    ranges = [mesh.layer_range(num_layers, stage, chunk) for chunk in range(virtual) for stage in range(pipeline)]
    assert [layer for one in ranges for layer in one] == list(range(num_layers))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(tensor=0), "at least 1"),
        (dict(tensor=2, data=2, expert=4), "is not a multiple of expert x expert_tensor = 4 x 2"),
        (dict(virtual=2), "pipeline of at least 2"),
        (dict(pipeline=2, layers=(1, 2, 3)), "layers must have 2 entries, one for each chunk"),
    ],
)
def test_sizes_that_do_not_multiply_up_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Mesh(**sizes)
