"""Real trainer processes over gloo: a pool that keeps its imports warm and runs one scenario after another.

A scenario is a function of scenarios.py; it runs on the first `world_size` processes, which meet on a fresh
port.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import socket
import time
import traceback

import psutil

MAX_THREADS = 300
"""A model and its process groups are a cycle of some fifty threads, and not every one is collected: processes with more
are replaced, or the machine does little else than switch between them."""


class TrainerPool:
    def __init__(self, size: int):
        self.size = size
        self.pipes, self.processes = [], []

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, scenario: str, world_size: int, deadline_s: float = 180, **arguments) -> list:
        """What the scenario returned, by rank. The first rank that raises, dies or is late ends the
        processes, as the driver of a run would; the next call starts new ones."""
        if any(psutil.Process(process.pid).num_threads() > MAX_THREADS for process in self.processes):
            self.close()
        if not self.processes:
            self.start()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            url = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        for pipe in self.pipes[:world_size]:
            pipe.send((scenario, world_size, url, arguments))
        end, results = time.monotonic() + deadline_s, {}
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes[:world_size])}
        while waiting:
            ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                late = list(waiting.values())
                self.close()
                raise TimeoutError(f"ranks {late} have not finished {scenario} after {deadline_s} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    succeeded, results[rank] = pipe.recv()
                except EOFError:
                    succeeded, results[rank] = False, f"rank {rank} died"
                if not succeeded:
                    self.close()
                    raise AssertionError(results[rank])
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes, self.processes = [], []


def _serve(rank: int, pipe) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    scenarios = importlib.import_module("scenarios")
    while True:
        scenario, world_size, url, arguments = pipe.recv()
        try:
            pipe.send((True, getattr(scenarios, scenario)(rank, world_size, url, **arguments)))
        except Exception:  # reported to the test, which fails with it
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
        gc.collect()
