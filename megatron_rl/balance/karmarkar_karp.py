"""Splits weights into k parts with nearly equal sums, by largest differencing, a fast heuristic.

Invariants (tests/unit/balance): every index is in exactly one part; the same weights give the same parts; the largest
sum is within the method's proved factor of the optimum, which an exhaustive search finds.

Shape letters: K parts, B blocks of K weights each.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def karmarkar_karp(weights: Sequence[float], num_parts: int) -> list[list[int]]:
    """The largest differencing method (Karmarkar and Karp 1982) for k parts.

    Every weight starts as a partition: one part holds it, and the others are empty. The two partitions with the
    largest spread are joined, the heaviest part of one with the lightest of the other, until one partition is left.
    Empty parts are not stored.

    Returns:
        num_parts lists of indices into `weights`, each ascending, with the heaviest part first. Parts may be empty and
        may have different numbers of members.

    Raises:
        ValueError: num_parts is less than 1.

    Example:
        The weights 8 7 6 5 4 in 2 parts give {7, 5, 4} and {8, 6} with the sums 16 and 14; the optimum is 15 and 15.
    """
    if num_parts < 1:
        raise ValueError(f"cannot split into {num_parts} parts; num_parts must be at least 1")
    # Entries are (-spread, age, parts). The age breaks ties, so that parts are never compared.
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


def fold_blocks(weights_BK: np.ndarray) -> np.ndarray:
    """Assign the weights of each block to the parts by largest differencing. Each block starts as a partition.

    With blocks of sorted weights this is balanced largest differencing (Yakir 1996): the parts have equal numbers of
    members, and the largest sum is at most 2 - 1/k times the optimum for such parts (Michiels, Korst, Aarts and van
    Leeuwen 2003).

    Returns:
        int64 [B, K]: part k gets `weights_BK[b, result[b, k]]` of block b.
    """
    num_blocks, num_parts = weights_BK.shape
    # A node is (first, second, slots). Slot s of its sorted sums consists of slot slots[s] of node `first` and of the
    # mirrored slot of node `second`. The leaves are the blocks; their slots are indices into the block.
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
