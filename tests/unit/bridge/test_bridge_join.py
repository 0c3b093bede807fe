"""How a rank joins: what it does to the connections of its process, and how it ends when another rank is lost."""

from __future__ import annotations

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event, Thread

import pytest
import torch
from bridge_models import SHAPES

from megatron_rl.bridge import join, memory
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.layout import Engines
from megatron_rl.types import Mesh


def test_sockets_of_other_threads_may_come_and_go():
    """A number that was a socket's when it was listed may be a pipe's a moment later."""
    done = Event()

    def churn() -> None:
        while not done.is_set():
            for end in socket.socketpair():
                end.close()
            for descriptor in os.pipe():
                os.close(descriptor)

    threads = [Thread(target=churn) for _ in range(3)]
    open_before = set(os.listdir("/proc/self/fd"))
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            join._close_when_silent(set())
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert len(os.listdir("/proc/self/fd")) == len(open_before), "a copy of a descriptor was left open"


def test_only_new_connections_are_asked_for_silence():
    with socket.create_server(("127.0.0.1", 0)) as server:
        old = socket.create_connection(server.getsockname())
        before = join._sockets()
        new = socket.create_connection(server.getsockname())
        join._close_when_silent(before)
        with old, new:
            alive = [end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for end in (old, new)]
    assert alive == [0, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_wait_and_those_that_come_later_end_when_joining_is_given_up(rank):
    """With the next epoch they meet again. A deadline of ten minutes would end the test."""
    store = join.host_store("127.0.0.1")
    setup = BridgeSetup(SHAPES["qwen3"], Mesh(), False, Engines(), "float32", "127.0.0.1", store.port, timeout_s=600.0)
    cpu = torch.device("cpu")
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(join.Joining, setup, rank, cpu)
        join._part_of(store, setup).wait([f"rank/{rank}"])
        join.give_up(store, setup, "engine 0 died")
        for joining in (waiting, pool.submit(join.Joining, setup, 1 - rank, cpu)):
            with pytest.raises(RuntimeError, match="engine 0 died"):
                joining.result()
        again = replace(setup, epoch=1)
        for joining in [pool.submit(join.Joining, again, r, cpu) for r in (0, 1)]:
            joining.result()


def test_a_handle_of_cuda_memory_goes_through_torchs_own_rebuild(monkeypatch):
    """The driver alone is faked. The arguments are what torch 2.13's `reduce_tensor` gives for a tensor of a GPU."""
    buffers, asked = torch.arange(4 * memory.SLOTS, dtype=torch.uint8), []

    def driver(device, *handle):
        asked.append((device, handle))
        return buffers._typed_storage()

    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.TypedStorage, "_new_shared_cuda", staticmethod(driver))
    handle = (b"\x01" * 64, 64, 512, b"ref", 7, b"event", True)
    view = torch.Tensor, buffers.size(), buffers.stride(), 0
    text = memory._encode((*view, torch.TypedStorage, torch.uint8, 3, *handle[:3], False, *handle[3:]))
    slots = memory.opened(text, torch.device("cuda", 1))
    assert torch.equal(torch.cat(slots), buffers) and len(slots) == memory.SLOTS
    assert asked == [(1, handle)], "the device has another number in this process"
    assert json.loads(text), "a pickle from a store could run any code"
