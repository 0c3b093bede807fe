"""Which rank is slow: the one whose own work takes longest, not one that waits."""

from __future__ import annotations

import pytest

from megatron_rl.algorithms.passes import STOPPED
from megatron_rl.cluster.policy import describe_update, slowest


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [([0.5], (0, 1.0)), ([1.0, 3.0], (1, 3.0)), ([2.0, 1.0, 5.0, 2.0], (2, 2.5)), ([1.0, 1.0, 1.0], (0, 1.0))],
)
def test_the_slowest_is_compared_with_the_median(seconds, expected):
    assert slowest(seconds) == expected


def test_an_update_that_is_stopped_has_no_norm_and_is_described():
    made = {"loss": 0.25, "ppo_kl": 0.0, "grad_norm": 1.5}
    assert describe_update(made, 1, 0) == "epoch 1, update 1: loss 0.25, gradient norm 1.5"
    stopped = {"loss": 0.25, "ppo_kl": 0.03, STOPPED: 1.0}
    assert describe_update(stopped, 0, 1) == "epoch 2, update 0: loss 0.25, not made: algorithm.stop_epochs, KL 0.03"
