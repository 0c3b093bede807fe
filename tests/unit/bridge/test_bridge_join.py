"""How a rank joins: what it does to the connections of its process."""

from __future__ import annotations

import os
import socket
from threading import Event, Thread

from megatron_rl.bridge import join


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
