"""`megatron-rl generate` refuses what needs trainers."""

from __future__ import annotations

import pytest
from leaks import lasting

from megatron_rl.commands.generate import generate
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import GrpoRunConfig


def test_values_by_the_trainer_are_refused_before_an_engine_starts(tmp_path):
    words = ["configs/run/process_rewards_tiny_cpu.yaml", "rollout.prefix_values.by=trainer"]
    # Ray, when it is imported, sets variables.
    with lasting("session"), pytest.raises(ValueError, match="there are no trainers here; set it to engine"):
        generate(load_config(GrpoRunConfig, words), tmp_path, interrupt=None)
    assert not list(tmp_path.iterdir())
