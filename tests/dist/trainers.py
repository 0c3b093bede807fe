"""Real trainer processes over gloo: a pool that keeps its imports warm and runs one scenario after another.

A scenario is a function of scenarios.py; it runs on the first `world_size` processes, which meet on a fresh
port.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import time
import traceback


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
        """What the scenario returned, by rank. A rank that raises or is late ends the processes; the next
        call starts new ones."""
        if not self.processes:
            self.start()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            url = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        for pipe in self.pipes[:world_size]:
            pipe.send((scenario, world_size, url, arguments))
        end, results = time.monotonic() + deadline_s, []
        for rank, pipe in enumerate(self.pipes[:world_size]):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                self.close()
                raise TimeoutError(f"rank {rank} has not finished {scenario} after {deadline_s} s")
            try:
                results.append(pipe.recv())
            except EOFError:
                results.append((False, f"rank {rank} died"))
        failures = [result for ok, result in results if not ok]
        if failures:
            self.close()
            raise AssertionError(failures[0])
        return [result for _, result in results]

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
