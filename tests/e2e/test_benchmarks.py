"""Benchmarks whose commands stand on a page run in their smallest sizes, and compute what they say."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pages import ROOT
from patience import deadline


def numbers(name: str, *options: str) -> dict:
    command = [sys.executable, str(ROOT / "tools" / "bench" / f"{name}.py"), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline(180), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.deep
def test_rollouts_of_static_and_continuous_batches():
    """Both answer the same in each step, so their rates are as their seconds; a static batch wastes slots."""
    found = numbers("rollout", "--steps", "1", "--modes", "static", "continuous", "--trainer-seconds", "0.1")
    static, continuous = (found["modes"][name] for name in ("static", "continuous"))
    tokens = [one["tokens_per_s"] * one["seconds_per_step"] for one in (static, continuous)]
    assert tokens[0] == pytest.approx(tokens[1], rel=1e-6)
    assert 0 < static["occupancy"] < continuous["occupancy"] <= 1


@pytest.mark.deep
def test_a_stream_of_stubs_carries_a_step_of_32_gpus():
    """8 answers a GPU, whose tokens each data-parallel replica fetches once."""
    found = numbers("stream", "--modes", "rate", "step", "--rate", "100", "--seconds", "1", "--gpus", "32")
    assert found["rate"]["answers_per_s"] > 50
    step = found["step"]
    assert step["answers"] == 256 and step["fetched_gb_of_all_replicas"] >= step["stored_gb"] > 0
