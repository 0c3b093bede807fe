from __future__ import annotations

import cover
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.balance.packing import (
    first_fit_decreasing,
    least_bins,
    levels,
    pack_grid,
    pack_levels,
    pack_rows,
    padded,
)


def totals(cells, sizes) -> list[int]:
    return np.bincount(cells, weights=sizes).astype(int).tolist()


def test_padded():
    assert padded(np.array([1, 8, 9, 0]), 8).tolist() == [8, 8, 16, 0]


def test_first_fit_decreasing_golden():
    # The 5 does not fit beside the 6, the 4 does; 3 and 2 fit beside the 5 alone.
    assert first_fit_decreasing([6, 5, 4, 3, 2], 10) == [0, 1, 0, 1, 1]
    assert first_fit_decreasing([], 10) == []
    assert first_fit_decreasing([10], 10) == [0]


def first_fit(sizes, cap: int) -> list[int]:
    """The slow reference, which tries bin after bin."""
    room, bins = [], []
    for size in sizes:
        chosen = next((b for b, left in enumerate(room) if left >= size), len(room))
        if chosen == len(room):
            room.append(cap)
        room[chosen] -= size
        bins.append(chosen)
    return bins


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 40))
def test_first_fit_decreasing_equals_looking_at_every_bin(sizes, cap):
    sizes.sort(reverse=True)
    assert first_fit_decreasing(sizes, cap) == first_fit(sizes, cap)


def test_rows_golden():
    # Two ranks: 9 and 8 open position 0, 7 and 6 position 1; 3 fits beside the 7, 2 beside the 8: the emptiest
    # cell of the fuller position that holds it.
    assert pack_rows([9, 8, 7, 6, 3, 2], 10, 2) == [0, 1, 2, 3, 3, 1]


def test_levels_golden():
    # 34 over two ranks: 12 forces the first position, the 5 that are left are shared by two more.
    assert levels(np.array([12.0, 6, 2, 2, 2, 2, 2, 2, 2, 2]), 2, 3) == [12, 2.5, 2.5]
    assert levels(np.array([12.0, 8, 8, 8, 4]), 2, 2) == [12, 8]
    assert levels(np.array([4.0, 4, 4, 4]), 2, 2) == [4, 4]
    assert levels(np.array([5.0]), 2, 3) == [5, 0, 0]


def test_pack_levels_fills_what_is_furthest_below_its_level():
    # Levels 12 | 6: 10 and 8 into position 0, which leaves it 2 and 4 below, 5 and 3 into position 1; the 2 goes
    # beside the 8.
    assert pack_levels([10, 8, 5, 3, 2], [10.0, 8, 5, 3, 2], 12, [12, 6], 2) == [0, 1, 2, 3, 1]
    assert pack_levels([6, 6, 6], [6.0] * 3, 10, [9.0], 2) is None


def fewest_by_trying_all(sizes: list[int], cap: int) -> int:
    """The fewest bins, found by trying every packing of a few sizes."""

    def place(index: int, free: tuple[int, ...]) -> int:
        if index == len(sizes):
            return len(free)
        size = sizes[index]
        choices = [place(index + 1, (*free, cap - size))]
        choices += [
            place(index + 1, (*free[:b], room - size, *free[b + 1 :])) for b, room in enumerate(free) if room >= size
        ]
        return min(choices)

    return place(0, ())


@given(st.integers(4, 20).flatmap(lambda cap: st.tuples(st.just(cap), st.lists(st.integers(1, cap), max_size=6))))
def test_the_lower_bound_is_one(case):
    cap, sizes = case
    assert -(-sum(sizes) // cap) <= least_bins(np.array(sizes), cap) <= fewest_by_trying_all(sizes, cap)


def test_sizes_above_half_the_cap_need_a_bin_each():
    assert least_bins(np.array([9, 9, 9]), 16) == 3
    assert least_bins(np.array([9, 9, 7, 7, 1]), 16) == 3


@settings(max_examples=cover.examples(240), deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
    st.integers(50, 120),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 2),
)
def test_pack_covers_and_holds_the_cap(sizes, cap, num_ranks, multiple, more):
    sizes = np.sort(np.array(sizes))[::-1]
    costs = (sizes**2 + 100 * sizes).astype(float)
    packing = pack_grid(sizes, costs, cap, num_ranks, multiple)[0]
    needed = -(-(max(first_fit(sizes.tolist(), cap)) + 1) // (num_ranks * multiple)) * multiple
    assert least_bins(sizes, cap) <= packing.count * num_ranks and packing.count <= needed
    at_least = packing.count + more * multiple
    for result in (packing, pack_grid(sizes, costs, cap, num_ranks, multiple, at_least)[0]):
        assert result.count % multiple == 0
        assert len(result.cell_S) == len(sizes) and max(result.cell_S) < result.count * num_ranks
        assert max(totals(result.cell_S, sizes)) <= cap
        by_cell = np.bincount(result.cell_S, weights=costs, minlength=result.count * num_ranks)
        assert (np.diff(by_cell) <= 0).all(), "ranks of a position are neighbours in cost"
        # The sum over positions of (most expensive cell - cheapest cell) telescopes.
        by_position = by_cell.reshape(-1, num_ranks)
        lost = by_position.max(1).sum() - by_position.mean(1).sum()
        assert lost <= by_cell[0] - by_cell[-1] + 1e-6 * by_cell[0]
    assert result.count == at_least


def test_a_packing_that_only_first_fit_finds():
    """Here `pack_levels` and `pack_rows` both need 3 positions."""
    sizes = next(s for s in tight_cases() if not fits_evenly(s) and max(pack_rows(s.tolist(), 100, 2)) // 2 + 1 > 2)
    packing = pack_grid(sizes, sizes.astype(float), 100, 2)[0]
    assert packing.count == 2 and max(totals(packing.cell_S, sizes)) <= 100


def tight_cases():
    """Four bins of 100 that are completely filled, if first-fit decreasing also needs only four."""
    rng = np.random.default_rng(0)
    while True:
        cuts = [np.diff([0, *sorted(rng.choice(np.arange(1, 100), 3, replace=False)), 100]) for _ in range(4)]
        sizes = np.sort(np.concatenate(cuts))[::-1]
        if max(first_fit(sizes.tolist(), 100)) == 3:
            yield sizes


def fits_evenly(sizes) -> bool:
    costs = sizes.astype(float)
    return pack_levels(sizes.tolist(), costs.tolist(), 100, levels(costs, 2, 2), 2) is not None


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_pack_spreads_over_positions_that_a_multiple_adds(num_ranks):
    sizes = np.full(24 * num_ranks, 10)
    packing = pack_grid(sizes, sizes.astype(float), 60, num_ranks, multiple=3)[0]  # 4 would be enough
    assert packing.count == 6 and totals(packing.cell_S, sizes) == [40] * 6 * num_ranks
