"""Which rank is slow: the one whose own work takes longest, not one that waits."""

from __future__ import annotations

import pytest

from megatron_rl.cluster.policy import slowest


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [([0.5], (0, 1.0)), ([1.0, 3.0], (1, 3.0)), ([2.0, 1.0, 5.0, 2.0], (2, 2.5)), ([1.0, 1.0, 1.0], (0, 1.0))],
)
def test_the_slowest_is_compared_with_the_median(seconds, expected):
    assert slowest(seconds) == expected
