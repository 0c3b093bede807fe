"""Splitting weights into k parts with sums as equal as a fast method gets them: largest differencing.

Invariants (tests/unit/balance): every index is in exactly one part; the same weights give the same parts; the largest
sum stays within the bound proved for the method, of the optimum that trying all finds.

Shape letters: K parts, B blocks of K weights each.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def karmarkar_karp(weights: Sequence[float], num_parts: int) -> list[list[int]]:
    """Largest differencing method (Karmarkar and Karp 1982), k ways.

    Every weight starts as a partition of its own: one part holds it, the others are empty. The two partitions with the
    largest spread are joined, the heaviest part of one with the lightest of the other, until one is left. Empty parts
    are not stored: O(n log n) sums while partitions are small, O(n) when they are full.

    Returns:
        num_parts lists of indices into `weights`, ascending; the heaviest part first. Parts may be empty, and differ
        in their number of members.

    Raises:
        ValueError: fewer than one part.

    Example:
        weights 8 7 6 5 4 in 2 parts: {7, 5, 4} and {8, 6}, 16 and 14; the optimum is 15 and 15.
    """
    _check(num_parts)
    # (-spread, age, parts): the age breaks ties, so the order never depends on how parts compare.
    heap = [(-float(w), i, [(float(w), [i])]) for i, w in enumerate(weights)]
    if num_parts == 1 or not heap:
        return [list(range(len(weights)))] + [[] for _ in range(num_parts - 1)]
    heapq.heapify(heap)
    age = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = _join(first, second, num_parts)
        spread = joined[0][0] - (joined[-1][0] if len(joined) == num_parts else 0.0)
        heapq.heappush(heap, (-spread, age, joined))
        age += 1
    parts = [sorted(members) for _, members in heap[0][2]]
    return parts + [[] for _ in range(num_parts - len(parts))]


def karmarkar_karp_equal(weights: Sequence[float], num_parts: int) -> list[list[int]]:
    """The same with equal numbers of members, to one: balanced largest differencing (Yakir 1996; Michiels, Korst,
    Aarts and van Leeuwen 2003, largest sum at most 2 - 1/k of the optimum with equal numbers).

    The sorted weights are cut into blocks of k, weights of 0 fill the last one; each block starts as a partition.

    Returns:
        num_parts lists of indices into `weights`, ascending.

    Raises:
        ValueError: fewer than one part.
    """
    _check(num_parts)
    num_weights = len(weights)
    sorted_from = np.asarray(weights, np.float64)
    order = np.argsort(-sorted_from, kind="stable")
    filled = np.zeros(-(-num_weights // num_parts) * num_parts)
    filled[:num_weights] = sorted_from[order]
    columns_BK = fold_blocks(filled.reshape(-1, num_parts))
    chosen = columns_BK + np.arange(len(columns_BK))[:, None] * num_parts
    return [np.sort(order[column[column < num_weights]]).tolist() for column in chosen.T]


def fold_blocks(weights_BK: np.ndarray) -> np.ndarray:
    """Largest differencing of blocks: which weight of each block goes to which part.

    Returns:
        int64 [B, K]: part k gets `weights_BK[b, result[b, k]]` of block b.
    """
    num_blocks, num_parts = weights_BK.shape
    # A node is (first, second, slots): slot s of its sorted sums holds slot slots[s] of its first half and the mirrored
    # one of its second. Leaves are blocks: their slots are the block's own indices.
    nodes = [(-1, -1, np.argsort(-block, kind="stable")) for block in weights_BK]
    sums = [block[slots] for block, (_, _, slots) in zip(weights_BK, nodes, strict=True)]
    heap = [(float(s[-1] - s[0]), b) for b, s in enumerate(sums)]  # -spread
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, first), (_, second) = heapq.heappop(heap), heapq.heappop(heap)
        joined = sums[first] + sums[second][::-1]
        slots = np.argsort(-joined, kind="stable")
        joined = joined[slots]
        heapq.heappush(heap, (float(joined[-1] - joined[0]), len(nodes)))
        nodes.append((first, second, slots))
        sums.append(joined)
    wanted: list[np.ndarray] = [np.arange(num_parts)] * len(nodes)
    for node in range(len(nodes) - 1, num_blocks - 1, -1):
        first, second, slots = nodes[node]
        wanted[first] = slots[wanted[node]]
        wanted[second] = num_parts - 1 - wanted[first]
    columns = [nodes[b][2][wanted[b]] for b in range(num_blocks)]
    return np.array(columns, np.int64).reshape(num_blocks, num_parts)


Part = tuple[float, list[int]]
"""The sum of the weights of a part, and the indices of these weights."""


def _join(first: list[Part], second: list[Part], num_parts: int) -> list[Part]:
    """Join two partitions into one, with the heaviest part first. Parts that are empty in both are not stored."""
    alone, mirrored = num_parts - len(second), num_parts - len(first)
    joined = first[:alone] + second[:mirrored]
    for index in range(alone, len(first)):
        (a, x), (b, y) = first[index], second[num_parts - 1 - index]
        joined.append((a + b, x + y))
    joined.sort(key=lambda part: -part[0])
    return joined


def _check(num_parts: int) -> None:
    if num_parts < 1:
        raise ValueError(f"cannot split into {num_parts} parts; give 1 or more")
