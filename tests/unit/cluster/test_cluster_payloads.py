"""The tokens of groups in a real Ray store."""

from __future__ import annotations

import signal

import numpy as np
import pytest
import ray
from patience import patiently

from megatron_rl.cluster.payloads import StoredTokens, fetch, num_objects, objects_of
from megatron_rl.types import Tokens


def tokens(number: int, has_routes: bool) -> Tokens:
    ids = np.arange(number, number + 3, dtype=np.int32)
    routes = np.full((2, 1, 1), number, np.uint8) if has_routes and number != 2 else None
    return Tokens(ids, ids > 0, ids.astype(np.float32), ids, routes)


@pytest.fixture(scope="module")
def store():
    handler = signal.getsignal(signal.SIGTERM)
    patiently(lambda: ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20))
    signal.signal(signal.SIGTERM, handler)  # Ray replaces it, and other tests of this process look at it
    yield
    ray.shutdown()


@pytest.mark.parametrize("has_routes", [False, True])
def test_routes_come_only_to_those_who_ask_for_them(store, has_routes):
    """A group of two parts, and one that is at hand, as those of a journal. The engine told no routes of sample 2."""
    parts = [[tokens(1, has_routes), tokens(2, has_routes)], [tokens(3, has_routes)]]
    stored = [tuple(map(ray.put, objects_of(part, has_routes))) for part in parts]
    assert all(len(objects) == num_objects(has_routes) for objects in stored)
    at_hand = [tokens(7, True)]
    for with_routes in (False, True):
        group, other = fetch([StoredTokens(tuple(stored)), at_hand], with_routes=with_routes)
        assert [one.ids[0] for one in group] == [1, 2, 3] and other is at_hand
        known = [None if one.routes is None else int(one.routes[0, 0, 0]) for one in group]
        assert known == ([1, None, 3] if with_routes and has_routes else [None] * 3)
