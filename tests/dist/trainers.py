"""Real trainer processes over gloo: one world after another.

A scenario is a function of scenarios.py; it runs on `world_size` fresh processes, which meet in a file: a free port may be taken before rank 0 listens there.
"""

from __future__ import annotations

import importlib
import os
import tempfile

import warm
from patience import deadline


def run(scenario: str, world_size: int, **arguments) -> list:
    """What the scenario returned, by rank. The first rank that raises, dies or is late ends all, as the driver of a
    run would."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/store"
        calls = [(scenario, rank, world_size, url, arguments) for rank in range(world_size)]
        return warm.together(_act, calls, deadline(180))


def _act(scenario: str, rank: int, world_size: int, url: str, arguments: dict):
    os.environ["OMP_NUM_THREADS"] = "1"
    return getattr(importlib.import_module("scenarios"), scenario)(rank, world_size, url, **arguments)
