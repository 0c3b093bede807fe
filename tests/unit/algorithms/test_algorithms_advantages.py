from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms import estimate_advantages
from megatron_rl.algorithms.advantages import grpo
from megatron_rl.config.advantages import GrpoAdvantage
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.types import Batch, Group, Prompt, Sample

NAN = float("nan")


def batch_of(*groups: list[float | None]) -> Batch:
    prompt = Prompt("p", (1,), "p")
    return Batch.from_groups(
        [
            Group(prompt, [Sample(3, 1, 2, 0, "stop", reward=r) for r in rewards], payload=None, version=0)
            for rewards in groups
        ]
    )


def test_golden_with_and_without_the_standard_deviation():
    rewards, group_of = np.array([1.0, 0, 0, 0, 2, 4]), np.array([0, 0, 0, 0, 1, 1])
    root = 2**0.5  # the sample standard deviation of 2 and 4
    expected = [1.5, -0.5, -0.5, -0.5, -1 / root, 1 / root]
    # The 1e-6 that is added to a deviation of .5.
    np.testing.assert_allclose(grpo(rewards, group_of, "group"), expected, rtol=3e-6)
    assert grpo(rewards, group_of, "none").tolist() == [0.75, -0.25, -0.25, -0.25, -1, 1]


def test_abstentions_leave_the_statistics_and_the_step():
    batch = batch_of([1.0, None, 0.0], [None, None])
    metrics = estimate_advantages(batch, AlgorithmConfig(adv_estimator=GrpoAdvantage(std="none")))
    assert batch.advantages.tolist() == [0.5, 0, -0.5, 0, 0]
    assert batch.active.tolist() == [True, False, True, False, False]
    assert metrics == {
        "reward/mean": 0.5,
        "reward/std": pytest.approx(0.5**0.5),
        "groups/zero_signal": 0,
        "samples/abstained": 3,
        "samples/active": 2,
    }


@pytest.mark.parametrize("std", ["group", "none"])
def test_no_signal_is_exactly_zero(std):
    # 0.1 + 0.1 + 0.1 over 3 is not 0.1 in floating point.
    rewards, group_of = np.array([0.1, 0.1, 0.1, 7.0, 3.0, NAN]), np.array([0, 0, 0, 1, 2, 2])
    assert grpo(rewards, group_of, std).tolist() == [0] * 6


@pytest.mark.parametrize("drop", [True, False])
def test_zero_signal_groups_leave_when_asked(drop):
    batch = batch_of([1.0, 1.0], [1.0, 0.0], [0.0])
    metrics = estimate_advantages(batch, AlgorithmConfig(drop_zero_signal=drop))
    assert batch.active.tolist() == ([False, False, True, True, False] if drop else [True] * 5)
    assert metrics["groups/zero_signal"] == 2


def test_an_inactive_sample_stays_out_but_counts_in_the_baseline():
    batch = batch_of([1.0, 0.0])
    batch.active[0] = False
    estimate_advantages(batch, AlgorithmConfig(adv_estimator=GrpoAdvantage(std="none")))
    assert batch.active.tolist() == [False, True]
    assert batch.advantages[1] == -0.5


def test_nothing_scored():
    batch = batch_of([None, None])
    metrics = estimate_advantages(batch, AlgorithmConfig())
    assert np.isnan(metrics["reward/mean"]) and metrics["samples/active"] == 0


scores = st.one_of(st.none(), st.floats(-10, 10).map(lambda x: round(x, 3)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(scores, min_size=1, max_size=6), min_size=1, max_size=6))
def test_equals_a_loop_over_groups(groups):
    batch = batch_of(*groups)
    estimate_advantages(batch, AlgorithmConfig())
    expected = []
    for rewards in groups:
        scored = [r for r in rewards if r is not None]
        for reward in rewards:
            if reward is None or len(set(scored)) < 2:
                expected.append(0.0)
            else:
                expected.append((reward - statistics.mean(scored)) / (statistics.stdev(scored) + 1e-6))
    # Rewards are multiples of 1e-3 up to 10: the mean's rounding of 1e-15 over a deviation of 4e-4 at least.
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-9, atol=1e-9)
