"""The pure planner: lengths and costs in, ranks and micro-batches out.

Invariants (tests/unit/balance): every sample is in one micro-batch; no micro-batch exceeds the cap, padding counted;
all ranks have the same number of micro-batches, a multiple of what is asked and not more than first-fit decreasing
needs (groups that stay together may need more); such a group is on one rank; the same lengths, in any order, give the
same plan.

Shape letters: S samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_rl.balance.grid import Grid
from megatron_rl.balance.karmarkar_karp import karmarkar_karp
from megatron_rl.balance.packing import Packing, pack_grid

SWEEPS_OVER_THE_GRID = 6
SWEEPS_BETWEEN_RANKS = 14
SWEEPS_WITHIN_RANKS = 4


@dataclass(frozen=True, slots=True)
class Limits:
    cap: int
    """A micro-batch holds at most so many tokens, alignment padding counted."""
    num_ranks: int
    """The number of data-parallel ranks."""
    multiple: int = 1
    """The number of micro-batches of a rank is a multiple of this: the micro-batch group of a virtual pipeline."""


def assign(sizes_S: np.ndarray, costs_S: np.ndarray, limits: Limits, group_S: np.ndarray | None = None) -> Packing:
    """One mini-batch over ranks and micro-batches: cell `position * num_ranks + rank` of each sample.

    The samples are packed into the fewest positions of one micro-batch a rank (`pack_grid`); exchanges make the
    micro-batches of a position cost alike; Karmarkar-Karp deals each position's micro-batches to the ranks, exchanges
    even out what is left. Ranks first and packing then would need more micro-batches: the fullest rank decides.
    With groups there is no choice: Karmarkar-Karp deals them to the ranks, each rank is packed by itself, and exchanges
    stay within ranks.

    Args:
        sizes_S: padded tokens, int64. A sample above the cap gets a micro-batch of its own.
        costs_S: what is evened out; positive, and never less for a larger size.
        group_S: samples of one group stay on one rank; None: anywhere.

    Returns:
        The packing; positions from the costliest to the cheapest.
    """
    if not len(sizes_S):
        return Packing(np.zeros(0, np.int64), 0)
    # Sorted first, so that nothing below depends on the order of the samples.
    order = np.lexsort((-costs_S, -sizes_S))
    sizes, costs = np.minimum(sizes_S[order], limits.cap), costs_S[order]
    if group_S is None:
        grid = _anywhere(sizes, costs, limits)
    else:
        grid = _together(sizes, costs, limits, group_S[order])
    slowest_first = np.argsort(-grid.cost_PR.max(1), kind="stable")
    place = np.empty_like(slowest_first)
    place[slowest_first] = np.arange(len(place))
    position, rank = np.divmod(grid.cell_S, limits.num_ranks)
    cell_S = np.empty(len(order), np.int64)
    cell_S[order] = place[position] * limits.num_ranks + rank
    return Packing(cell_S, grid.num_positions)


def _anywhere(sizes: np.ndarray, costs: np.ndarray, limits: Limits) -> Grid:
    packing = pack_grid(sizes, costs, limits.cap, limits.num_ranks, limits.multiple)
    grid = Grid(packing, sizes, costs, limits.cap, limits.num_ranks)
    if limits.num_ranks > 1:
        grid.even_positions(SWEEPS_OVER_THE_GRID, within_ranks=False)
        grid.deal_ranks()
        grid.even_ranks(SWEEPS_BETWEEN_RANKS)
        grid.even_positions(SWEEPS_WITHIN_RANKS, within_ranks=True)
    return grid


def _together(sizes: np.ndarray, costs: np.ndarray, limits: Limits, group: np.ndarray) -> Grid:
    _, group = np.unique(group, return_inverse=True)
    parts = karmarkar_karp(np.bincount(group, weights=costs).tolist(), limits.num_ranks)
    rank_of_group = np.empty(group.max() + 1, np.int64)
    for rank, members in enumerate(parts):
        rank_of_group[members] = rank
    rank_S = rank_of_group[group]
    mine = [np.flatnonzero(rank_S == rank) for rank in range(limits.num_ranks)]
    count = max(pack_grid(sizes[i], costs[i], limits.cap, 1, limits.multiple).count for i in mine if len(i))
    cell_S = np.empty(len(sizes), np.int64)
    for rank, i in enumerate(mine):
        if len(i):
            packing = pack_grid(sizes[i], costs[i], limits.cap, 1, limits.multiple, at_least=count)
            cell_S[i] = packing.cell_S * limits.num_ranks + rank
    grid = Grid(Packing(cell_S, count), sizes, costs, limits.cap, limits.num_ranks)
    grid.even_positions(SWEEPS_OVER_THE_GRID, within_ranks=True)
    return grid
