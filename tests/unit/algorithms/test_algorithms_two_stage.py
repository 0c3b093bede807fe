"""Advantages of thoughts and of their items: by hand, then against loops."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import cover
import numpy as np
import pytest
from batches import batch_without_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms import estimate_advantages
from megatron_rl.algorithms.two_stage import stage_advantages, two_stage
from megatron_rl.config.advantages import TwoStageAdvantage
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.types import StepBatch

NAN = float("nan")
EPS = 1e-6  # what is added to every standard deviation


def scores_of(groups: list[list[list[float]]], lengths=None, item_tokens=None) -> StepBatch:
    """
    Args:
        groups: the rewards of each thought's items, by groups.
    """
    thoughts = [(g, thought) for g, group in enumerate(groups) for thought in group]
    rewards = np.array([reward for _, thought in thoughts for reward in thought], float)
    sizes = [len(thought) for _, thought in thoughts]
    return batch_without_tokens(
        group_of=np.repeat([g for g, _ in thoughts], sizes),
        lengths=np.array(lengths or [9] * len(rewards)),
        num_actions=np.full(len(rewards), 3),
        rewards=rewards,
        thought_of=np.repeat(np.arange(len(thoughts)), sizes),
        num_item_tokens=np.array(item_tokens or [3] * len(rewards)),
    )


def stages(groups, thought="mean", std="none") -> tuple[list[float], list[float]]:
    s = scores_of(groups)
    of_thoughts, of_items = stage_advantages(s.rewards, s.group_of, s.thought_of, thought, std)
    return of_thoughts.tolist(), of_items.tolist()


def test_golden_mean_and_max():
    groups = [[[1, 0], [0, 0]], [[3, 1], [2, 2], [0, 4]]]
    assert stages(groups) == ([0.25, -0.25, 0, 0, 0], [0.5, -0.5, 0, 0, 1, -1, 0, 0, -2, 2])
    assert stages(groups, "max") == ([0.5, -0.5, 0, -1, 1], [0.5, -0.5, 0, 0, 1, -1, 0, 0, -2, 2])


def test_golden_with_the_standard_deviation():
    of_thoughts, of_items = stages([[[1, 0], [0, 0]]], std="group")
    thought, item = 0.25 / (math.sqrt(0.125) + EPS), 0.5 / (math.sqrt(0.5) + EPS)
    assert of_thoughts == pytest.approx([thought, -thought], rel=1e-12)
    assert of_items == pytest.approx([item, -item, 0, 0], rel=1e-12)


def test_abstentions_are_left_out():
    groups = [[[NAN, 1, 0], [NAN, NAN, NAN], [0, 0, 0]]]
    assert stages(groups) == ([0.25, 0, -0.25], [0, 0.5, -0.5, 0, 0, 0, 0, 0, 0])
    assert stages(groups, "max") == ([0.5, 0, -0.5], [0, 0.5, -0.5, 0, 0, 0, 0, 0, 0])


def test_golden_places_of_the_rewards():
    """Samples of 9, 9, 8 and 8 tokens, of which the last three are items; the third thought has no item."""
    scores = scores_of([[[1, 0], [0, 0], [0]]], lengths=[9, 9, 8, 8, 6], item_tokens=[3, 3, 3, 3, 0])
    rewards = two_stage(scores, TwoStageAdvantage(thought="max", std="none"))
    found = {(int(s), int(p)): v for s, p, v in zip(rewards.sample, rewards.position, rewards.value, strict=True)}
    assert found == pytest.approx({
        (0, 8): 0.5, (1, 8): -0.5,  # the items of the first thought
        (0, 5): 2 / 3 - 0.5, (2, 4): -1 / 3, (4, 5): -1 / 3,  # with what follows, the thoughts' 2/3, -1/3, -1/3
    })  # fmt: skip


def test_equal_worths_have_no_signal_whatever_the_order():
    """0.1 + 0.2 + 0.3 depends on the order, by rounding."""
    groups = [[[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]], [[1, 1], [1, 1]]]
    assert stages(groups, std="group")[0] == [0, 0, 0, 0]
    credit, metrics = estimate_advantages(scores_of(groups), AlgorithmConfig(adv_estimator=TwoStageAdvantage()))
    assert credit.active.tolist() == [True] * 6 + [False] * 4, "the items of the first group differ"
    assert metrics["groups/zero_signal"] == 1 and (credit.advantages == 0).all()


def test_what_it_needs_is_named():
    scores = scores_of([[[1, 0]]])
    bare = replace(scores, thought_of=None, num_item_tokens=None)
    with pytest.raises(ValueError, match="two_stage.*thought_of and no num_item"):
        estimate_advantages(bare, AlgorithmConfig(adv_estimator=TwoStageAdvantage()))


def slow(values: list[float], std: str) -> list[float]:
    """Each value against the others, NaN left out, by loops."""
    known = [v for v in values if not math.isnan(v)]
    if len(set(known)) < 2:
        return [0.0] * len(values)
    scale = statistics.stdev(known) + EPS if std == "group" else 1.0
    return [0.0 if math.isnan(v) else (v - statistics.mean(known)) / scale for v in values]


rewards = st.one_of(st.just(NAN), st.floats(-10, 10).map(lambda x: round(x, 3)))


@settings(max_examples=cover.examples(160), deadline=None)
@given(
    st.lists(st.lists(st.lists(rewards, min_size=1, max_size=4), min_size=1, max_size=4), min_size=1, max_size=3),
    st.sampled_from(["mean", "max"]),
    st.sampled_from(["group", "none"]),
)
def test_the_stages_equal_their_loops(groups, thought, std):
    of_thoughts, of_items = stages(groups, thought, std)
    expected_thoughts, expected_items = [], []
    for group in groups:
        known = [[r for r in own if not math.isnan(r)] for own in group]
        worth = {"mean": statistics.mean, "max": max}[thought]
        expected_thoughts += slow([worth(own) if own else NAN for own in known], std)
        for own in group:
            expected_items += slow(own, std)
    # Rewards are multiples of 1e-3 up to 10: rounding of 1e-15 over a deviation of 5e-5 at least.
    np.testing.assert_allclose(of_thoughts, expected_thoughts, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(of_items, expected_items, rtol=1e-8, atol=1e-8)
