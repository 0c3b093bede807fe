"""Packing sizes into bins under a hard cap.

Invariants: every index is in exactly one bin; no bin exceeds the cap; the same sizes give the same bins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rl.balance.karmarkar_karp import karmarkar_karp


def padded(lengths: np.ndarray, alignment: int) -> np.ndarray:
    """Lengths rounded up to multiples of the alignment."""
    return -(-np.asarray(lengths) // alignment) * alignment


def pack(sizes: Sequence[int], cap: int) -> list[list[int]]:
    """Few bins: best-fit decreasing (at most 11/9 of the optimum + 4, Johnson 1974). Each size, largest
    first, goes into the fullest bin that holds it, into a new one if none does.

    Raises:
        ValueError: a size exceeds the cap.
    """
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if sizes[index] > cap:
            raise ValueError(f"size {sizes[index]} at index {index} exceeds the cap of {cap}")
        fitting = [b for b, room in enumerate(free) if room >= sizes[index]]
        if fitting:
            best = min(fitting, key=lambda b: (free[b], b))
        else:
            best = len(bins)
            bins.append([])
            free.append(cap)
        bins[best].append(index)
        free[best] -= sizes[index]
    return bins


def pack_into(sizes: Sequence[int], costs: Sequence[float], cap: int, num_bins: int) -> list[list[int]] | None:
    """Exactly `num_bins` bins under the cap, their costs as even as fits; with few sizes some stay
    empty.

    The first that fits: Karmarkar-Karp on the costs; largest first into the cheapest bin that has room;
    best-fit decreasing. When none does, the same with one bin less and an empty one.

    Returns:
        The bins, or None when no number of bins up to `num_bins` fits.
    """
    for used in range(num_bins, least_bins(sizes, cap) - 1, -1):
        bins = _pack_evenly(sizes, costs, cap, used)
        if bins is not None:
            return bins + [[] for _ in range(num_bins - used)]
    return None


def fewest_bins(sizes: Sequence[int], costs: Sequence[float], cap: int) -> int:
    """The smallest number of bins that `pack_into` fills: a bound that no packing beats at least,
    best-fit decreasing's number at most."""
    most = len(pack(sizes, cap))
    fitting = (n for n in range(least_bins(sizes, cap), most) if _pack_evenly(sizes, costs, cap, n) is not None)
    return next(fitting, most)


def least_bins(sizes: Sequence[int], cap: int) -> int:
    """A number of bins that no packing beats (Martello and Toth 1990, bound L2). For a threshold t: sizes above cap - t
    share a bin with nothing that is at least t, other sizes above cap / 2 not with each other; what is then left of
    the sizes from t to cap / 2 after filling these bins needs bins of its own."""
    array = np.sort(np.asarray(sizes, np.int64))
    below = np.concatenate([[0], np.cumsum(array)])
    half = int(np.searchsorted(array, cap / 2, side="right"))
    least = 0
    for first in np.unique(np.concatenate([[0], np.searchsorted(array, np.unique(array[:half]))])).astype(int):
        threshold = int(array[first]) if first < half else 0
        alone = int(np.searchsorted(array, cap - threshold, side="right"))
        medium = below[alone] - below[half]
        small = below[half] - below[first]
        rest = small - ((alone - half) * cap - medium)
        least = max(least, len(array) - half + max(0, -(-int(rest) // cap)))
    return least


def _pack_evenly(sizes: Sequence[int], costs: Sequence[float], cap: int, num_bins: int) -> list[list[int]] | None:
    if not num_bins:
        return []
    bins = karmarkar_karp(costs, num_bins)
    if all(sum(sizes[i] for i in members) <= cap for members in bins):
        return bins
    bins = _cheapest_with_room(sizes, costs, cap, num_bins)
    if bins is not None:
        return bins
    bins = pack(sizes, cap)
    return bins + [[] for _ in range(num_bins - len(bins))] if len(bins) <= num_bins else None


def _cheapest_with_room(
    sizes: Sequence[int], costs: Sequence[float], cap: int, num_bins: int
) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    free, cost = [cap] * num_bins, [0.0] * num_bins
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fitting = [b for b in range(num_bins) if free[b] >= sizes[index]]
        if not fitting:
            return None
        best = min(fitting, key=lambda b: (cost[b], b))
        bins[best].append(index)
        free[best] -= sizes[index]
        cost[best] += costs[index]
    return bins
