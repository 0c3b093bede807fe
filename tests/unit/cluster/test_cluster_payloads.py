"""The tokens of samples in Ray's store: a rank fetches the samples that it trains on, and the driver holds none."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import GetTimeoutError
from ray.experimental import get_object_locations

from megatron_rl.cluster.payloads import LEAST_BYTES, fetch, num_objects, objects_of, plan_objects, stored
from megatron_rl.cluster.session import ray_session
from megatron_rl.cluster.trainers import RankGroup
from megatron_rl.config.cluster import ClusterConfig
from megatron_rl.recipes.tiny.task import write_task
from megatron_rl.tools.bench import stream as load_test
from megatron_rl.types import Mesh, Tokens


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory):
    with ray_session(ClusterConfig(), num_trainers=1, logs=tmp_path_factory.mktemp("logs")):
        yield


@given(st.lists(st.integers(0, 3 * LEAST_BYTES)), st.integers(1, 40))
def test_samples_share_an_object_only_if_they_are_too_small_for_their_own(sizes, most):
    plan = plan_objects(sizes, most)
    assert [sample for own in plan for sample in own] == list(range(len(sizes))) and len(plan) <= most
    held = [sum(sizes[sample] for sample in own) for own in plan]
    assert all(size >= LEAST_BYTES for size in held) or (len(plan) == 1 and sum(sizes) < LEAST_BYTES)
    if most >= len(sizes):
        assert all(sum(sizes[i] for i in own[:-1]) < LEAST_BYTES for own in plan[:-1]), "as few samples as fill it"


def tokens(number: int, length: int, has_routes: bool = False) -> Tokens:
    ids = np.full(length, number, np.int32)
    routes = np.full((length - 1, 1, 1), number, np.uint8) if has_routes and number != 2 else None
    return Tokens(ids, ids > 0, ids.astype(np.float32), ids, routes)


def test_what_an_engine_gives_stays_out_of_the_memory_of_the_driver():
    lengths = [6_000] * 5 + [20_000, 20]
    counts, objects = objects_of([tokens(i, length) for i, length in enumerate(lengths)], len(lengths), False)
    engine = ray.remote(num_cpus=0, num_returns=len(objects))(lambda given: tuple(given))
    held = {one.tokens.object for one in stored(counts, engine.remote(objects))}
    ray.wait(list(held), num_returns=len(held))
    nodes = [where["node_ids"] for where in get_object_locations(list(held)).values()]
    assert len(nodes) == 3 and all(nodes), "Ray has what is small nowhere but in the driver"


@ray.remote(num_cpus=0, resources={"that nobody has": 1})
def nothing() -> None:
    """Its result never comes."""


def test_a_sample_comes_without_the_others_of_its_group():
    """Of two long samples and two short ones, which share their objects. The second object never comes."""
    counts, objects = objects_of([tokens(i, length) for i, length in enumerate([20, 20_000, 20_000, 20])], 4, False)
    short, long, *others = stored(counts, [ray.put(objects[0]), nothing.remote()])
    assert [one.ids[0] for one in fetch([long, short])] == [1, 0]
    for other in others:
        with pytest.raises(GetTimeoutError):
            fetch([long, other], timeout_s=0.1)


@pytest.mark.parametrize("has_routes", [False, True])
def test_routes_come_only_to_those_who_ask_for_them(has_routes):
    """A sample at hand, as those of a journal, is among them. The engine told no routes of sample 2."""
    samples = [tokens(i, 3, has_routes) for i in (1, 2, 3)]
    counts, objects = objects_of(samples, 3, has_routes)
    assert len(objects) == num_objects(3, has_routes)
    first, *others = [ray.put(one) for one in objects]
    at_hand = tokens(7, 3, True)
    for with_routes in (False, True):
        held = others if with_routes else [nothing.remote() for _ in others]
        *group, other = fetch([*stored(counts, [first, *held]), at_hand], with_routes=with_routes)
        assert [one.ids[0] for one in group] == [1, 2, 3] and other is at_hand
        known = [None if one.routes is None else int(one.routes[0, 0, 0]) for one in group]
        assert known == ([1, None, 3] if with_routes and has_routes else [None] * 3)


def test_the_share_of_a_replica_is_stored_once_for_all_its_ranks():
    mesh = Mesh(tensor=2, data=2)
    held = RankGroup._of_replicas(SimpleNamespace(mesh=mesh), ["share 0", "share 1"])
    assert ray.get(held) == [f"share {mesh.coordinates(rank)[2]}" for rank in range(4)] and len(set(held)) == 2


@pytest.mark.deep
def test_the_load_test_of_the_driver_runs_and_its_replicas_fetch_less_than_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(load_test, "NUM_ENGINES", 1)
    monkeypatch.setattr(load_test, "NUM_RANK_PROCESSES", 2)
    write_task(tmp_path)
    found = load_test.measure(tmp_path, load_test.MODES, 100.0, 1.0, 64)
    assert found["rate"]["answers_per_s"] > 0
    step = found["step"]
    assert step["answers"] == 512 and 0.5 <= step["share_of_a_replica"] < 0.9, "two replicas"
    assert load_test.join(32)["ranks"] == 32
