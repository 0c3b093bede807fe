"""Engines as real Ray actors, whose answers follow a script: groups come as they finish, whatever dies, with their
tokens in Ray's store."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from leaks import lasting
from patience import deadline
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from megatron_rl.cluster.engines import EngineGroup, EngineRank
from megatron_rl.cluster.payloads import StoredTokens, fetch, num_objects, objects_of
from megatron_rl.cluster.restarts import Restarts
from megatron_rl.cluster.session import ray_session
from megatron_rl.cluster.waiting import pieces
from megatron_rl.config.cluster import ClusterConfig
from megatron_rl.types import Prompt, Sample, Tokens

ROWS = [Prompt(f"row {i}", (i,), "") for i in range(5)]


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory):
    with ray_session(ClusterConfig(), num_trainers=1, logs=tmp_path_factory.mktemp("logs")):
        yield


def source_class() -> type:
    class Source:  # local, so that Ray sends its code
        async def ready(self):
            pass

        async def give(self, num_pieces: int, end_at: tuple[int, int], ending: str):
            """Pieces of two objects and a number."""
            for i in range(num_pieces):
                for j in range(3):
                    if (i, j) == end_at:
                        if ending == "it raises":
                            raise ValueError("wrong")
                        if ending == "it hangs":
                            await asyncio.Event().wait()
                        os._exit(1)
                    yield i if j == 2 else np.full(2**17, i)

    import asyncio

    return Source


@pytest.fixture(scope="module")
def source(store):
    actor = ray.remote(source_class()).options(num_cpus=0).remote()
    ray.get(actor.ready.remote())
    return actor


def given(calls, limit_s: float) -> tuple[dict[int, list], dict[int, RayError]]:
    """The whole pieces of each call, and the errors."""
    every = list(pieces(calls, 3, limit_s))
    whole = {key: [piece for k, piece in every if k == key and not isinstance(piece, RayError)] for key in calls}
    return whole, {key: piece for key, piece in every if isinstance(piece, RayError)}


def asked(actor, end_at: tuple[int, int] | None = None, ending: str = ""):
    return actor.give.options(num_returns="streaming").remote(3, end_at, ending)


@pytest.mark.parametrize("place", range(3))
def test_whole_pieces_come_before_the_error_that_ends_a_call(source, place):
    calls = {7: asked(source, (2, place), "it raises"), 8: asked(source)}
    whole, errors = given(calls, deadline(60.0))
    assert [piece[2] for piece in whole[7]] == [0, 1] and [piece[2] for piece in whole[8]] == [0, 1, 2]
    assert [int(ray.get(reference)[0]) for piece in whole[8] for reference in piece[:2]] == [0, 0, 1, 1, 2, 2]
    assert list(errors) == [7] and isinstance(errors[7], RayTaskError) and isinstance(errors[7].cause, ValueError)


def test_a_call_that_is_late_or_dead_has_an_error_as_its_last_piece(source):
    dying = ray.remote(source_class()).options(num_cpus=0).remote()
    ray.get(dying.ready.remote())
    whole, errors = given({7: asked(dying, (2, 1), "it dies"), 8: asked(source)}, deadline(60.0))
    assert len(whole[8]) == 3 and isinstance(errors[7], ActorDiedError) and len(errors) == 1
    numbers = [piece[2] for piece in whole[7]]
    assert numbers == list(range(len(numbers))) and len(numbers) <= 2, "the last ones may be lost with the process"
    whole, errors = given({7: asked(source, (0, 1), "it hangs")}, 0.5)
    assert not whole[7] and isinstance(errors[7], GetTimeoutError)


def rank_class() -> type:
    class Scripted:
        """Finishes its prompts in the opposite order. If there is a file `die`, an engine takes it away before
        row 2, and dies when the driver has its first group."""

        def __init__(self, folder):
            self.folder, self.alive = folder, True

        async def generate_as_finished(self, prompts, num_samples, version, seed, purpose, first):
            for number in reversed(range(len(prompts))):
                if prompts[number].uid == "row 2" and (self.folder / "die").exists():
                    (self.folder / "die").unlink()
                    while not (self.folder / "given").exists():
                        await asyncio.sleep(0.01)
                    os._exit(1)
                if prompts[number].uid == "too long":
                    raise ValueError("prompt too long does not fit")
                ids = np.array([*prompts[number].token_ids, seed + first + number], np.int32)
                routes = np.full((1, 1, 1), number, np.uint8)
                tokens = Tokens(ids, ids > 0, ids.astype(np.float32), ids, routes)
                sample = Sample(2, 1, 1, 0, "stop", oldest_version=version)
                yield number, [(sample, tokens)] * num_samples

    import asyncio

    class Rank(EngineRank):  # both are local, so that Ray sends their code
        def __init__(self, config, folder):
            self.config, self.engine = config, Scripted(folder)

        async def start(self):
            pass

    return Rank


class ScriptedGroup(EngineGroup):
    def _new(self, index):
        self.record_of[index] = ""
        rank = ray.remote(rank_class()).options(num_cpus=0, max_concurrency=100)
        return rank.remote(self._config, self._logs.parent)


class AnyPlace:
    def start_again(self, role, processes, create, timeout_s):
        for index, process in processes.items():
            process.actor = create(index)


@pytest.fixture(scope="module")
def engines(store, tmp_path_factory):
    limits = SimpleNamespace(step_timeout_s=deadline(60.0), start_timeout_s=deadline(60.0))
    config = SimpleNamespace(
        cluster=limits,
        policy=SimpleNamespace(routing_replay=True),
        rollout=SimpleNamespace(num_engines=2),
    )
    folder = tmp_path_factory.mktemp("engines")
    group = ScriptedGroup(config, folder / "logs", AnyPlace(), Restarts(1), loads_weights=True)
    assert ray.get([engine.alive.remote() for engine in group.engines]) == [True, True]
    return group


def test_groups_come_as_they_finish_and_are_returned_in_the_order_of_the_prompts(engines):
    finished = []
    groups = engines.generate(ROWS, 2, 0, 100, finished.append)
    assert [group.prompt for group in groups] == ROWS
    assert sorted(map(id, finished)) == sorted(map(id, groups)), "they are the same objects, each once"
    numbers = [group.prompt.token_ids[0] for group in finished]
    assert [n for n in numbers if n < 2] == [1, 0] and [n for n in numbers if n >= 2] == [4, 3, 2]
    ids = [[tokens.ids.tolist() for tokens in engines.tokens(group)] for group in groups]
    assert ids == [[[i, 100 + i]] * 2 for i in range(5)], "the numbers of the prompts seed the answers"
    assert all(tokens.routes is None for group in groups for tokens in engines.tokens(group))
    routes = [[tokens.routes.item() for tokens in engines.tokens(group, with_routes=True)] for group in groups]
    assert routes == [[0, 0], [1, 1], [0, 0], [1, 1], [2, 2]], "the numbers of the prompts in their engine's part"


def test_what_the_engine_refuses_is_told(engines):
    with pytest.raises(ValueError, match="engine 1: prompt too long does not fit"):
        engines.generate([*ROWS, Prompt("too long", (1,), "")], 1, 0, 0, lambda group: None)
    assert engines.num_replaced == 0


def test_the_groups_that_a_dead_engine_has_given_are_given_again(engines):
    folder, finished = engines._logs.parent, []

    def note(group):
        finished.append(group)
        if group.prompt is ROWS[4]:
            (folder / "given").touch()

    (folder / "die").touch()
    with lasting("module"):
        groups = engines.generate(ROWS, 2, 0, 100, note)
    assert engines.num_replaced == 1 and not (folder / "die").exists()
    assert [group.prompt for group in groups] == ROWS
    lost = [group.prompt for group in finished if not any(group is one for one in groups)]
    assert len(finished) == 5 + len(lost) and lost in (ROWS[4:], ROWS[4:2:-1])
    assert [engines.tokens(group)[1].ids.tolist() for group in groups] == [[i, 100 + i] for i in range(5)]


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
