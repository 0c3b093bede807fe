"""The tokens of groups in Ray's store."""

from __future__ import annotations

import numpy as np
import pytest
import ray

from megatron_rl.cluster.payloads import StoredTokens, fetch, num_objects, objects_of
from megatron_rl.cluster.session import ray_session
from megatron_rl.config.cluster import ClusterConfig
from megatron_rl.types import Tokens


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory):
    with ray_session(ClusterConfig(), num_trainers=1, logs=tmp_path_factory.mktemp("logs")):
        yield


def stored(number: int, has_routes: bool) -> Tokens:
    ids = np.arange(number, number + 3, dtype=np.int32)
    routes = np.full((2, 1, 1), number, np.uint8) if has_routes and number != 2 else None
    return Tokens(ids, ids > 0, ids.astype(np.float32), ids, routes)


@pytest.mark.parametrize("has_routes", [False, True])
def test_routes_come_only_to_those_who_ask_for_them(has_routes):
    """A group of two parts, and one that is at hand, as those of a journal. The engine told no routes of sample 2."""
    parts = [[stored(1, has_routes), stored(2, has_routes)], [stored(3, has_routes)]]
    objects = [tuple(map(ray.put, objects_of(part, has_routes))) for part in parts]
    assert all(len(own) == num_objects(has_routes) for own in objects)
    at_hand = [stored(7, True)]
    for with_routes in (False, True):
        group, other = fetch([StoredTokens(tuple(objects)), at_hand], with_routes=with_routes)
        assert [one.ids[0] for one in group] == [1, 2, 3] and other is at_hand
        known = [None if one.routes is None else int(one.routes[0, 0, 0]) for one in group]
        assert known == ([1, None, 3] if with_routes and has_routes else [None] * 3)
