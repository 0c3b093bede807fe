from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.algorithms.equality import all_equal, differ


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (0.1 + 0.2, 0.3, False),
        (float(np.float32(0.1) + np.float32(0.2)), 0.3, False),  # 4e-8 of it
        (0.3, 0.3000002, True),  # 7e-7 of it
        (1e9, 1e9 + 500, True),
        (1e9, 1e9 + 100, False),  # 1e-7 of it
        (0.1 + 0.2 - 0.3, 0.0, False),
        (0.0, 1e-9, True),
        (-1.0, 1.0, True),
        (float("nan"), 1.0, False),
    ],
)
def test_rewards_differ_by_more_than_two_roundings_of_float32(a, b, expected):
    assert differ(a, b) == differ(b, a) == expected
    assert differ(np.array([a, 0.0]), np.array([b, 0.0])).tolist() == [expected, False]


def test_all_rewards_of_a_group_are_equal():
    assert all_equal([]) and all_equal([0.5]) and all_equal([0.3, 0.1 + 0.2, 0.3])
    assert not all_equal([0.3, 0.3, 0.31])
