"""Properties of the pure planner for arbitrary lengths."""

from __future__ import annotations

import cover
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.balance import AssignmentLimits, assign
from megatron_rl.balance.grid import Grid
from megatron_rl.balance.metrics import imbalance, lockstep, lockstep_floor
from megatron_rl.balance.packing import first_fit_decreasing, pack_grid, padded


def cost_of(lengths) -> np.ndarray:
    """Costs with the proportion of linear and quadratic terms that a 32B model has at lengths of thousands."""
    lengths = np.asarray(lengths, np.float64)
    return lengths + lengths**2 / 500


def by_cell(of_S, packing, num_ranks: int) -> np.ndarray:
    """The costs of all cells, [positions, ranks]."""
    sums = np.bincount(packing.cell_S, weights=of_S, minlength=packing.count * num_ranks)
    return sums.reshape(packing.count, num_ranks)


@st.composite
def steps(draw):
    cap = draw(st.integers(32, 300))
    # Draw few different lengths, so that some samples are equal.
    lengths = draw(
        st.lists(st.integers(1, cap) | st.sampled_from([1, cap // 3, cap // 2, cap]), min_size=1, max_size=60)
    )
    alignment = draw(st.sampled_from([1, 2, 8, 16]))
    cap = cap // alignment * alignment
    lengths = np.minimum(np.array(lengths), cap)
    return lengths, alignment, AssignmentLimits(cap, draw(st.integers(1, 9)), draw(st.integers(1, 4)))


@pytest.mark.parametrize("part", cover.essential(range(4), 0))  # each has examples of its own
@settings(max_examples=75, deadline=None)
@given(steps(), st.integers(0, 10**6))
def test_properties(part, step, seed):
    lengths, alignment, limits = step
    sizes, costs = padded(lengths, alignment), cost_of(lengths)
    packing = assign(sizes, costs, limits)
    again = assign(sizes, costs, limits)
    assert packing.count == again.count and (packing.cell_S == again.cell_S).all(), "deterministic"

    # Check that each sample has a cell inside the grid, then the cap, the multiple, and first-fit decreasing's count.
    assert packing.cell_S.shape == lengths.shape
    assert packing.cell_S.min() >= 0 and packing.cell_S.max() < packing.count * limits.num_ranks
    assert by_cell(sizes, packing, limits.num_ranks).max() <= limits.cap
    bins = max(first_fit_decreasing(np.sort(sizes)[::-1].tolist(), limits.cap)) + 1
    needed = -(-bins // (limits.num_ranks * limits.multiple)) * limits.multiple
    assert packing.count % limits.multiple == 0 and packing.count <= needed

    cost_PR = by_cell(costs, packing, limits.num_ranks)
    assert lockstep(cost_PR) >= lockstep_floor(sizes, costs, limits.cap, limits.num_ranks) * (1 - 1e-12)
    costliest = cost_PR.max(1)
    assert (costliest[:-1] >= costliest[1:] * (1 - 1e-9)).all(), "the most expensive position comes first"

    # In another order only equal samples may change places.
    order = np.random.default_rng(seed).permutation(len(lengths))
    shuffled = assign(sizes[order], costs[order], limits)
    assert contents(lengths[order], shuffled) == contents(lengths, packing)


def contents(lengths, packing) -> dict[int, list[int]]:
    return {int(cell): sorted(lengths[packing.cell_S == cell].tolist()) for cell in np.unique(packing.cell_S)}


@settings(max_examples=cover.examples(120), deadline=None)
@given(steps(), st.integers(1, 12), st.integers(0, 10**6))
def test_groups_stay_on_one_rank(step, num_groups, seed):
    lengths, alignment, limits = step
    sizes, costs = padded(lengths, alignment), cost_of(lengths)
    group = np.random.default_rng(seed).integers(0, num_groups, len(lengths)) * 7
    packing = assign(sizes, costs, limits, group)
    for each in np.unique(group):
        assert len(np.unique(packing.cell_S[group == each] % limits.num_ranks)) == 1
    assert by_cell(sizes, packing, limits.num_ranks).max() <= limits.cap
    assert packing.count % limits.multiple == 0
    assert (packing.cell_S == assign(sizes, costs, limits, group).cell_S).all()


@settings(max_examples=cover.examples(120), deadline=None)
@given(steps(), st.booleans())
def test_exchanges_keep_every_sample_and_the_cap(step, within_ranks):
    lengths, alignment, limits = step
    sizes = np.sort(padded(lengths, alignment))[::-1]
    costs = cost_of(sizes)
    packing = pack_grid(sizes, costs, limits.cap, limits.num_ranks, limits.multiple)[0]
    grid = Grid(packing, sizes, costs, limits.cap, limits.num_ranks)
    assert (grid.cell_S == packing.cell_S).all()

    def check() -> float:
        cell_S = grid.cell_S
        cost_C = np.bincount(cell_S, weights=costs, minlength=len(grid.cost_C))
        np.testing.assert_allclose(grid.cost_C, cost_C, rtol=1e-9, atol=1e-6)  # rounding of sums and differences
        size_C = np.bincount(cell_S, weights=sizes, minlength=len(grid.cost_C))
        assert (grid.room_C == limits.cap - size_C).all() and grid.room_C.min() >= 0
        return lockstep(grid.cost_PR)

    before, rank_S = check(), grid.cell_S % limits.num_ranks
    grid.even_positions(5, within_ranks)
    evened = check()
    assert evened <= before * (1 + 1e-9)
    assert not within_ranks or (grid.cell_S % limits.num_ranks == rank_S).all()
    grid.deal_ranks()
    assert check() == pytest.approx(evened, rel=1e-12)
    uneven = imbalance(grid.cost_PR)
    grid.even_ranks(14)
    check()
    assert imbalance(grid.cost_PR) <= uneven + 1e-9


def test_an_oversize_sample_stands_alone():
    sizes = np.array([50, 10, 120, 90, 100, 10])
    packing = assign(sizes, cost_of(sizes), AssignmentLimits(100, 2))
    assert (packing.cell_S == packing.cell_S[2]).sum() == 1
    assert (packing.cell_S == packing.cell_S[4]).sum() == 1
    rest = np.delete(np.bincount(packing.cell_S, weights=sizes), packing.cell_S[2])
    assert rest.max() <= 100


def test_fewer_samples_than_cells_leave_empty_ones():
    packing = assign(np.array([40, 30, 20]), cost_of([40, 30, 20]), AssignmentLimits(64, 2, multiple=4))
    assert packing.count == 4 and packing.cell_S.tolist() == [1, 0, 0]  # 40 beside 30 + 20, in step
    assert assign(np.zeros(0, np.int64), np.zeros(0), AssignmentLimits(64, 2)).count == 0


def test_groups_together_golden():
    """Ranks of 100 + 20 and 60 + 60: the groups are 0 (60 + 60), 1 (100), 2 (20)."""
    lengths = np.array([60, 60, 100, 20])
    packing = assign(lengths, lengths.astype(float), AssignmentLimits(100, 2), np.array([5, 5, 1, 2]))
    rank = packing.cell_S % 2
    assert rank[0] == rank[1] != rank[2] == rank[3] and packing.count == 2


def workloads(num_samples: int, seed: int):
    rng = np.random.default_rng(seed)
    yield rng.integers(256, 32769, num_samples)
    yield np.clip(np.exp(rng.normal(np.log(6000), 0.8, num_samples)), 64, 32768).astype(int)
    yield np.where(
        rng.random(num_samples) < 0.5, rng.integers(200, 1600, num_samples), rng.integers(4000, 28000, num_samples)
    )


@pytest.mark.parametrize("seed", range(3))
def test_ranks_and_positions_cost_alike(seed):
    """256 samples on 8 ranks under a tight cap have small imbalance within positions and between ranks."""
    for lengths in workloads(256, seed):
        sizes = padded(lengths, 16)
        costs = lengths * (1 + lengths / 65536)
        packing = assign(sizes, costs, AssignmentLimits(65536, 8))
        cost_PR = by_cell(costs, packing, 8)
        assert imbalance(cost_PR) < 1e-3
        assert lockstep(cost_PR) / lockstep_floor(sizes, costs, 65536, 8) < 1.02
