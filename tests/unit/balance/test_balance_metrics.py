from __future__ import annotations

import itertools

import cover
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.balance.metrics import bubble, imbalance, lockstep, lockstep_floor


def test_golden():
    cost_PR = np.array([[5.0, 3.0], [1.0, 2.0]])
    assert lockstep(cost_PR) == 7 and imbalance(cost_PR) == pytest.approx(6 / 5.5 - 1)
    # Under a cap of 90 the samples 60, 60 and 50 cannot share micro-batches, so the third needs a second position.
    assert lockstep_floor(np.array([60, 60, 50, 10]), np.array([6.0, 6, 5, 1]), 90, 2) == 11
    assert lockstep_floor(np.array([60, 10, 10, 10]), np.array([6.0, 1, 1, 1]), 90, 2) == 6
    assert lockstep_floor(np.array([10] * 4), np.array([1.0] * 4), 90, 2) == 2


@settings(max_examples=cover.examples(80), deadline=None)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=4), st.integers(1, 2))
def test_no_plan_beats_the_floor(sizes, num_ranks):
    """Every assignment under a cap of 10 to a grid of as many positions as there are samples."""
    costs, cells = [size * (1 + size) for size in sizes], len(sizes) * num_ranks
    best = min(
        lockstep(np.bincount(cell_S, weights=costs, minlength=cells).reshape(-1, num_ranks))
        for cell_S in itertools.product(range(cells), repeat=len(sizes))
        if np.bincount(cell_S, weights=sizes).max() <= 10
    )
    assert lockstep_floor(np.array(sizes), np.array(costs), 10, num_ranks) <= best


def one_forward_one_backward(costs, pipeline: int) -> float:
    """The idle share of the last stage, computed by running the schedule event by event. Each stage takes 1 / PP of the
    cost, and a third of it is the forward pass."""
    count = len(costs)
    done: dict[tuple[str, int, int], float] = {}
    orders = []
    for stage in range(pipeline):
        warm = min(pipeline - 1 - stage, count)
        order = [("F", m) for m in range(warm)]
        for m in range(count - warm):
            order += [("F", m + warm), ("B", m)]
        orders.append(order + [("B", m) for m in range(count - warm, count)])
    clock, at = [0.0] * pipeline, [0] * pipeline
    while any(at[s] < len(orders[s]) for s in range(pipeline)):
        for stage in range(pipeline):
            if at[stage] == len(orders[stage]):
                continue
            kind, m = orders[stage][at[stage]]
            first = stage == 0 if kind == "F" else stage == pipeline - 1
            needs = ("F", m, stage) if kind == "B" and first else (kind, m, stage - 1 if kind == "F" else stage + 1)
            if not (kind == "F" and first) and needs not in done:
                continue
            start = max(clock[stage], 0.0 if kind == "F" and first else done[needs])
            clock[stage] = start + costs[m] / pipeline * (1 / 3 if kind == "F" else 2 / 3)
            done[kind, m, stage] = clock[stage]
            at[stage] += 1
    return 1 - sum(costs) / pipeline / max(clock)


def test_bubble():
    assert bubble(np.array([3.0, 3, 3, 3]), 1) == 0 == bubble(np.zeros(0), 4)
    assert bubble(np.full(8, 2.0), 4) == pytest.approx(3 / 11) == pytest.approx(one_forward_one_backward([2.0] * 8, 4))
    assert bubble(np.full(8, 2.0), 4, virtual=2) == pytest.approx(1.5 / 9.5)


@settings(max_examples=cover.examples(160), deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=10), st.integers(1, 5))
def test_bubble_is_a_part_of_the_idle_time_of_the_schedule(costs, pipeline):
    assert bubble(np.array(costs), pipeline) <= one_forward_one_backward(costs, pipeline) + 1e-9


def test_small_ends_make_smaller_bubbles():
    large_ends, small_ends = [5.0, 1, 2, 3, 4], [1.0, 3, 5, 4, 2]
    assert bubble(np.array(small_ends), 3) < bubble(np.array(large_ends), 3)
    assert one_forward_one_backward(small_ends, 3) < one_forward_one_backward(large_ends, 3)
