"""The order of the routes of a transfer plan at their two ends.

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

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

NUM_BLOCKS = 128
"""The fullest end has about this number of blocks. More blocks come closer to the bound, and take longer to order."""
WINDOW = 0.25
"""How far a route of a group may be ahead of the slowest one, as a share of its bytes. Less of it keeps fewer layers
incomplete, and lets more ends wait."""
BLOCKS_OF_ROUTE = 8
"""A route of a group has at least about this number of blocks, unless they became much smaller than other blocks."""
SPAN = 2**40
"""There are fewer blocks than this."""


class Turn(NamedTuple):
    """A block of a route."""

    stop: int
    """The number of the route's bytes up to the end of this block."""
    number: int
    """The place of the block among all blocks of all routes, in the order of their starts."""


def order_routes(
    source: Sequence[int],
    destination: Sequence[int],
    num_bytes: Sequence[int],
    groups: Sequence[int] | None = None,
) -> list[list[Turn]]:
    """The turns of each route.

    Args:
        source, destination: the two ends of each route; source i and destination i are different ends, and no two
            routes have both ends in common.
        num_bytes: the bytes of each route, above 0.
        groups: the group of each route, any numbers; None: no route waits for another one.
    """
    shop = _Shop(source, destination, num_bytes, None if groups is None else _Groups(groups, num_bytes))
    return shop.run()


class _Shop:
    """An end is a number: the destinations are counted after the sources. A set of ends of one side is an integer with
    a bit for each end, so an end finds its free partners in one operation.

    Ends are compared by their keys, which are all different: the end with more bytes left has the larger key, and of
    ends with equally many bytes the first one.
    """

    def __init__(
        self, source: Sequence[int], destination: Sequence[int], num_bytes: Sequence[int], groups: _Groups | None
    ) -> None:
        self._num_sources, num_destinations = (max(ends, default=-1) + 1 for ends in (source, destination))
        self._num_ends = self._num_sources + num_destinations
        self._bits = [1 << end for end in (*range(self._num_sources), *range(num_destinations))]
        self._ends = [(one, self._num_sources + other) for one, other in zip(source, destination, strict=True)]
        self._route: list[dict[int, int]] = [{} for _ in range(self._num_ends)]
        """The route between an end and a place of the other side."""
        self._partners, loads = [0] * self._num_ends, [0] * self._num_ends
        """The other ends of the routes of each end that have bytes left: a set."""
        for route, ((one, other), size) in enumerate(zip(self._ends, num_bytes, strict=True)):
            self._partners[one] |= self._bits[other]
            self._partners[other] |= self._bits[one]
            self._route[one][other - self._num_sources] = self._route[other][one] = route
            loads[one] += size
            loads[other] += size
        assert sum(map(len, self._route)) == 2 * len(self._ends), "no two routes have both ends in common"
        self._keys = [load * self._num_ends + self._num_ends - 1 - end for end, load in enumerate(loads)]
        """The sort key of each end: its load, then its number. The load is the sum of the routes that have not been
        started."""
        self._block = max(1, -(-max(loads, default=1) // NUM_BLOCKS))
        self._num_bytes, self._left = num_bytes, list(num_bytes)
        """The bytes of each route, and the number of them that have not been started."""
        self._groups = groups
        self._idle = [0, 0]
        """The free sources and the free destinations that have bytes left: two sets."""

    def run(self) -> list[list[Turn]]:
        keys, partners, bits, idle, ends = self._keys, self._partners, self._bits, self._idle, self._ends
        num_sources, num_ends, groups, left = self._num_sources, self._num_ends, self._groups, self._left
        turns: list[list[Turn]] = [[] for _ in left]
        routes: list[int] = []  # the route of each block
        running: list[int] = []  # SPAN * (end of the block) + its number, a heap
        free = [end for end, others in enumerate(partners) if others]
        for end in free:
            idle[end >= num_sources] |= bits[end]
        now = 0
        while free:
            while free:
                # The fullest ends choose first.
                for end in sorted(free, key=keys.__getitem__, reverse=True):
                    is_source = end < num_sources
                    if not (found := partners[end] & idle[is_source]) or not idle[not is_source] & bits[end]:
                        continue
                    if (route := self._chosen(end, found)) is None:
                        continue
                    size, rest = self._block_of(route), left[route]
                    if 2 * rest <= 3 * size:
                        size = rest  # no small rest is left for a turn of its own
                    left[route] = rest = rest - size
                    turns[route].append(Turn(self._num_bytes[route] - rest, len(routes)))
                    heappush(running, SPAN * (now + size) + len(routes))
                    routes.append(route)
                    if groups is not None:
                        groups.advance(route, size)
                    one, other = ends[route]
                    keys[one] -= size * num_ends
                    keys[other] -= size * num_ends
                    idle[0] ^= bits[one]
                    idle[1] ^= bits[other]
                    if not rest:
                        partners[one] ^= bits[other]
                        partners[other] ^= bits[one]
                free = groups.woken() if groups is not None else []
            while running and (not free or running[0] // SPAN == now):
                now, number = divmod(heappop(running), SPAN)
                for end in ends[routes[number]]:
                    if partners[end]:
                        idle[end >= num_sources] |= bits[end]
                        free.append(end)
        return turns

    def _chosen(self, end: int, found: int) -> int | None:
        """The route between this end and one of the found ends: the fullest route that may start."""
        keys, bits, route, groups = self._keys, self._bits, self._route[end], self._groups
        first, most, chosen = self._num_sources if end < self._num_sources else 0, -1, None
        while found:
            place = found.bit_length() - 1
            found ^= bits[first + place]
            if (key := keys[first + place]) > most and (groups is None or groups.may_start(route[place], end)):
                most, chosen = key, place
        return None if chosen is None else route[chosen]

    def _block_of(self, route: int) -> int:
        if self._groups is None:
            return self._block
        return min(self._block, max(-(-self._num_bytes[route] // BLOCKS_OF_ROUTE), -(-self._block // 4)))


class _Groups:
    """The routes that advance together."""

    def __init__(self, groups: Sequence[int], num_bytes: Sequence[int]) -> None:
        self._group, self._num_bytes, self._left = groups, num_bytes, list(num_bytes)
        self._members: defaultdict[int, list[int]] = defaultdict(list)
        """The routes of each group."""
        for route, group in enumerate(groups):
            self._members[group].append(route)
        self._slowest = dict.fromkeys(self._members, 0.0)
        """The smallest started share of the routes of each group."""
        self._waiting: defaultdict[int, set[int]] = defaultdict(set)
        """The free ends that could start a route of a group if its slowest route were further."""
        self._woken: list[int] = []

    def may_start(self, route: int, end: int) -> bool:
        """Whether a route is not too far ahead of its group. If it is, the end will be woken."""
        group = self._group[route]
        if self._share(route) < self._slowest[group] + WINDOW:
            return True
        self._waiting[group].add(end)
        return False

    def advance(self, route: int, size: int) -> None:
        """A block of a route has started."""
        group, before = self._group[route], self._share(route)
        self._left[route] -= size
        if before > self._slowest[group]:
            return
        slowest = min(map(self._share, self._members[group]))
        if slowest > self._slowest[group]:
            self._slowest[group] = slowest
            self._woken += self._waiting.pop(group, ())

    def woken(self) -> list[int]:
        """The ends that have waited for what has started since the last call."""
        woken, self._woken = self._woken, []
        return woken

    def _share(self, route: int) -> float:
        """How much of a route has started."""
        return 1 - self._left[route] / self._num_bytes[route]
