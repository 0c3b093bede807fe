"""Exchanges samples so that the micro-batches that run at the same time have nearly equal costs.

All ranks run position after position in lockstep, so a position costs as much as its most expensive cell. The sum over
positions is the lockstep cost. A sweep pairs many cells at once and finds the best exchange of each pair: one sample
for another, or one sample for nothing. It makes the exchanges that help.

Invariants (tests/unit/balance): every sample stays in one cell; no cell exceeds the cap; `even_positions` never raises
the lockstep cost, and within ranks moves no sample to another rank; `deal_ranks` keeps the lockstep cost; `even_ranks`
never raises the ranks' imbalance.

Shape letters: S samples, P positions, R ranks, C cells = P x R (cell p * R + r), K slots of a cell, N pairs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_rl.balance.karmarkar_karp import fold_blocks
from megatron_rl.balance.packing import Packing

EVEN_RANKS = 5e-5
"""The exchanges between ranks stop when (max - mean) / mean of the ranks' costs is at most this."""
EVEN_POSITIONS = 5e-4
"""The exchanges within positions stop when the lockstep cost exceeds the mean rank's cost by at most this share."""
SWEEPS_TO_THE_MEAN = 10
"""The number of the first exchanges between ranks that raise the cost of one position alone."""
MAX_SLOTS = 6
"""A sweep considers at most this number of slots of a cell, evenly spread, and the next sweep the slots next to them.
The time of a sweep grows with the number of pairs of slots."""
LESS = 1 - 1e-9
"""An exchange is made only if it reduces the difference of two cells by more than rounding errors could."""


class Grid:
    def __init__(self, packing: Packing, sizes_S: np.ndarray, costs_S: np.ndarray, cap: int, num_ranks: int):
        num_samples, num_cells = len(sizes_S), packing.count * num_ranks
        self.num_positions, self.num_ranks, self.num_samples = packing.count, num_ranks, num_samples
        members_C = np.bincount(packing.cell_S, minlength=num_cells)
        order_S = np.argsort(packing.cell_S, kind="stable")
        cells_S = packing.cell_S[order_S]
        at = cells_S, np.arange(num_samples) - (np.cumsum(members_C) - members_C)[cells_S]
        # Every cell has an empty slot with cost 0 and size 0, so that a move is an exchange with an empty slot.
        shape = num_cells, int(members_C.max()) + 1
        self.sample_CK, self.cost_CK, self.size_CK = np.full(shape, -1), np.zeros(shape), np.zeros(shape, np.int64)
        self.sample_CK[at], self.cost_CK[at], self.size_CK[at] = order_S, costs_S[order_S], sizes_S[order_S]
        self.cost_C: NDArray[np.float64] = self.cost_CK.sum(1)
        self.room_C: NDArray[np.int64] = cap - self.size_CK.sum(1)

    @property
    def cell_S(self) -> np.ndarray:
        """The cell of each sample, int64 [S]."""
        at = np.nonzero(self.sample_CK >= 0)
        cell_S = np.empty(self.num_samples, np.int64)
        cell_S[self.sample_CK[at]] = at[0]
        return cell_S

    @property
    def cost_PR(self) -> np.ndarray:
        return self.cost_C.reshape(self.num_positions, self.num_ranks)

    def even_positions(self, num_sweeps: int, within_ranks: bool) -> None:
        """Bring the cost of every cell closer to its position's level, which is the mean cost of the position's cells
        or the cost of its largest sample, whichever is larger.

        The cell furthest above its level is paired with the one furthest below, the second furthest with the second
        furthest, and so on, over the whole grid or within each rank. Later sweeps shift the pairing.
        """
        num_positions, num_ranks = self.num_positions, self.num_ranks
        cells = np.arange(num_positions * num_ranks).reshape(num_positions, num_ranks)
        pools = cells.T if within_ranks else cells.reshape(1, -1)
        half, pool = pools.shape[1] // 2, np.arange(len(pools))[:, None]
        good_enough = (1 + EVEN_POSITIONS) * self.cost_C.sum() / num_ranks
        for sweep in range(num_sweeps if half else 0):
            cost_PR = self.cost_PR
            costliest_P = cost_PR.max(1)
            if costliest_P.sum() <= good_enough:
                return
            largest_P = self.cost_CK.reshape(num_positions, -1).max(1)
            above_C = (cost_PR - np.maximum(cost_PR.mean(1), largest_P)[:, None]).ravel()
            spare_C = (costliest_P[:, None] - cost_PR).ravel()
            order = pools[pool, np.argsort(-above_C[pools], axis=1, kind="stable")]
            high_N = order[:, :half].ravel()
            low_N = order[:, -1 - _shifted(half, sweep * (sweep + 1) // 2)].ravel()
            wanted_N = (above_C[high_N] - above_C[low_N]) / 2
            error_N, high_slot_N, low_slot_N = self._best(high_N, low_N, wanted_N, spare_C[low_N], sweep)
            better = np.flatnonzero(error_N < wanted_N * LESS)
            self._exchange(high_N[better], low_N[better], high_slot_N[better], low_slot_N[better])

    def deal_ranks(self) -> None:
        """Permute the cells of each position over the ranks by largest differencing. The ranks' costs become nearly
        equal, and the lockstep cost stays the same."""
        columns_PR = fold_blocks(self.cost_PR)
        order_C = (columns_PR + np.arange(self.num_positions)[:, None] * self.num_ranks).ravel()
        self.sample_CK, self.cost_CK, self.size_CK = (a[order_C] for a in (self.sample_CK, self.cost_CK, self.size_CK))
        self.cost_C, self.room_C = self.cost_C[order_C], self.room_C[order_C]

    def even_ranks(self, num_sweeps: int) -> None:
        """Exchange samples between the most expensive and the cheapest rank, between the second ones of both, and so
        on. A slow rank always delays all others, but a slow cell does so only if the ranks wait for each other after
        each position.

        The first sweeps bring cheap ranks up to the mean, and raise only the position with the most room: when one
        rank makes up there for a cheap cell in another position, the position costs more, but not more again when all
        other ranks do the same. Each later sweep may raise the most expensive cell of any position, first by half a
        percent of a mean cell and then by twice as much each time.
        """
        num_positions, num_ranks, half = self.num_positions, self.num_ranks, self.num_ranks // 2
        first, positions = np.arange(half) * num_positions, np.arange(num_positions)
        mean_cell, roomiest = self.cost_C.mean(), int(self.room_C.reshape(-1, num_ranks).sum(1).argmax())
        for sweep in range(num_sweeps):
            cost_PR = self.cost_PR
            cost_R = cost_PR.sum(0)
            if cost_R.max() <= (1 + EVEN_RANKS) * cost_R.mean():
                return
            order_R = np.argsort(-cost_R, kind="stable")
            high, low = order_R[:half], order_R[-1 - _shifted(half, sweep if sweep % 3 == 2 else 0)]
            above, below = cost_R[high] - cost_R.mean(), cost_R.mean() - cost_R[low]
            if sweep < SWEEPS_TO_THE_MEAN:
                to, wanted = np.full(num_positions, roomiest), np.minimum(above, below)
            else:
                to, wanted = _shifted(num_positions, sweep), (above + below) / 2
            high_N = (positions * num_ranks + high[:, None]).ravel()
            low_N = (to * num_ranks + low[:, None]).ravel()
            wanted_N = wanted.repeat(num_positions)
            allowed = mean_cell * 0.005 * 2.0 ** (sweep - SWEEPS_TO_THE_MEAN)
            spare_N = (cost_PR.max(1)[:, None] - cost_PR).ravel()[low_N]
            most_N = np.maximum(spare_N, wanted_N) if sweep < SWEEPS_TO_THE_MEAN else spare_N + allowed
            error_N, high_slot_N, low_slot_N = self._best(high_N, low_N, wanted_N, most_N, sweep)
            best = error_N.reshape(half, num_positions).argmin(1) + first
            best = best[error_N[best] < wanted_N[best] * LESS]
            self._exchange(high_N[best], low_N[best], high_slot_N[best], low_slot_N[best])

    def _best(
        self, high_N: np.ndarray, low_N: np.ndarray, wanted_N: np.ndarray, most_N: np.ndarray, sweep: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find the best exchange of each pair of cells. It moves a cost as close as possible to `wanted_N`, and at most
        `most_N`, from the first cell to the second, and keeps both within the cap.

        Returns:
            (difference from `wanted_N`, or inf if no exchange is possible; slot of the first cell; of the second).
        """
        step = -(-self.cost_CK.shape[1] // MAX_SLOTS)
        start = sweep % step
        slots = slice(start, None, step)
        cost_NKK = self.cost_CK[high_N, slots][:, :, None] - self.cost_CK[low_N, slots][:, None, :]
        size_NKK = self.size_CK[high_N, slots][:, :, None] - self.size_CK[low_N, slots][:, None, :]
        forbidden_NKK = size_NKK > self.room_C[low_N][:, None, None]
        forbidden_NKK |= size_NKK < -self.room_C[high_N][:, None, None]
        forbidden_NKK |= cost_NKK > most_N[:, None, None]
        error_NKK = np.abs(cost_NKK - wanted_N[:, None, None])
        error_NKK[forbidden_NKK] = np.inf
        best_N = error_NKK.reshape(len(high_N), -1).argmin(1)
        high_slot_N, low_slot_N = np.divmod(best_N, cost_NKK.shape[2])
        error_N = error_NKK[np.arange(len(high_N)), high_slot_N, low_slot_N]
        return error_N, start + high_slot_N * step, start + low_slot_N * step

    def _exchange(self, high: np.ndarray, low: np.ndarray, high_slot: np.ndarray, low_slot: np.ndarray) -> None:
        """Exchange the samples of the given slots. A cell may be in at most one pair."""
        if not len(high):
            return
        for of_CK, of_C, sign in ((self.cost_CK, self.cost_C, -1), (self.size_CK, self.room_C, 1)):
            first, second = of_CK[high, high_slot], of_CK[low, low_slot]
            of_CK[high, high_slot], of_CK[low, low_slot] = second, first
            of_C[high] += sign * (first - second)
            of_C[low] -= sign * (first - second)
        samples = self.sample_CK[high, high_slot]
        self.sample_CK[high, high_slot] = self.sample_CK[low, low_slot]
        self.sample_CK[low, low_slot] = samples


def _shifted(length: int, by: int) -> np.ndarray:
    """The numbers 0, 1, ..., length - 1, rotated to the right by `by` places."""
    return (np.arange(length) - by) % length
