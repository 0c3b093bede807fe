"""Views become the rectangles that they are, and recordings hold the shards that they were made of."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import cover
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import SHAPES, carry_out, cut, numbered
from random_layouts import engines as any_engines
from random_layouts import served

from megatron_rl.layout import Recording, box_of_view, plan_weights
from megatron_rl.models import FAMILIES, Shard, slices, vllm_shards
from megatron_rl.types import Mesh


def geometry(view: np.ndarray, whole: np.ndarray) -> tuple:
    """What PyTorch says of a view: offset, sizes and strides, in elements."""
    start = view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return start // view.itemsize, view.shape, tuple(stride // view.itemsize for stride in view.strides)


@st.composite
def rectangles(draw):
    """A tensor of numbers, a rectangle of it, and a view that is the rectangle: in other words, with other dims."""
    full = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    box = []
    for length in full:
        start = draw(st.integers(0, length - 1))
        box.append((start, draw(st.integers(start + 1, length))))
    whole = np.arange(np.prod(full)).reshape(full)
    view = whole[slices(tuple(box))]
    if draw(st.booleans()):
        view = np.expand_dims(view, draw(st.integers(0, view.ndim)))
    if view.flags["C_CONTIGUOUS"] and draw(st.booleans()):
        view = view.reshape(-1)
    return whole, tuple(box), view


@given(rectangles())
def test_the_rectangle_of_a_view(drawn):
    whole, box, view = drawn
    found = box_of_view(*geometry(view, whole), whole.shape)
    assert found == box
    assert whole[slices(found)].ravel().tolist() == view.ravel().tolist()


@pytest.mark.parametrize("part", cover.essential(range(4), 0))  # each has examples of its own
@given(st.data())
@settings(max_examples=75)
def test_any_view_is_a_rectangle_exactly_if_some_rectangle_has_its_elements(part, data):
    full = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    whole = np.arange(np.prod(full)).reshape(full)
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=0, max_size=3))
    strides = [data.draw(st.integers(1, whole.size)) for _ in sizes]
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if last >= whole.size:
        return
    offset = data.draw(st.integers(0, whole.size - 1 - last))
    steps = [range(0, size * stride, stride) for size, stride in zip(sizes, strides, strict=True)]
    elements = [offset + sum(place) for place in itertools.product(*steps)]
    intervals = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in full]
    boxes = [box for box in itertools.product(*intervals) if whole[slices(box)].ravel().tolist() == elements]
    assert len(boxes) <= 1
    assert box_of_view(offset, sizes, strides, full) == (boxes[0] if boxes else None)


def test_an_empty_view_is_no_rectangle():
    assert box_of_view(0, (0, 3), (3, 1), (2, 3)) is None


@pytest.mark.parametrize("part", cover.essential(range(4), 0))  # each has examples of its own
@given(st.data())
@settings(max_examples=cover.examples(16))
def test_a_recording_plans_what_the_table_plans(part, data):
    engines = data.draw(any_engines())
    shape = data.draw(served(engines))
    family = FAMILIES[shape.family]
    shards = [
        vllm_shards(shape, engines.tensor, rank, engines.expert_parallel, engines.pipeline)
        for rank in range(engines.world_size)
    ]
    seen = [[shard for shard in of_rank if not empty(shard)] for of_rank in shards]
    for of_rank in seen:
        random.Random(data.draw(st.integers(0, 2**32))).shuffle(of_rank)
    recorded = tuple(Recording.of(of_rank, family) for of_rank in seen)
    for recording, of_rank in zip(recorded, seen, strict=True):
        assert Counter(recording.shards) == Counter(of_rank)
    plan = plan_weights(shape, Mesh(), engines, dtype="float32", recorded=recorded)
    hf = numbered(shape)
    carry_out(plan, [cut(FAMILIES[shape.family].megatron_shards(shape, Mesh(), 0), hf)], [cut(s, hf) for s in shards])


def empty(shard: Shard) -> bool:
    """Whether it is the vocabulary on a rank that has only padding rows, into which no loader copies."""
    return any(start == stop for start, stop in shard.hf_box)


def expert_shards() -> list[Shard]:
    return [s for s in vllm_shards(SHAPES["mixtral"], 1, 0) if "layers.0.block_sparse_moe.experts" in s.hf_name]


def test_layers_share_their_placements():
    shape = SHAPES["qwen3_moe"]
    recording = Recording.of(vllm_shards(shape, 2, 0), FAMILIES["qwen3_moe"])
    assert len(recording.rows) > 5 * shape.num_layers
    assert len(recording.placements) < 15


def test_experts_in_an_order_of_their_own_are_refused():
    turned = [
        replace(s, local_box=((7 - s.local_box[0][0], 8 - s.local_box[0][0]), *s.local_box[1:]))
        for s in expert_shards()
    ]
    with pytest.raises(ValueError, match=r"w13_weight: .*\[0, 1,"):
        Recording.of(turned, FAMILIES["mixtral"])


def test_an_expert_in_a_parameter_of_its_own_is_refused():
    apart = [replace(s, local_box=s.local_box[1:]) for s in expert_shards()]
    with pytest.raises(ValueError, match="without a dim for the experts"):
        Recording.of(apart, FAMILIES["mixtral"])
