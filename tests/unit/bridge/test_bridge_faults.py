"""Ranks in processes of their own that are killed or stopped: before, in and after a push."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import cover
import leaks
import pytest
import warm
from bridge_models import SHAPES, cut, hf_weights
from patience import deadline

from megatron_rl.bridge.join import host_store
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.layout import Engines
from megatron_rl.models import megatron_shards, vllm_shards
from megatron_rl.types import Mesh, ModelShape

SHAPE = SHAPES["qwen3"]
MESH, ENGINES = Mesh(pipeline=2), Engines(2)
TRAINERS, ENGINE_RANKS = [0, 1], [2, 3]
LARGE = replace(SHAPE, vocab_size=3 * 2**16, output="embedding")
"""Its embedding has 24 MiB, in messages of 16 and 8 MiB. 16 MiB is more than the sockets between two ranks hold."""


AT_MESSAGE = {0: "_content", 1: "_content", 2: "_complete", 3: "_complete"}
"""The method that a trainer calls for each of its messages, and an engine for each of its stretches."""


def serve(rank: int, shape: ModelShape, pipe) -> None:
    """One rank: it answers (method, arguments) with a result or the error's text."""
    import torch

    torch.set_num_threads(1)
    if shape == LARGE:
        from megatron_rl.layout import route_order

        route_order.NUM_BLOCKS = 1  # a route is one turn
    end = _Trainer(rank, shape) if rank in TRAINERS else _Engine(rank, shape)
    while True:
        method, *arguments = pipe.recv()
        try:
            pipe.send((True, getattr(end, method)(*arguments)))
        except RuntimeError as error:
            pipe.send((False, str(error)))


def strike(end, fault: tuple[str, int, int] | None) -> None:
    """When this method is called for the time with this number, the process sends itself this signal."""
    if fault is None:
        return
    name, number, sign = fault
    method, calls = getattr(end, name), []

    def struck(*arguments):
        calls.append(name)
        if len(calls) == number:
            os.kill(os.getpid(), sign)
        return method(*arguments)

    setattr(end, name, struck)


class _End:
    def first_stretch(self) -> list[int]:
        """The bytes of the messages of the first stretch."""
        return [message.num_bytes for message in self.end.stretches[0].messages]


class _Trainer(_End):
    def __init__(self, rank: int, shape: ModelShape) -> None:
        self.rank, self.shape = rank, shape
        self.live = cut(megatron_shards(shape, MESH, rank), hf_weights(shape, 0))

    def join(self, setup: BridgeSetup) -> None:
        from megatron_rl.bridge.sender import BridgeSender

        self.end = BridgeSender(setup, self.rank, self.live)

    def push(self, version: int, fault) -> None:
        strike(self.end._lines[0] if fault and fault[0] == "_wait" else self.end, fault)
        shards = megatron_shards(self.shape, MESH, self.rank)
        for name, value in cut(shards, hf_weights(self.shape, version)).items():
            self.live[name].copy_(value)
        self.end.push(version)


class _Engine(_End):
    def __init__(self, rank: int, shape: ModelShape) -> None:
        self.index, self.shape = rank - len(TRAINERS), shape
        self.live = cut(vllm_shards(shape, 1, 0), hf_weights(shape, 99))

    def join(self, setup: BridgeSetup) -> None:
        from megatron_rl.bridge.intake import Intake, Parameters

        self.end = Intake(setup, self.index, 0, Parameters(self.live), next(iter(self.live.values())).device)

    def push(self, version: int, fault) -> None:
        strike(self.end, fault)
        self.end.receive(version)

    def holds(self, version: int) -> bool:
        expected = cut(vllm_shards(self.shape, 1, 0), hf_weights(self.shape, version))
        return all((self.live[name] == value).all() for name, value in expected.items())


class Ranks:
    def __init__(self, shape: ModelShape) -> None:
        self.shape, self.store, self.epoch = shape, host_store("127.0.0.1"), 0
        self.processes, self.pipes = {}, {}

    def start(self, rank: int) -> None:
        context = warm.context()
        self.pipes[rank], theirs = context.Pipe()
        self.processes[rank] = context.Process(target=serve, args=(rank, self.shape, theirs), daemon=True)
        with leaks.lasting("module"):
            self.processes[rank].start()
        theirs.close()

    def join(self, timeout_s: float = deadline(300), bucket_bytes: int = 5000, share_memory: bool = True) -> None:
        """All join again; a process takes the place of each that is gone. Nobody can wait for the default deadline:
        `result` gives up long before."""
        for rank in [*TRAINERS, *ENGINE_RANKS]:
            if rank not in self.processes or not self.processes[rank].is_alive():
                self.start(rank)
        setup = BridgeSetup(self.shape, MESH, False, ENGINES, "float32", "127.0.0.1", self.store.port, self.epoch)
        self.epoch += 1
        setup = replace(setup, bucket_bytes=bucket_bytes, timeout_s=timeout_s, share_memory=share_memory)
        for rank in self.pipes:
            self.pipes[rank].send(("join", setup))
        assert all(self.result(rank)[0] for rank in self.pipes)

    def push(self, version: int, faults: dict | None = None) -> None:
        self.push_of([rank for rank in self.pipes if self.processes[rank].is_alive()], version, faults or {})

    def push_of(self, some: list[int], version: int, faults: dict) -> None:
        """Start the part of a push that these ranks have."""
        for rank in some:
            self.pipes[rank].send(("push", version, faults.get(rank)))

    def wait_until_stopped(self, rank: int) -> None:
        end, stat = time.monotonic() + deadline(90), Path(f"/proc/{self.processes[rank].pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < end, f"rank {rank} does not stop"

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].join()

    def close(self) -> None:
        for rank in self.processes:
            self.kill(rank)
        self.store = None  # it serves as long as something refers to it

    def result(self, rank: int):
        """(succeeded, result or error); None: the process is gone."""
        assert self.pipes[rank].poll(deadline(90)), f"rank {rank} hangs"
        try:
            return self.pipes[rank].recv()
        except EOFError:
            self.processes[rank].join()
            return None

    def push_whole(self, version: int) -> None:
        self.push(version)
        assert [self.result(rank) for rank in self.pipes] == [(True, None)] * 4
        for rank in ENGINE_RANKS:
            self.pipes[rank].send(("holds", version))
            assert self.result(rank) == (True, True)


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(SHAPE)
    yield ranks
    ranks.close()


@pytest.fixture
def large_ranks():
    ranks = Ranks(LARGE)
    yield ranks
    ranks.close()


KILLED = [(victim, way) for victim in ("engine rank 0", "trainer rank 1") for way in ("shared memory", "gloo")]


@pytest.mark.parametrize(
    ("name", "way"), cover.essential(KILLED, ("engine rank 0", "shared memory"), ("trainer rank 1", "gloo"))
)
def test_a_rank_killed_in_a_push_ends_it_at_once_and_a_new_one_takes_its_place(ranks, name, way):
    """At its third message. Who speaks with it names it; the others end with that one, long before the deadline."""
    victim, share_memory = {"engine rank 0": 2, "trainer rank 1": 1}[name], way == "shared memory"
    ranks.join(share_memory=share_memory)
    ranks.push_whole(1)
    ranks.push(2, {victim: (AT_MESSAGE[victim], 3, signal.SIGKILL)})
    results = {rank: ranks.result(rank) for rank in ranks.pipes}
    assert results.pop(victim) is None
    others = TRAINERS if victim in ENGINE_RANKS else ENGINE_RANKS
    told = [results.pop(rank) for rank in others]
    assert not any(succeeded for succeeded, _ in told)
    assert any(f"{name} has died" in text for _, text in told), told  # the other may see the first one's end before
    for succeeded, text in [*told, *results.values()]:  # the victim's neighbour may have been done
        assert succeeded or "has died" in text, text
    ranks.join(share_memory=share_memory)
    ranks.push_whole(2)


@pytest.mark.parametrize("victim", cover.essential(["trainer", "engine"], "trainer"))
def test_a_rank_killed_in_the_middle_of_a_content_ends_the_push_at_once(large_ranks, victim):
    """Engine rank 0 stands still, so that trainer rank 0 stands in the first part of the embedding, and is about to
    wait for the acknowledgement. The engine waits for the headers, which are behind the other part."""
    ranks, trainer, engine = large_ranks, 0, 2
    victim = {"trainer": trainer, "engine": engine}[victim]
    ranks.join(bucket_bytes=2**24, share_memory=False)
    for rank in (trainer, engine):
        ranks.pipes[rank].send(("first_stretch",))
        succeeded, sizes = ranks.result(rank)
        assert succeeded and 2**24 in sizes[:-1]
    ranks.push_of(ENGINE_RANKS, 1, {engine: ("_complete", 1, signal.SIGSTOP)})
    ranks.wait_until_stopped(engine)
    ranks.push_of(TRAINERS, 1, {trainer: ("_wait", 1, signal.SIGSTOP)})
    ranks.wait_until_stopped(trainer)
    ranks.kill(victim)
    other = trainer if victim == engine else engine
    os.kill(ranks.processes[other].pid, signal.SIGCONT)
    results = {rank: ranks.result(rank) for rank in ranks.pipes}
    assert results.pop(victim) is None
    assert "rank 0 has died" in results.pop(other)[1]
    for succeeded, text in results.values():  # they may have been done
        assert succeeded or "has died" in text, text


@pytest.mark.parametrize("when", cover.essential(["before", "after"], "after"))
def test_an_engine_killed_between_pushes_ends_the_next_one(ranks, when):
    """Before its first push, or after one that was whole: that one stands."""
    ranks.join()
    if when == "after":
        ranks.push_whole(3)
    ranks.kill(3)
    ranks.push(4)
    told = [ranks.result(rank) for rank in TRAINERS]
    assert not any(succeeded for succeeded, _ in told)
    assert any("engine rank 1 has died" in text for _, text in told), told
    ranks.result(2)  # it may have been done
    ranks.join()
    ranks.push_whole(4)


@pytest.mark.parametrize("stopped", cover.essential(["engine", "trainer"], "engine"))
def test_a_rank_that_stands_still_ends_the_push_at_its_deadline(ranks, stopped):
    """Nobody waits longer; the one that wakes up later finds its lines closed."""
    stopped = {"engine": 2, "trainer": 0}[stopped]
    ranks.join(timeout_s=deadline(2))
    ranks.push_whole(5)
    ranks.push(6, {stopped: (AT_MESSAGE[stopped], 2, signal.SIGSTOP)})
    others = [rank for rank in ranks.pipes if rank != stopped]
    results = {rank: ranks.result(rank) for rank in others}
    speakers = TRAINERS if stopped in ENGINE_RANKS else ENGINE_RANKS
    assert all("has died, or is silent past the deadline" in str(results[rank][1]) for rank in speakers)
    os.kill(ranks.processes[stopped].pid, signal.SIGCONT)
    succeeded, text = ranks.result(stopped)
    assert not succeeded and "has died, or is silent" in text
    ranks.join()
    ranks.push_whole(6)
