"""The pure planner: from lengths and costs of samples to ranks and micro-batches.

Invariants (tests/unit/balance): every sample is in one micro-batch; no micro-batch exceeds the cap, padding included;
all ranks have the same number of micro-batches, a multiple of `AssignmentLimits.multiple` and not larger than what
first-fit decreasing needs (groups that stay together may need more); a group that stays together is on one rank; the
same lengths in any order give the same plan.

Shape letters: S samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_rl.balance.grid import Grid
from megatron_rl.balance.karmarkar_karp import karmarkar_karp
from megatron_rl.balance.metrics import lockstep
from megatron_rl.balance.packing import Packing, pack_grid

SWEEPS_OVER_THE_GRID = 6
SWEEPS_BETWEEN_RANKS = 18
SWEEPS_WITHIN_RANKS = 4


@dataclass(frozen=True, slots=True)
class AssignmentLimits:
    cap: int
    """The largest number of tokens of a micro-batch, alignment padding included."""
    num_ranks: int
    """The number of data-parallel ranks."""
    multiple: int = 1
    """The number of micro-batches of a rank is a multiple of this number. A virtual pipeline needs a multiple of its
    micro-batch group."""


def assign(
    sizes_S: np.ndarray, costs_S: np.ndarray, limits: AssignmentLimits, group_S: np.ndarray | None = None
) -> Packing:
    """Assign the samples of one mini-batch to ranks and micro-batches.

    The samples are packed into the fewest positions, where a position is one micro-batch of every rank (`pack_grid`).
    Exchanges bring the costs of a position's micro-batches closer together. Karmarkar-Karp distributes the
    micro-batches of each position over the ranks, and further exchanges reduce the remaining differences. Of several
    packings the one is kept whose step takes least: the mean of the lockstep cost, if the ranks wait for each other
    after each position, and of the costliest rank's cost, if they wait at the end alone. Distributing samples over
    ranks before packing would need more micro-batches, because the rank with the most tokens would determine their
    number. With groups this cannot be avoided: Karmarkar-Karp distributes the groups over the ranks, each rank is
    packed separately, and samples are exchanged only within ranks.

    Args:
        sizes_S: padded tokens, int64. A sample above the cap gets a micro-batch of its own.
        costs_S: the costs to balance. They are positive, and never less for a larger size.
        group_S: samples with the same number stay on one rank; None: a sample may go to any rank.

    Returns:
        The packing, with cell `position * num_ranks + rank` for each sample. Position 0 is the most expensive.
    """
    if not len(sizes_S):
        return Packing(np.zeros(0, np.int64), 0)
    # Sorting makes everything below independent of the order of the samples.
    order = np.lexsort((-costs_S, -sizes_S))
    sizes, costs = np.minimum(sizes_S[order], limits.cap), costs_S[order]
    grid = _anywhere(sizes, costs, limits) if group_S is None else _together(sizes, costs, limits, group_S[order])
    slowest_first = np.argsort(-grid.cost_PR.max(1), kind="stable")
    place = np.empty_like(slowest_first)
    place[slowest_first] = np.arange(len(place))
    position, rank = np.divmod(grid.cell_S, limits.num_ranks)
    cell_S = np.empty(len(order), np.int64)
    cell_S[order] = place[position] * limits.num_ranks + rank
    return Packing(cell_S, grid.num_positions)


def _anywhere(sizes: np.ndarray, costs: np.ndarray, limits: AssignmentLimits) -> Grid:
    packings = pack_grid(sizes, costs, limits.cap, limits.num_ranks, limits.multiple)
    grids = [Grid(packing, sizes, costs, limits.cap, limits.num_ranks) for packing in packings]
    if limits.num_ranks == 1:
        return grids[0]
    for grid in grids:
        grid.even_positions(SWEEPS_OVER_THE_GRID, within_ranks=False)
        grid.deal_ranks()
        grid.even_ranks(SWEEPS_BETWEEN_RANKS)
        grid.even_positions(SWEEPS_WITHIN_RANKS, within_ranks=True)
    return min(grids, key=lambda grid: lockstep(grid.cost_PR) + float(grid.cost_PR.sum(0).max()))


def _together(sizes: np.ndarray, costs: np.ndarray, limits: AssignmentLimits, group: np.ndarray) -> Grid:
    _, group = np.unique(group, return_inverse=True)
    parts = karmarkar_karp(np.bincount(group, weights=costs).tolist(), limits.num_ranks)
    rank_of_group = np.empty(group.max() + 1, np.int64)
    for rank, members in enumerate(parts):
        rank_of_group[members] = rank
    rank_S = rank_of_group[group]
    mine = [np.flatnonzero(rank_S == rank) for rank in range(limits.num_ranks)]
    count = max(pack_grid(sizes[i], costs[i], limits.cap, 1, limits.multiple)[0].count for i in mine if len(i))
    cell_S = np.empty(len(sizes), np.int64)
    for rank, i in enumerate(mine):
        if len(i):
            packing = pack_grid(sizes[i], costs[i], limits.cap, 1, limits.multiple, at_least=count)[0]
            cell_S[i] = packing.cell_S * limits.num_ranks + rank
    grid = Grid(Packing(cell_S, count), sizes, costs, limits.cap, limits.num_ranks)
    grid.even_positions(SWEEPS_OVER_THE_GRID, within_ranks=True)
    return grid
