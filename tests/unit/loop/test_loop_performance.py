"""Speed and utilisation of the updates by hand, and in the lines that the loop logs."""

from __future__ import annotations

import pytest
from small_ports import World, config, run

from megatron_rl.loop.performance import performance

PLANNED = {"balance/tokens": 3000.0, "balance/model_flops": 989e12}


def test_the_utilisation_is_that_of_all_ranks():
    """A second of one GPU's peak, done by four GPUs in half a second: half of what they could."""
    on_gpus = config(cluster={"gpus_per_trainer": 1}, policy={"parallel": {"tensor": 2, "data": 2}})
    assert performance(on_gpus, PLANNED, 0.5) == {"perf/tokens_per_s": 6000.0, "perf/mfu": pytest.approx(0.5)}


def test_a_cpu_has_a_speed_but_no_utilisation():
    assert performance(config(), PLANNED, 0.5) == {"perf/tokens_per_s": 6000.0}


def test_every_step_with_an_update_logs_its_speed(tmp_path):
    world = World(lambda group, i: float(i % 2) if world.updates != 1 else 1.0)
    run(world, tmp_path, config())
    assert ["perf/tokens_per_s" in metrics for _, metrics in world.logged] == ["loss" in m for _, m in world.logged]
    assert world.logged[0][1]["perf/tokens_per_s"] > 0
