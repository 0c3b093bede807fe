"""Who goes on after a push, and who joins again when an engine is lost."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import ray
from patience import deadline
from ray.exceptions import RayActorError, RayTaskError
from small_models import model

from megatron_rl.cluster.bridge import RayBridge, who_goes_on
from megatron_rl.cluster.process import Process, locate
from megatron_rl.cluster.session import ray_session
from megatron_rl.cluster.waiting import settle
from megatron_rl.config.cluster import ClusterConfig
from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.ports import PolicyLost
from megatron_rl.types import Mesh

SENT = [{"bytes": 1.0}, {"bytes": 1.0}]
SAME = [{"model.norm": "12"}, {"model.norm": "34"}]
OTHER = [{"model.norm": "12"}, {"model.norm": "56"}]
REFUSED = RayTaskError("take", "", RuntimeError("holds something else"))


def test_all_engines_go_on_when_they_agree():
    assert who_goes_on([SAME, SAME, SAME], SENT) == ([0, 1, 2], None)


def test_those_that_live_go_on_without_the_dead():
    assert who_goes_on([SAME, RayActorError(), SAME], SENT) == ([0, 2], None)
    assert who_goes_on([SAME, SAME], [SENT[0], RayActorError()]) == ([0, 1], None)


def test_none_goes_on_when_one_refuses():
    assert who_goes_on([SAME, REFUSED, SAME], SENT) == ([], None)
    assert who_goes_on([SAME, SAME], [SENT[0], REFUSED]) == ([], None)
    assert who_goes_on([RayActorError()], SENT) == ([], None)


def test_engines_that_hold_different_weights_are_told_so():
    took, dispute = who_goes_on([RayActorError(), SAME, OTHER], SENT)
    assert took == [1, 2]
    assert (
        dispute == "after the same push rank 1 of engine 1 and rank 1 of engine 2 hold different weights of model.norm"
    )


class Group:
    """In the place of the trainer or of the engines: one process, without a model. An engine is restarted if it has
    died."""

    mesh, fused_norms, num_replaced = Mesh(), False, 0

    def __init__(self, name: str, logs, dies_in: tuple[int, ...] = ()) -> None:
        self._name, self._logs, self._dies_in = name, logs, dies_in
        self.processes = [self._new()]

    @property
    def ranks(self) -> list:
        return [process.actor for process in self.processes]

    engines = ranks

    def _new(self) -> Process:
        class Rank:  # local, so that Ray sends its code
            def __init__(self, dies_in):
                self.dies_in, self.joined = dies_in, []

            def locate(self):
                return locate()

            def record_loading(self, shape):
                return ()

            def connect(self, setup, index=None):
                number = setup.epoch if index is None else setup["epoch"]
                if number in self.dies_in:
                    os._exit(1)
                self.joined.append(number)

            def all_joined(self):
                return self.joined

            def ready(self):
                pass

            def take(self, version, verify):
                return SAME

            def commit(self, version, dispute):
                return {"paused_s": 0.0, "preempted": 0.0}

            def push(self, version, verify, late):
                return {"bytes": 1.0, "seconds": 0.0}

        actor = ray.remote(Rank).options(num_cpus=0).remote(self._dies_in)
        return Process(self._name, self._logs / f"{self._name}.log", actor)

    def before(self, phase: str = "generating") -> None:
        """A rank of the trainer dies when the engines take its memory."""
        if phase == "generating":
            raise PolicyLost("trainer rank 0 died")

    def replace_dead(self) -> None:
        if isinstance(settle([self.ranks[0].locate.remote()], deadline(60))[0], RayActorError):
            self.processes = [self._new()]


@pytest.mark.deep
def test_an_engine_that_is_lost_in_a_joining_is_replaced_and_all_join_once_more(tmp_path):
    """The joining at the start has the number 0. A trainer rank that is lost when the engines take its memory is lost
    in the push: later the loop would wait for groups that nobody was asked for."""
    config = validate(
        GrpoRunConfig,
        {
            "run": {"name": "x", "steps": 1},
            "model": {"path": "nowhere"},
            "data": {"train": "rows"},
            "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_prompt_tokens": 8}
            | {"max_response_tokens": 8},
            "balance": {"max_tokens_per_microbatch": 16},
        },
    )
    spec = SimpleNamespace(shape=model("qwen3", 2, 32, 4, 2, 16, 64, 40, 128))
    with ray_session(ClusterConfig(), num_trainers=1, logs=tmp_path):
        policy, engines = Group("trainer rank 0", tmp_path), Group("engine 0", tmp_path, dies_in=(1, 3, 4))
        bridge = RayBridge(config, spec, policy, engines, tmp_path)
        bridge.rejoin()
        joined = [group.ranks[0].all_joined.remote() for group in (policy, engines)]
        assert ray.get(joined) == [[0, 1, 2], [2]]
        with pytest.raises(PolicyLost, match="trainer rank 0 died"):
            bridge.push(version=1)
        with pytest.raises(PolicyLost, match="engine 0 .*died"):
            bridge.rejoin()
        assert ray.get(policy.ranks[0].all_joined.remote()) == [0, 1, 2, 3, 4]
