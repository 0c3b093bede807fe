from __future__ import annotations

import pytest
import torch

from megatron_rl.actor.moe.router import describe_load


def test_the_metrics_of_the_load():
    """Two layers of a stage, of a model that has four layers with experts."""
    load_RE = torch.tensor([[2, 0, 6, 0], [2, 2, 2, 2]])
    values = {name: metric.value.item() for name, metric in describe_load(load_RE, num_mixtures=4).items()}
    assert values == {
        "experts/load/max": 3.0,  # 6 tokens, where the mean is 2
        "experts/load_mean": pytest.approx((3 + 1) / 4),
        "experts/unused": pytest.approx(0.5 / 4),
    }
