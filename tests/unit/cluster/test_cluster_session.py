"""How the driver waits on real Ray processes: the first failure ends the wait, under its own type and with a name."""

from __future__ import annotations

import os
import threading

import pytest
import ray

from megatron_rl.cluster.session import gather, ray_session
from megatron_rl.config.schema import ClusterConfig


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    class Rank:  # local, so that Ray sends its code
        def answer(self, value):
            return value

        def refuse(self):
            raise ValueError("the disk is full")

        def refuse_bytes(self):
            bytes([255]).decode()

        def die(self):
            os._exit(1)

        def wait_for_ever(self):
            threading.Event().wait()

    with ray_session(ClusterConfig(), num_trainers=1, logs=tmp_path_factory.mktemp("run") / "logs"):
        yield lambda count: [ray.remote(Rank).options(num_cpus=0).remote() for _ in range(count)]
    assert not ray.is_initialized()


def test_results_come_in_the_order_of_the_calls(ranks):
    assert gather([rank.answer.remote(i) for i, rank in enumerate(ranks(2))], ["a", "b"]) == [0, 1]


def test_a_refusal_keeps_its_type_and_does_not_wait_for_the_others(ranks):
    first, second = ranks(2)
    with pytest.raises(ValueError, match="^rank 1: the disk is full$"):
        gather([first.wait_for_ever.remote(), second.refuse.remote()], ["rank 0", "rank 1"])


def test_a_subclass_with_other_arguments_is_told_too(ranks):
    with pytest.raises(ValueError, match="^rank 0: 'utf-8' codec can't decode byte 0xff"):
        gather([ranks(1)[0].refuse_bytes.remote()], ["rank 0"])


def test_a_death_is_named_and_does_not_wait_for_the_others(ranks):
    first, second = ranks(2)
    with pytest.raises(RuntimeError, match="^rank 1 died: .*; its output is in the run's logs folder$"):
        gather([first.wait_for_ever.remote(), second.die.remote()], ["rank 0", "rank 1"])
