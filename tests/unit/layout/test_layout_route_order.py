"""The order of a plan's routes, played as blocks in time."""

from __future__ import annotations

from pathlib import Path

import cover
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.layout import Engines, plan_weights
from megatron_rl.layout.route_order import NUM_BLOCKS, WINDOW, order_routes
from megatron_rl.models import read_shape
from megatron_rl.types import Mesh

MODELS = Path(__file__).parents[3] / "configs" / "model"
ROUTES = st.dictionaries(
    st.tuples(st.integers(0, 5), st.integers(0, 5)), st.integers(1, 10**6), min_size=1, max_size=20
)


def blocks(routes: dict[tuple[int, int], int]) -> list[tuple[int, int, tuple[int, int]]]:
    """(begin, end, route) of every block, in the order of their numbers. A block begins when both of its ends are
    free."""
    found = []
    for route, turns in zip(routes, order_routes(*zip(*routes, strict=True), list(routes.values())), strict=True):
        sent = 0
        for turn in turns:
            found.append((turn.number, turn.stop - sent, route))
            sent = turn.stop
        assert sent == routes[route], "the blocks add up"
    assert sorted(number for number, *_ in found) == list(range(len(found)))
    played, free = [], {}
    for _, size, route in sorted(found):
        ends = [("source", route[0]), ("destination", route[1])]
        begin = max(free.get(end, 0) for end in ends)
        free |= dict.fromkeys(ends, begin + size)
        played.append((begin, begin + size, route))
    return played


@pytest.mark.parametrize("part", cover.essential(range(4), 0))  # each has examples of its own
@settings(max_examples=25)
@given(ROUTES)
def test_the_order_is_that_of_time_and_nobody_waits_without_need(part, routes):
    played = blocks(routes)
    assert [begin for begin, *_ in played] == sorted(begin for begin, *_ in played), "numbers follow the time"
    for side in (0, 1):  # while an end is idle, the other ends of what it has left are busy
        for idle_from, idle_to, end in gaps(played, side):
            for begin, _, route in played:
                if route[side] == end and begin >= idle_to:
                    other = route[1 - side]
                    busy = sum(
                        min(e, idle_to) - max(b, idle_from)
                        for b, e, r in played
                        if r[1 - side] == other and b < idle_to and e > idle_from
                    )
                    assert busy == idle_to - idle_from
    loads = [sum(size for ends, size in routes.items() if ends[side] == end) for side in (0, 1) for end in range(6)]
    assert max(end for _, end, _ in played) < 2 * max(loads)
    for begin, end, _ in played:
        assert end - begin <= 1.5 * max(loads) / NUM_BLOCKS + 2


def gaps(played, side: int):
    """(from, to, end) of each time in which an end waits between two blocks, or before its first one."""
    for end in {route[side] for *_, route in played}:
        free = 0
        for begin, stop, route in played:
            if route[side] == end:
                if begin > free:
                    yield free, begin, end
                free = stop


@pytest.mark.parametrize("part", cover.essential(range(4), 0))  # each has examples of its own
@settings(max_examples=25)
@given(ROUTES, st.data())
def test_the_routes_of_a_group_advance_together(part, routes, data):
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(routes), max_size=len(routes)))
    turns = order_routes(*zip(*routes, strict=True), list(routes.values()), groups)
    sizes = list(routes.values())
    begun = sorted((turn.number, route, turn.stop) for route, own in enumerate(turns) for turn in own)
    assert [number for number, *_ in begun] == list(range(len(begun)))
    started = [0] * len(sizes)
    for _, route, stop in begun:
        share = {other: started[other] / sizes[other] for other in range(len(sizes)) if groups[other] == groups[route]}
        assert share[route] < min(share.values()) + WINDOW + 1e-9
        assert stop > started[route]
        started[route] = stop
    assert started == sizes, "the blocks add up"


def test_a_group_by_hand():
    """Source 0 has a route to each destination. Destination 1 is fuller, because source 1 sends to it as well, so the
    route there goes first. In a group it waits whenever it is two of its eight blocks ahead."""
    ends = [0, 0, 1], [0, 1, 1], [8, 8, 8]
    for groups, expected in ((None, [1] * 8 + [0] * 8), ([0, 0, 1], [1, 1] + [0, 1] * 6 + [0, 0])):
        turns = order_routes(*ends, groups)
        begun = sorted((turn.number, route) for route in (0, 1) for turn in turns[route])
        assert [route for _, route in begun] == expected


def test_three_routes_by_hand():
    """0 -> 0 has 4 bytes, 0 -> 1 and 1 -> 0 have 2: the fullest ends are the source 0 and the destination 0."""
    played = blocks({(0, 0): 4, (0, 1): 2, (1, 0): 2})
    assert [(begin, route) for begin, _, route in played] == [
        (0, (0, 0)), (1, (0, 0)), (2, (0, 0)), (3, (0, 0)), (4, (0, 1)), (4, (1, 0)), (5, (0, 1)), (5, (1, 0))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "mesh", "engines"),
    [
        ("Qwen3-32B", Mesh(4, 4, 2), Engines(8, 4)),
        ("Qwen3-32B", Mesh(2, 2), Engines(2, 2)),
        ("Qwen3-235B-A22B", Mesh(4, 2, 4, expert=16, expert_tensor=1), Engines(4, 8, 1, True)),
        ("DeepSeek-V3", Mesh(1, 4, 8, expert=8, expert_tensor=1, layers=(15, 16, 15, 15)), Engines(2, 16, 1, True)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_large_models_take_little_more_than_their_fullest_end(model, mesh, engines):
    plan = plan_weights(read_shape(MODELS / f"{model}.json"), mesh, engines)
    routes = {route: turns[-1].stop for route, turns in plan.turns.items()}
    fullest = max(plan.sent_bytes.max(), plan.engine_bytes.max())
    assert sum(routes.values()) == plan.bytes.sum()
    assert max(end for _, end, _ in blocks(routes)) <= 1.03 * fullest
