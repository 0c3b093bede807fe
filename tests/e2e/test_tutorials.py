"""The tutorials run as they are printed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[2] / "tutorials"


def test_a_policy_learns_by_hand(monkeypatch):
    spec = importlib.util.spec_from_file_location("by_hand", FOLDER / "01_one_step_by_hand.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "by_hand", module)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    try:
        rewards = module.main(num_steps=8)
    finally:
        torch.set_num_threads(threads)
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2, rewards
