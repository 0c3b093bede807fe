"""Splitting weights into k parts with sums as equal as a fast method gets them.

Invariants: every index is in exactly one part; the same weights give the same parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def karmarkar_karp(weights: Sequence[float], num_parts: int) -> list[list[int]]:
    """Largest differencing method (Karmarkar and Karp 1982), k ways.

    Every weight starts as a partition of its own: one part holds it, the others are empty. The two partitions
    with the largest spread are joined, the heaviest part of one with the lightest of the other, until one is
    left. O(n k log(n k)) sums; the parts may differ in their number of members.

    Returns:
        num_parts lists of indices into `weights`, ascending; the heaviest part first. Parts may be empty.

    Raises:
        ValueError: fewer than one part.

    Example:
        weights 8 7 6 5 4 in 2 parts: {7, 5, 4} and {8, 6}, 16 and 14; the optimum is 15 and 15.
    """
    if num_parts < 1:
        raise ValueError(f"cannot split into {num_parts} parts; give 1 or more")
    # (-spread, age, parts): the age breaks ties, so the order never depends on how parts compare.
    heap = [
        (-float(weight), index, [(float(weight), [index])] + [(0.0, [])] * (num_parts - 1))
        for index, weight in enumerate(weights)
    ]
    if not heap:
        return [[] for _ in range(num_parts)]
    heapq.heapify(heap)
    age = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], age, joined))
        age += 1
    return [sorted(members) for _, members in heap[0][2]]
