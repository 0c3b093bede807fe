"""Real trainer processes over gloo: one world after another.

A scenario is a function of scenarios.py, or of another module that its name begins with; it runs on `world_size` fresh
processes, which meet at a store of this process, as those of a run meet at the driver's.
"""

from __future__ import annotations

import importlib
import os

import warm
from patience import deadline

from megatron_rl.bridge.join import host_store


def run(scenario: str, world_size: int, **arguments) -> list:
    """What the scenario returned, by rank. The first rank that raises, dies or is late ends all, as the driver of a
    run would."""
    store = host_store("127.0.0.1")
    url = f"tcp://127.0.0.1:{store.port}"
    calls = [(scenario, rank, world_size, url, arguments) for rank in range(world_size)]
    return warm.together(_act, calls, deadline(180))


def _act(scenario: str, rank: int, world_size: int, url: str, arguments: dict):
    os.environ["OMP_NUM_THREADS"] = "1"
    module, _, function = scenario.rpartition(".")
    return getattr(importlib.import_module(module or "scenarios"), function)(rank, world_size, url, **arguments)
