"""The order in which the routes of a transfer plan use their two ends.

Each trainer rank and each engine rank can serve one route at a time, as machines of an open shop (Gonzalez and Sahni,
"Open shop scheduling to minimize finish time", 1976). A route is cut into blocks. Whenever both ends of a route are
free, a block of it starts; of several routes the one whose other end has the most bytes left starts.

Routes can form groups whose members advance together: then their layers, which come in the same order in all of them,
are complete one after the other. A route of a group does not start a block while it is `WINDOW` ahead of the group's
slowest member. This costs time, so it is asked for only where an incomplete layer takes memory.

Invariants (tests/unit/layout): the blocks of a route add up to its bytes; blocks that run at the same time have
different ends; without groups, no two free ends have bytes for each other, so the whole takes less than twice the
fullest end's time; no route of a group is ever ahead by more than the window and a block; the order is a pure function
of the routes.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_BLOCKS = 128
"""The fullest end has about so many blocks. More blocks come closer to the bound, and take longer to order."""
WINDOW = 0.25
"""How far a route of a group may be ahead of the slowest one, as a share of its bytes. Less of it keeps fewer layers
incomplete, and lets more ends wait."""
BLOCKS_OF_ROUTE = 8
"""A route of a group has at least about so many blocks, unless they became much smaller than those of the others."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A block of a route."""

    stop: int
    """The number of the route's bytes up to the end of this block."""
    number: int
    """The place of the block among all blocks of all routes, in the order in which they start."""


def order_routes(
    source: Sequence[int],
    destination: Sequence[int],
    num_bytes: Sequence[int],
    groups: Sequence[int] | None = None,
) -> list[list[Turn]]:
    """The turns of each route.

    Args:
        source, destination: the two ends of each route; source i and destination i are different ends.
        num_bytes: the bytes of each route, above 0.
        groups: the group of each route, any numbers; None: no route waits for another one.
    """
    return _Shop(list(source), list(destination), list(num_bytes), None if groups is None else list(groups)).run()


class _Shop:
    def __init__(
        self, source: list[int], destination: list[int], num_bytes: list[int], groups: list[int] | None
    ) -> None:
        self._ends = (source, destination)
        self._left = list(num_bytes)
        """The bytes of each route that have not been started."""
        self._loads = [
            [int(load) for load in np.bincount(ends, num_bytes, max(ends, default=-1) + 1)] for ends in self._ends
        ]
        """The bytes of each end that have not been started, of sources and of destinations."""
        self._block = max(1, -(-max(map(max, self._loads), default=1) // NUM_BLOCKS))
        self._open: list[list[list[int]]] = [[[] for _ in loads] for loads in self._loads]
        """The routes of each end that have bytes left."""
        for route, ends in enumerate(zip(source, destination)):
            for side, end in enumerate(ends):
                self._open[side][end].append(route)
        self._free = [[True] * len(loads) for loads in self._loads]
        self._running: list[tuple[int, int, int]] = []
        """(end of the block, its number, its route), a heap."""
        self._turns: list[list[Turn]] = [[] for _ in num_bytes]
        self._num_bytes, self._num_started = num_bytes, 0
        self._groups = groups
        self._members: defaultdict[int, list[int]] = defaultdict(list)
        """The routes of each group."""
        for route, group in enumerate(groups or ()):
            self._members[group].append(route)
        self._slowest = dict.fromkeys(self._members, 0.0)
        """The smallest started share of the routes of each group."""
        self._waiting: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        """The free ends that could start a route of a group if its slowest route were further."""
        self._woken: list[tuple[int, int]] = []

    def run(self) -> list[list[Turn]]:
        now, free = 0, [(side, end) for side, loads in enumerate(self._loads) for end in range(len(loads))]
        while free:
            while free:
                # The fullest ends choose first.
                for side, end in sorted(free, key=lambda one: (-self._loads[one[0]][one[1]], one)):
                    if self._free[side][end]:
                        self._start_one(side, end, now)
                free, self._woken = self._woken, []
            while self._running and (not free or self._running[0][0] == now):
                now, _, route = heapq.heappop(self._running)
                for side in (0, 1):
                    end = self._ends[side][route]
                    self._free[side][end] = True
                    free.append((side, end))
        return self._turns

    def _start_one(self, side: int, end: int, now: int) -> None:
        """Start a block of a route of this end whose other end is free, if there is one."""
        others, free, loads = self._ends[1 - side], self._free[1 - side], self._loads[1 - side]
        candidates = [route for route in self._open[side][end] if free[others[route]]]
        if self._groups is not None:
            candidates = [route for route in candidates if self._may_start(route, (side, end))]
        if not candidates:
            return
        route = max(candidates, key=lambda route: loads[others[route]])
        left, block = self._left[route], self._block_of(route)
        size = block if 2 * left > 3 * block else left  # no small rest is left for a turn of its own
        share = self._share(route)
        self._left[route] -= size
        if self._groups is not None and share == self._slowest[self._groups[route]]:
            self._advance(self._groups[route])
        for side, ends in enumerate(self._ends):
            self._loads[side][ends[route]] -= size
            self._free[side][ends[route]] = False
            if not self._left[route]:
                self._open[side][ends[route]].remove(route)
        stop = self._num_bytes[route] - self._left[route]
        self._turns[route].append(Turn(stop, self._num_started))
        heapq.heappush(self._running, (now + size, self._num_started, route))
        self._num_started += 1

    def _share(self, route: int) -> float:
        """How much of a route has started."""
        return 1 - self._left[route] / self._num_bytes[route]

    def _block_of(self, route: int) -> int:
        if self._groups is None:
            return self._block
        return min(self._block, max(-(-self._num_bytes[route] // BLOCKS_OF_ROUTE), -(-self._block // 4)))

    def _may_start(self, route: int, end: tuple[int, int]) -> bool:
        """Whether a route is not too far ahead of its group. If it is, the end will be woken."""
        assert self._groups is not None
        group = self._groups[route]
        if self._share(route) < self._slowest[group] + WINDOW:
            return True
        self._waiting[group].add(end)
        return False

    def _advance(self, group: int) -> None:
        """The slowest route of a group has started a block."""
        slowest = min(map(self._share, self._members[group]))
        if slowest > self._slowest[group]:
            self._slowest[group] = slowest
            self._woken += self._waiting.pop(group, ())
