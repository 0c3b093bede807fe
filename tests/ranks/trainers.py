"""Real trainer processes over gloo: one world after another.

A scenario is a function of scenarios.py, or of another module that its name begins with. The processes meet at a store
of this process, as those of a run meet at the driver's.
"""

from __future__ import annotations

import importlib
import os

import ranks
import warm
from patience import deadline

from megatron_rl.bridge.join import host_store


def run(scenario: str, world_size: int, fresh: bool = False, **arguments) -> list:
    """What the scenario returned, by rank. The first rank that raises, dies or is late ends all, as the driver of a
    run would.

    Args:
        fresh: in processes that end with it, because it dies or changes them, instead of those that live.
    """
    store = host_store("127.0.0.1")
    url = f"tcp://127.0.0.1:{store.port}"
    calls = [(scenario, rank, world_size, url, arguments) for rank in range(world_size)]
    return (warm if fresh else ranks).together(_act, calls, deadline(180))


def _act(scenario: str, rank: int, world_size: int, url: str, arguments: dict):
    os.environ["OMP_NUM_THREADS"] = "1"
    module, _, function = scenario.rpartition(".")
    return getattr(importlib.import_module(module or "scenarios"), function)(rank, world_size, url, **arguments)
