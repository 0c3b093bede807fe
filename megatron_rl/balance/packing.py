"""Packs samples into a grid of micro-batches under a hard cap of tokens.

A grid has `count` positions, and each position has one micro-batch (cell) of every rank. The number of a cell is
`position * num_ranks + rank`.

Invariants (tests/unit/balance): every sample is in one cell; no cell exceeds the cap; the same sizes give the same
cells; the count is never below `least_bins`, and never above what first-fit decreasing needs, both divided by the
number of ranks.

Shape letters: S samples, from the longest to the shortest; C cells.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Packing:
    cell_S: np.ndarray
    """The cell of each sample, int64 [S]."""
    count: int
    """The number of positions, which is the number of micro-batches of each rank."""


def padded(lengths: np.ndarray, alignment: int) -> np.ndarray:
    """Round lengths up to multiples of the alignment."""
    return -(-np.asarray(lengths) // alignment) * alignment


def pack_grid(
    sizes_S: np.ndarray, costs_S: np.ndarray, cap: int, num_ranks: int, multiple: int = 1, at_least: int = 0
) -> list[Packing]:
    """Pack the samples into the fewest positions that several heuristics find, with similar costs in each position.

    The heuristics are `pack_levels` with the number of positions of a lower bound, `pack_rows`, and, if both need more
    positions than that, `first_fit_decreasing`, and `pack_levels` with the number found so far. The packings with the
    fewest positions are returned, the one with the lowest lockstep cost first. Their cells are sorted by cost, so that
    the cells of a position are neighbours in cost. All positions together then lose at most (most expensive cell -
    cheapest cell) to differences within positions.

    Args:
        sizes_S: padded tokens, descending, none above the cap.
        costs_S: costs, descending.
        multiple: the count is a multiple of this number.
        at_least: the count is at least this number, which must be a multiple of `multiple`.
    """
    sizes, costs = sizes_S.tolist(), costs_S.tolist()

    def positions(num_bins: int) -> int:
        return max(-(-num_bins // (num_ranks * multiple)) * multiple, at_least)

    def level(count: int) -> list[int] | None:
        return pack_levels(sizes, costs, cap, levels(costs_S, num_ranks, count), num_ranks)

    fewest = positions(least_bins(sizes_S, cap))
    found = [(fewest, level(fewest))]
    rows = pack_rows(sizes, cap, num_ranks)
    found.append((positions(max(rows, default=-1) + 1), rows))
    if found[0][1] is None and found[1][0] > fewest:
        bins = first_fit_decreasing(sizes, cap)
        count = min(found[1][0], positions(max(bins) + 1))
        found += [(positions(max(bins) + 1), bins), (count, level(count))]
    count = min(count for count, cells in found if cells is not None)
    packings = [sorted_by_cost(np.array(cells, np.int64), costs_S, count * num_ranks)
                for each, cells in found if cells is not None and each == count]  # fmt: skip
    packings.sort(key=lambda packing: float(packing[0][::num_ranks].sum()))
    return [Packing(cell_S, count) for _, cell_S in packings]


def sorted_by_cost(cell_S: np.ndarray, costs_S: np.ndarray, num_cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Renumber the cells by descending cost. Returns their costs [C] and the new cell of each sample [S]."""
    cost_C = np.bincount(cell_S, weights=costs_S, minlength=num_cells)
    order_C = np.argsort(-cost_C, kind="stable")
    place_C = np.empty(num_cells, np.int64)
    place_C[order_C] = np.arange(num_cells)
    return cost_C[order_C], place_C[cell_S]


def levels(costs_S: np.ndarray, num_ranks: int, count: int) -> list[float]:
    """The cost that the cells of each position should have, [P]. The first sample of position p is the sample
    p * num_ranks in the order of descending costs. The level is this sample's cost, or an even share of the remaining
    costs if that is larger.
    """
    forced: list[float] = costs_S[::num_ranks][:count].tolist()
    left = float(costs_S.sum()) / num_ranks
    for position, cost in enumerate(forced):
        even = left / (count - position)
        if cost <= even:
            return forced[:position] + [even] * (count - position)
        left = max(left - cost, 0.0)
    return forced + [0.0] * (count - len(forced))


def pack_levels(sizes: list[int], costs: list[float], cap: int, level: list[float], num_ranks: int) -> list[int] | None:
    """Put each sample, largest first, into the cell that is furthest below its position's level and has room. Returns
    the cells, or None if a sample fits nowhere. With equal levels and a large cap this is the longest-processing-time
    rule (Graham 1969)."""
    num_cells = len(level) * num_ranks
    heap = [(-level[cell // num_ranks], cell) for cell in range(num_cells)]  # (cost above the level, cell)
    heapq.heapify(heap)
    full: list[tuple[int, float, int]] = []  # (-room, cost above the level, cell) of cells too full for this size
    room, cells = [cap] * num_cells, []
    for size, cost in zip(sizes, costs, strict=True):
        while full and -full[0][0] >= size:
            _, above, cell = heapq.heappop(full)
            heapq.heappush(heap, (above, cell))
        while heap and room[heap[0][1]] < size:
            above, cell = heapq.heappop(heap)
            heapq.heappush(full, (-room[cell], above, cell))
        if not heap:
            return None
        above, cell = heap[0]
        heapq.heapreplace(heap, (above + cost, cell))
        room[cell] -= size
        cells.append(cell)
    return cells


def pack_rows(sizes: list[int], cap: int, num_ranks: int) -> list[int]:
    """Best-fit decreasing over positions. Only the emptiest cell of each position is considered. Each sample, largest
    first, goes into the fullest of these cells that has room for it, or into a new position if there is none. Positions
    are numbered in opening order."""
    rows: list[list[tuple[int, int]]] = []  # heaps of (-room, rank)
    emptiest: list[tuple[int, int]] = []  # (room of its emptiest cell, position), sorted
    cells = []
    for size in sizes:
        best = bisect_left(emptiest, (size, -1))
        if best < len(emptiest):
            _, position = emptiest.pop(best)
        else:
            position = len(rows)
            rows.append([(-cap, rank) for rank in range(num_ranks)])
        row = rows[position]
        room, rank = row[0]
        heapq.heapreplace(row, (room + size, rank))
        insort(emptiest, (-row[0][0], position))
        cells.append(position * num_ranks + rank)
    return cells


def first_fit_decreasing(sizes: list[int], cap: int) -> list[int]:
    """Put each size, largest first, into the first bin that has room. This needs at most 11/9 OPT + 6/9 bins (Dosa
    2007). The bins are the leaves of a binary tree. Each node knows the widest room below it, so that the time
    is O(n log n)."""
    width = 1 << max(len(sizes) - 1, 0).bit_length()
    widest, bins = [cap] * (2 * width), []
    for size in sizes:
        node = 1
        while node < width:
            node *= 2
            if widest[node] < size:
                node += 1
        bins.append(node - width)
        widest[node] -= size
        while node > 1:
            node //= 2
            room = max(widest[2 * node], widest[2 * node + 1])
            if widest[node] == room:
                break
            widest[node] = room
    return bins


def least_bins(sizes_S: np.ndarray, cap: int) -> int:
    """A lower bound of the number of bins (Martello and Toth 1990, bound L2). For a threshold t, sizes above cap - t
    share no bin with a size of at least t, and two sizes above cap / 2 share no bin. The sizes from t to cap / 2 that
    do not fit into the room left in the bins of the medium sizes (above cap / 2, up to cap - t) need further bins."""
    if not len(sizes_S):
        return 0
    sizes_S = np.sort(np.asarray(sizes_S, np.int64))
    below = np.concatenate([[0], np.cumsum(sizes_S)])
    half = int(np.searchsorted(sizes_S, cap / 2, side="right"))
    thresholds = np.concatenate([[0], sizes_S[:half]])
    first = np.searchsorted(sizes_S, thresholds)
    alone = np.searchsorted(sizes_S, cap - thresholds, side="right")
    room_in_the_medium = (alone - half) * cap - (below[alone] - below[half])
    rest = below[half] - below[first] - room_in_the_medium
    return int(len(sizes_S) - half + np.maximum(0, -(-rest // cap)).max())
