"""States in the memory of other processes: whole ones alone are offered, and the two newest are kept."""

from __future__ import annotations

import numpy as np
import pytest
import ray
from patience import deadline
from ray.exceptions import RayActorError

from megatron_rl.cluster import mirror
from megatron_rl.cluster.mirror import MirrorHolder, Mirrors, fetch_state, send_state, whole_steps
from megatron_rl.cluster.session import ray_session
from megatron_rl.config.cluster import ClusterConfig


def state(rank: int, step: int, num_bytes: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).integers(0, 256, num_bytes, dtype=np.uint8)


@pytest.fixture
def holder(tmp_path, monkeypatch):
    """A holder in this process."""
    monkeypatch.setattr(mirror, "begin_process", lambda log, name: None)
    return MirrorHolder(str(tmp_path / "mirror.log"))


def test_a_state_that_is_not_complete_is_not_offered_and_replaces_nothing(holder):
    holder.put(0, 4, 0, 3, np.array([1, 2, 3], np.uint8))
    holder.put(0, 5, 0, 3, np.array([4, 5], np.uint8))
    assert holder.held() == [(0, 4)]
    holder.put(0, 5, 2, 3, np.array([6], np.uint8))
    assert sorted(holder.held()) == [(0, 4), (0, 5)]
    holder.put(0, 6, 0, 1, np.array([7], np.uint8))
    assert sorted(holder.held()) == [(0, 5), (0, 6)], "the two newest"
    assert holder.get(0, 5, 0)[1].tolist() == [4, 5, 6] and holder.get(0, 6, 0)[0] == 1
    holder.forget_after(5)
    assert holder.held() == [(0, 5)]


def test_only_steps_that_all_ranks_have_are_whole():
    offers = dict.fromkeys([(0, 4), (1, 4), (0, 5), (1, 5), (0, 6)])
    assert whole_steps(offers, 2) == [4, 5] and whole_steps(offers, 1) == [4, 5, 6] and whole_steps({}, 2) == []


def test_states_survive_the_death_of_a_holder(tmp_path, monkeypatch):
    """Two nodes that are one here, so that each rank has two holders; pieces are small, so that a state has many."""
    monkeypatch.setattr(mirror, "PIECE_BYTES", 1000)
    monkeypatch.setattr(mirror, "ANSWER_S", deadline(mirror.ANSWER_S))
    with ray_session(ClusterConfig(), num_trainers=1, logs=tmp_path):
        node = ray.get_runtime_context().get_node_id()
        mirrors = Mirrors(tmp_path, "trainer")
        assert [len(holders) for holders in mirrors.holders_of([node, node])] == [1, 1]
        first = mirrors._holders[node]
        second = mirrors._holders["another node"] = ray.remote(MirrorHolder).remote(str(tmp_path / "mirror_1.log"))
        both = {node: first, "another node": second}
        sent = {(rank, step): state(rank, step, 2500 + rank) for rank in (0, 1) for step in (7, 8)}
        for (rank, step), whole in sent.items():
            assert send_state(whole, rank, step, both) == []
        assert whole_steps(mirrors.offers(), 2) == [7, 8]

        ray.kill(first)
        with pytest.raises(RayActorError):  # the kill arrives while calls are still answered
            while True:
                ray.get(first.held.remote())
        assert send_state(state(0, 9, 10), 0, 9, both) == [node], "a dead holder is no error"
        offers = mirrors.offers()
        assert whole_steps(offers, 2) == [8]
        for rank in (0, 1):
            assert np.array_equal(fetch_state(rank, 8, offers[rank, 8]), sent[rank, 8])
        mirrors.forget_after(8)
        assert sorted(mirrors.offers()) == [(0, 8), (1, 7), (1, 8)]
        assert mirrors.holders_of([node])[0][node] is not first, "a holder that died is replaced"
