"""Real trainer processes over gloo: one world after another, each of fresh processes that have their imports done.

A scenario is a function of scenarios.py; it runs on `world_size` processes, which meet on a fresh port.
"""

from __future__ import annotations

import importlib
import multiprocessing.connection
import os
import socket
import time
import traceback

import warm
from patience import deadline


def run(scenario: str, world_size: int, **arguments) -> list:
    """What the scenario returned, by rank. The first rank that raises, dies or is late ends all, as the driver of a
    run would."""
    context, limit_s = warm.context(), deadline(180)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    processes, waiting, results = [], {}, {}
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            given = (theirs, scenario, rank, world_size, url, arguments)
            processes.append(context.Process(target=_run, args=given, daemon=True))
            processes[-1].start()
            theirs.close()
            waiting[ours] = rank
        end = time.monotonic() + limit_s
        while waiting:
            ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {[*waiting.values()]} have not finished {scenario} after {limit_s:.0f} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    succeeded, results[rank] = pipe.recv()
                except EOFError:
                    succeeded, results[rank] = False, f"rank {rank} died"
                if not succeeded:
                    raise AssertionError(results[rank])
        return [results[rank] for rank in range(world_size)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(pipe, scenario: str, rank: int, world_size: int, url: str, arguments: dict) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    try:
        function = getattr(importlib.import_module("scenarios"), scenario)
        pipe.send((True, function(rank, world_size, url, **arguments)))
    except Exception:  # reported to the test, which fails with it
        pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
    pipe.poll(None)  # tensors travel as shared memory, which lives as long as this process
