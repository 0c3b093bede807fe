from __future__ import annotations

import math
import statistics
from typing import get_args

import cover
import numpy as np
import pytest
import torch
from batches import batch_without_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from megatron_rl.algorithms import estimate_advantages
from megatron_rl.algorithms.outcomes import (
    a2po,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    max_rl,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from megatron_rl.algorithms.whitening import whiten
from megatron_rl.config.advantages import (
    A2poAdvantage,
    AdvantageConfig,
    FunctionAdvantage,
    GdpoAdvantage,
    GpgAdvantage,
    GrpoAdvantage,
    GrpoPasskAdvantage,
    GrpoProcessAdvantage,
    MaxRlAdvantage,
    OpoAdvantage,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    RemaxAdvantage,
    RlooAdvantage,
)
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.types import AnnotatedBatch, StepBatch, TokenRewards

NAN = float("nan")
EPS = 1e-6  # what is added to every standard deviation
KINDS = get_args(get_args(AdvantageConfig)[0])


def scores_of(*groups: list[float | None], **more) -> StepBatch:
    rewards = [NAN if r is None else r for group in groups for r in group]
    facts = {
        "group_of": np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
        "lengths": np.full(len(rewards), 3),
        "num_actions": np.full(len(rewards), 2),
        "rewards": np.array(rewards, float),
    }
    return batch_without_tokens(**facts | more)


# Golden numbers, by hand.


def test_golden_with_and_without_the_standard_deviation():
    rewards, group_of = np.array([1.0, 0, 0, 0, 2, 4]), np.array([0, 0, 0, 0, 1, 1])
    root = 2**0.5  # the sample standard deviation of 2 and 4
    expected = [1.5, -0.5, -0.5, -0.5, -1 / root, 1 / root]
    # The 1e-6 that is added to a deviation of .5.
    np.testing.assert_allclose(grpo(rewards, group_of, "group"), expected, rtol=3e-6)
    assert grpo(rewards, group_of, "none").tolist() == [0.75, -0.25, -0.25, -0.25, -1, 1]


def test_the_conversations_of_an_answer_count_once():
    """The second answer of the first group branched twice; in the second group the two conversations of the first
    answer are scored differently, and one of the second answer has no score."""
    batch = scores_of(
        [0.0, 0.1, 0.1, 0.1], [1.0, 0.0, 0.0, None], answer_of=np.array([0, 1, 1, 1, 2, 2, 3, 3]),
        num_actions=np.array([5, 2, 4, 1, 3, 3, 6, 1]),
    )  # fmt: skip
    plain = scores_of([0.0, 0.1], [0.5, 0.0], num_actions=np.array([5, 7, 6, 7]))
    for kind in ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "grpo_passk"):
        cfg = AlgorithmConfig(adv_estimator={"kind": kind})
        credit, metrics = estimate_advantages(batch, cfg)
        expected, of_plain = estimate_advantages(plain, cfg)
        close(credit.advantages, expected.advantages[[0, 1, 1, 1, 2, 2, 3, 3]])
        assert credit.active.tolist() == [*expected.active[[0, 1, 1, 1, 2, 2, 3]], False]
        assert metrics["reward/std"] == pytest.approx(of_plain["reward/std"]) and metrics["reward/mean"] == 0.15
    same, _ = estimate_advantages(scores_of([0.1] * 4, answer_of=np.array([0, 0, 0, 1])), AlgorithmConfig())
    assert not same.active.any(), "three times 0.1 by three is not 0.1"


def test_golden_batch_deviation():
    # Mean 2, squares 4 + 0 + 1 + 9 over 3; the groups' means are 1 and 3.
    rewards, group_of = np.array([0.0, 2, 1, 5]), np.array([0, 0, 1, 1])
    expected = np.array([-1, 1, -2, 2]) / (math.sqrt(14 / 3) + EPS)
    np.testing.assert_allclose(grpo(rewards, group_of, "batch"), expected, rtol=1e-12)


def test_golden_leave_one_out():
    rewards, group_of = np.array([1.0, 0, 0, 5, 7]), np.array([0, 0, 0, 1, 1])
    assert rloo(rewards, group_of, "none").tolist() == [1, -0.5, -0.5, -2, 2]
    # The others of the first are equal, and those of the last two are one each: undivided.
    deviation = math.sqrt(0.5) + EPS
    np.testing.assert_allclose(rloo(rewards, group_of, "others"), [1, -0.5 / deviation, -0.5 / deviation, -2, 2])


def test_others_that_are_equal_but_for_rounding_divide_nothing():
    """0.1 + 0.1 + 0.1 over 3 is not 0.1: a deviation of 1e-17 would make the one right answer's advantage 9e5."""
    assert rloo(np.array([1.0, 0.1, 0.1, 0.1]), np.zeros(4, int), "others")[0] == pytest.approx(0.9)


@pytest.mark.parametrize(
    "rewards",
    [
        [1.0, 0.1 + 0.2, 0.3, 0.3],
        [0.0, 0.8, 0.1 + 0.7, 0.8],
        [2.0, 3.3, 1.1 + 2.2, 3.3, 3.3],
        [1.0, 0.1 + 0.2 - 0.3, 0.0, 0.0],
        [1.0, float(np.float32(0.1) + np.float32(0.2)), float(np.float32(0.3)), 0.3],
        [-5e8, 1e9, 1e9 * (0.1 + 0.2) / 0.3, 1e9],
        [1.0, float(np.float32(0.7) - np.float32(0.6) - np.float32(0.1)), 0.0, 0.0],  # -4e-8
        [1.0, 1e5 * (0.1 + 0.2) - 3e4, 0.0, 0.0],
        [1.0, float(np.float16(0.3)), 0.3, 0.3],
    ],
)
def test_others_that_differ_by_rounding_alone_are_equal(rewards):
    given, one_group = np.array(rewards), np.zeros(len(rewards), int)
    np.testing.assert_allclose(rloo(given, one_group, "others")[0], rloo(given, one_group, "none")[0])


def test_a_difference_that_a_sum_leaves_is_no_signal():
    """Whitening would make an advantage of 1 of it."""
    parts = np.array([[1e5 * (0.1 + 0.2) - 3e4], [0.0], [0.0], [0.0]])
    assert gdpo(parts, np.ones(1), np.zeros(4, int)).tolist() == [0, 0, 0, 0]
    assert whiten(torch.tensor([np.float32(0.3), 0.3, 0.3, 0.3], dtype=torch.float64)).tolist() == [0, 0, 0, 0]


def test_golden_optimal_baseline():
    advantages = opo(np.array([1.0, 0, 4]), np.array([0, 0, 0]), np.array([1, 3, 4]))
    assert advantages.tolist() == [1 - 17 / 8, -17 / 8, 4 - 17 / 8]


def test_golden_group_policy_gradient():
    rewards, group_of = np.array([1.0, 0, 0.5, 1, 1, NAN]), np.array([0, 0, 0, 1, 1, 1])
    # Five scored, three in groups with signal, one of those at its group's mean.
    np.testing.assert_allclose(gpg(rewards, group_of, False), [5 / 6, -5 / 6, 0, 0, 0, 0], rtol=1e-15)
    assert gpg(rewards, group_of, True).tolist() == [0.5, -0.5, 0, 0, 0, 0]


def test_golden_maximum_likelihood():
    rewards, group_of = np.array([1.0, 0, 0, 0, 1, 1, 0.5, 1, 0, 0, NAN]), np.array([0] * 4 + [1] * 3 + [2] + [3] * 3)
    expected = [3, -1, -1, -1, 0.2, 0.2, -0.4, 0, 0, 0, 0]
    np.testing.assert_allclose(max_rl(rewards, group_of), expected, rtol=1e-12)
    with pytest.raises(ValueError, match="max_rl divides by the mean reward .* a reward is -0.5"):
        max_rl(np.array([1.0, -0.5]), np.array([0, 0]))


def test_maximum_likelihood_does_not_know_the_scale_of_the_rewards():
    rewards, group_of = np.array([1.0, 0.25, 0, 2, 3]), np.array([0, 0, 0, 1, 1])
    np.testing.assert_allclose(max_rl(rewards * 7, group_of), max_rl(rewards, group_of), rtol=1e-12)


def test_golden_pass_at_k():
    rewards, group_of = np.array([0.0, 3, 1, 2, 2, 1, 9]), np.array([0, 0, 0, 1, 1, 1, 2])
    assert grpo_passk(rewards, group_of, "none").tolist() == [0, 2, 0, 0, 0, 0, 0]
    expected = 2 / (statistics.stdev([0, 3, 1]) + EPS)
    np.testing.assert_allclose(grpo_passk(rewards, group_of, "group"), [0, expected, 0, 0, 0, 0, 0], rtol=1e-12)


def test_golden_reinforce_plus_plus():
    advantages = reinforce_plus_plus(np.array([1.0, 0, NAN]), np.array([1, 3, 50]), True)
    deviation = math.sqrt(3) / 4 + EPS
    np.testing.assert_allclose(advantages, [0.75 / deviation, -0.25 / deviation, 0], rtol=1e-12)


def test_reinforce_plus_plus_without_whitening_is_the_reward():
    assert reinforce_plus_plus(np.array([1.0, 3.0, NAN]), np.array([1, 3, 50]), False).tolist() == [1, 3, 0]


def test_golden_reinforce_plus_plus_baseline():
    rewards, group_of = np.array([1.0, 0, 1, 1]), np.array([0, 0, 1, 1])
    # Centred .5 -.5 0 0 over 1 3 2 2 tokens: mean -1/8, second moment 1/8, variance 1/8 - 1/64.
    deviation = math.sqrt(7 / 64) + EPS
    expected = [(0.5 + 1 / 8) / deviation, (-0.5 + 1 / 8) / deviation, 0, 0]
    got = reinforce_plus_plus_baseline(rewards, group_of, np.array([1, 3, 2, 2]))
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    assert got[2:].tolist() == [0, 0]


def test_a2po_subtracts_the_log_mean_exp_of_rewards_of_the_reference():
    drawn, beta = [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], 0.3
    values = [beta * math.log(sum(math.exp(r / beta) for r in of_prompt) / 4) for of_prompt in drawn]
    rates, rewards = np.array([np.mean(one) for one in drawn] + [0.5]), np.array([1.0, 0, 1, NAN])
    assert a2po(rewards, rates, beta) == pytest.approx([1 - values[0], -values[1], 1 - values[2], 0], abs=1e-12)
    assert a2po(rewards, rates, 1e-3)[0] == pytest.approx(1e-3 * math.log(2)), "no overflow"
    with pytest.raises(ValueError, match="no `pass_rate` from 0 to 1"):
        a2po(rewards, np.array([0.5, 0.5, NAN, 0.5]), beta)


def test_golden_remax():
    assert remax(np.array([1.0, 0, NAN, 1]), np.array([0.25, 0.25, 0, NAN])).tolist() == [0.75, -0.25, 0, 0]


def test_golden_decoupled_normalisation():
    """A reward on a scale a hundred times larger does not drown the other: both pull alike."""
    parts = np.array([[1.0, 0], [0, 100], [NAN, 0], [1, 100]])
    group_of, weights = np.array([0, 0, 0, 0]), np.array([2.0, 1.0])
    correct = [(r - 2 / 3) / (statistics.stdev([1, 0, 1]) + EPS) if not math.isnan(r) else 0 for r in parts[:, 0]]
    style = [(r - 50) / (statistics.stdev([0, 100, 0, 100]) + EPS) for r in parts[:, 1]]
    total = [2 * a + b for a, b in zip(correct, style, strict=True)]
    mean, deviation = statistics.mean(total), statistics.pstdev(total)
    expected = [(x - mean) / (deviation + EPS) for x in total]
    # float64, a few operations.
    np.testing.assert_allclose(gdpo(parts, weights, group_of), expected, rtol=1e-12)


# Slow references: one sample at a time, Python's floats.


def scored_of(rewards, group_of, group):
    return [r for r, g in zip(rewards, group_of, strict=True) if g == group and not math.isnan(r)]


def slow_grpo(rewards, group_of, std):
    everyone = [r for r in rewards if not math.isnan(r)]
    result = []
    for reward, group in zip(rewards, group_of, strict=True):
        peers = scored_of(rewards, group_of, group)
        if math.isnan(reward) or len(set(peers)) < 2:
            result.append(0.0)
            continue
        scale = {"group": lambda: statistics.stdev(peers), "batch": lambda: statistics.stdev(everyone)}
        divisor = scale[std]() + EPS if std in scale else 1.0
        result.append((reward - statistics.mean(peers)) / divisor)
    return result


def slow_rloo(rewards, group_of, std):
    result = []
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i and group_of[j] == group_of[i] and not math.isnan(r)]
        result.append(0.0 if math.isnan(reward) or not others else reward - sum(others) / len(others))
        group = [r for j, r in enumerate(rewards) if group_of[j] == group_of[i] and not math.isnan(r)]
        if std == "others" and len(others) > 1 and statistics.stdev(others) > 0.1 * statistics.stdev(group):
            result[-1] /= statistics.stdev(others) + EPS
    return result


def slow_opo(rewards, group_of, num_actions):
    result = []
    for i, reward in enumerate(rewards):
        mine = [j for j, g in enumerate(group_of) if g == group_of[i] and not math.isnan(rewards[j])]
        tokens = sum(num_actions[j] for j in mine)
        if math.isnan(reward) or len({rewards[j] for j in mine}) < 2 or tokens == 0:
            result.append(0.0)
        else:
            result.append(reward - sum(num_actions[j] * rewards[j] for j in mine) / tokens)
    return result


def slow_passk(rewards, group_of):
    result = []
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i and group_of[j] == group_of[i] and not math.isnan(r)]
        result.append(max(reward - max(others), 0.0) if others and not math.isnan(reward) else 0.0)
    return result


def slow_whitened(values, num_actions):
    """Token by token."""
    tokens = [v for v, n in zip(values, num_actions, strict=True) for _ in range(n) if not math.isnan(v)]
    if len(set(tokens)) < 2:
        return [0.0] * len(values)
    mean, deviation = statistics.mean(tokens), statistics.pstdev(tokens)
    return [
        (v - mean) / (deviation + EPS) if n and not math.isnan(v) else 0.0
        for v, n in zip(values, num_actions, strict=True)
    ]


scores = st.one_of(st.just(NAN), st.floats(-10, 10).map(lambda x: round(x, 3)))


@st.composite
def outcomes(draw):
    """Rewards, groups and numbers of actions of a batch; groups in any order, some without a score."""
    size = draw(st.integers(0, 16))
    rewards = np.array(draw(st.lists(scores, min_size=size, max_size=size)), np.float64)
    group_of = np.array(draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)), np.int64)
    num_actions = np.array(draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)), np.int64)
    return rewards, group_of, num_actions


def close(got, expected):
    assert got.dtype == np.float64
    # Rewards are multiples of 1e-3 up to 10: the mean's rounding of 1e-15 over a deviation of 2e-4 at least.
    np.testing.assert_allclose(got, np.array(expected, np.float64).reshape(got.shape), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("part", cover.essential(range(4), 0))  # each has examples of its own
@settings(max_examples=40, deadline=None)
@given(outcomes())
def test_every_estimator_equals_its_loop(part, case):
    rewards, group_of, num_actions = case
    for std in ("group", "batch", "none"):
        close(grpo(rewards, group_of, std), slow_grpo(rewards, group_of, std))
    for std in ("others", "none"):
        close(rloo(rewards, group_of, std), slow_rloo(rewards, group_of, std))
    close(opo(rewards, group_of, num_actions), slow_opo(rewards, group_of, num_actions))
    close(grpo_passk(rewards, group_of, "none"), slow_passk(rewards, group_of))
    close(reinforce_plus_plus(rewards, num_actions, True), slow_whitened(rewards, num_actions))

    signal = [
        len(set(scored_of(rewards, group_of, g))) > 1 and not math.isnan(r)
        for r, g in zip(rewards, group_of, strict=True)
    ]
    centred = [NAN if math.isnan(r) else a for r, a in zip(rewards, slow_grpo(rewards, group_of, "none"), strict=True)]
    whitened = [w if s else 0.0 for w, s in zip(slow_whitened(centred, num_actions), signal, strict=True)]
    close(reinforce_plus_plus_baseline(rewards, group_of, num_actions), whitened)

    scale = sum(r == r for r in rewards) / max(sum(signal), 1)
    positive = np.abs(rewards)
    means = [statistics.mean(scored_of(positive, group_of, g) or [0]) for g in group_of]
    centred = slow_grpo(positive, group_of, "none")
    close(max_rl(positive, group_of), [a / m if a else 0.0 for a, m in zip(centred, means, strict=True)])
    close(gpg(rewards, group_of, False), [scale * a for a in slow_grpo(rewards, group_of, "none")])


PARTS = {
    "grpo": lambda r, g, n: grpo(r, g, "group"),
    "grpo_batch": lambda r, g, n: grpo(r, g, "batch"),
    "dr_grpo": lambda r, g, n: grpo(r, g, "none"),
    "rloo": lambda r, g, n: rloo(r, g, "none"),
    "rloo_others": lambda r, g, n: rloo(r, g, "others"),
    "opo": opo,
    "gpg": lambda r, g, n: gpg(r, g, False),
    "max_rl": lambda r, g, n: max_rl(np.abs(r), g),
    "grpo_passk": lambda r, g, n: grpo_passk(r, g, "group"),
    "reinforce_plus_plus": lambda r, g, n: reinforce_plus_plus(r, n, True),
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gdpo": lambda r, g, n: gdpo(np.stack([r, r**2], axis=1), np.array([1.0, 0.5]), g),
}
GROUP_RELATIVE = sorted(PARTS.keys() - {"reinforce_plus_plus"})
UNDIVIDED = {"dr_grpo", "rloo", "opo", "gpg"}


@pytest.mark.parametrize("name", sorted(PARTS))
@settings(max_examples=cover.examples(40), deadline=None)
@given(case=outcomes(), seed=st.integers(0, 99))
def test_the_order_of_the_samples_does_not_matter(name, case, seed):
    order = np.random.default_rng(seed).permutation(len(case[0]))
    # float64: sums in another order; where a whitened deviation is rounding alone, both stay below it over EPS.
    np.testing.assert_allclose(PARTS[name](*(x[order] for x in case)), PARTS[name](*case)[order], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", sorted(PARTS.keys() - {"gdpo", "max_rl"}))
@settings(max_examples=cover.examples(40), deadline=None)
@given(case=outcomes(), shift=st.integers(-8, 8), scale=st.sampled_from([0.5, 2.0, 4.0]))
def test_a_shift_changes_nothing_and_a_scale_only_what_is_not_divided(name, case, shift, scale):
    rewards, group_of, num_actions = case
    advantages = PARTS[name](rewards, group_of, num_actions)
    # A shift by up to 8 costs 1e-15 of a reward; over deviations of 1e-4 at least.
    np.testing.assert_allclose(PARTS[name](rewards + shift, group_of, num_actions), advantages, rtol=1e-6, atol=1e-8)
    scaled = PARTS[name](rewards * scale, group_of, num_actions)
    if name in UNDIVIDED:
        np.testing.assert_allclose(scaled, advantages * scale, rtol=1e-9, atol=1e-12)
    elif name != "rloo_others":  # divided or not, sample by sample
        # EPS over the smallest deviation of such rewards, 1e-4, halved by the scale.
        np.testing.assert_allclose(scaled, advantages, rtol=3e-2, atol=1e-8)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_no_signal_is_exactly_zero(name):
    # 0.1 + 0.1 + 0.1 over 3 is not 0.1 in floating point; a group of one; one with a single score; one with none;
    # and one with signal, so that whitening has something to do.
    rewards = np.array([0.1, 0.1, 0.1, 7.0, 3.0, NAN, NAN, 1.0, 0.0])
    advantages = PARTS[name](rewards, np.array([0, 0, 0, 1, 2, 2, 3, 4, 4]), np.array([3, 1, 7, 2, 2, 2, 2, 1, 4]))
    assert advantages[:7].tolist() == [0] * 7
    assert advantages[7] > 0


@pytest.mark.parametrize("scale", [1.0, 1e6, 1e-4])
@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_rewards_that_differ_by_rounding_alone_are_no_signal(name, scale):
    sums = np.array([0.1 + 0.2, 0.3, float(np.float32(0.3))]) * scale
    rewards = np.concatenate([sums, [0.1 + 0.2 - 0.3, 0.0, 1.0, 0.0]])
    advantages = PARTS[name](rewards, np.array([0, 0, 0, 1, 1, 2, 2]), np.array([3, 1, 7, 2, 2, 1, 4]))
    assert advantages[:5].tolist() == [0] * 5
    assert advantages[5] > 0


def test_a_step_drops_groups_whose_rewards_differ_by_rounding_alone():
    scores = scores_of([0.1 + 0.2, 0.3], [0.3, 0.30001], [1e9, 1e9 + 500])
    credit, metrics = estimate_advantages(scores, AlgorithmConfig(adv_estimator=GrpoAdvantage()))
    assert credit.active.tolist() == [False, False, True, True, True, True]
    assert metrics["groups/zero_signal"] == 1


@pytest.mark.parametrize("name", sorted(PARTS))
def test_equal_rewards_nothing_scored_and_no_tokens(name):
    ones = np.array([1, 1, 1])
    assert PARTS[name](np.array([0.1, 0.1, 0.1]), np.array([0, 0, 1]), ones).tolist() == [0, 0, 0]
    assert PARTS[name](np.array([NAN, NAN, NAN]), np.array([0, 0, 1]), ones).tolist() == [0, 0, 0]
    assert PARTS[name](np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)).shape == (0,)
    assert np.isfinite(PARTS[name](np.array([1.0, 0.0]), np.array([0, 0]), np.array([0, 0]))).all()


def test_gdpo_leaves_out_who_has_no_score():
    parts = np.array([[1.0, 5], [0, 5], [NAN, NAN]])
    advantages = gdpo(parts, np.array([1.0, 1]), np.array([0, 0, 0]))
    # Whitened over two samples: +-1, but for EPS.
    np.testing.assert_allclose(advantages, [1, -1, 0], rtol=1e-5)
    with pytest.raises(ValueError, match="2 reward functions, but 1"):
        gdpo(parts, np.array([1.0]), np.array([0, 0, 0]))


# The batch.


def test_abstentions_leave_the_statistics_and_the_step():
    scores = scores_of([1.0, None, 0.0], [None, None])
    credit, metrics = estimate_advantages(scores, AlgorithmConfig(adv_estimator=GrpoAdvantage(std="none")))
    assert credit.advantages.tolist() == [0.5, 0, -0.5, 0, 0]
    assert credit.active.tolist() == [True, False, True, False, False]
    assert metrics == {
        "reward/mean": 0.5,
        "reward/std": pytest.approx(0.5**0.5),
        "groups/zero_signal": 0,
        "samples/abstained": 3,
        "samples/overlong": 0,
        "samples/active": 2,
    }


@pytest.mark.parametrize("drop", [True, False])
def test_zero_signal_groups_leave_when_asked(drop):
    credit, metrics = estimate_advantages(
        scores_of([1.0, 1.0], [1.0, 0.0], [0.0]), AlgorithmConfig(drop_zero_signal=drop)
    )
    assert credit.active.tolist() == ([False, False, True, True, False] if drop else [True] * 5)
    assert metrics["groups/zero_signal"] == 2


def test_the_overlong_filter_takes_out_what_the_length_budget_cut_and_no_baseline():
    """The second group's cut answer has no score."""
    scores = scores_of([1.0, 0.0, 0.0, 1.0], [0.0, None], is_cut=np.array([1, 0, 0, 0, 0, 1], bool))
    cfg = {"adv_estimator": GrpoAdvantage(std="none"), "drop_zero_signal": False}
    plain, metrics = estimate_advantages(scores, AlgorithmConfig(**cfg))
    assert metrics["samples/overlong"] == 0
    filtered, metrics = estimate_advantages(scores, AlgorithmConfig(overlong_filter=True, **cfg))
    assert filtered.advantages.tolist() == plain.advantages.tolist() == [0.5, -0.5, -0.5, 0.5, 0, 0]
    assert plain.active.tolist() == [True] * 5 + [False]
    assert filtered.active.tolist() == [False] + [True] * 4 + [False]
    assert (metrics["samples/overlong"], metrics["samples/abstained"], metrics["samples/active"]) == (1, 1, 4)


@pytest.mark.parametrize("groups", [[[None, None]], []])
def test_nothing_scored(groups):
    _, metrics = estimate_advantages(scores_of(*groups), AlgorithmConfig())
    assert np.isnan(metrics["reward/mean"]) and metrics["samples/active"] == 0
    assert metrics["groups/zero_signal"] == 0


def test_a_group_of_equal_rewards_has_signal_if_the_estimator_says_so():
    """REINFORCE++ compares with the batch, and ReMax with the greedy answer: such groups stay."""
    scores = scores_of([1.0, 1.0], [0.0, 0.0])
    credit, metrics = estimate_advantages(scores, AlgorithmConfig(adv_estimator=ReinforcePlusPlusAdvantage()))
    assert credit.active.all() and metrics["groups/zero_signal"] == 0
    scores = scores_of([1.0, 1.0], [0.0, 0.0], [1.0], greedy_rewards=np.array([0.0, 0, 0, 0, NAN]))
    credit, metrics = estimate_advantages(scores, AlgorithmConfig(adv_estimator=RemaxAdvantage()))
    assert credit.active.tolist() == [True, True, False, False, False]
    assert metrics["groups/zero_signal"] == 1 and metrics["samples/abstained"] == 1


def test_ties_of_the_best_are_zero_signal_for_pass_at_k():
    scores = scores_of([1.0, 1.0, 0.0], [1.0, 0.0])
    credit, metrics = estimate_advantages(scores, AlgorithmConfig(adv_estimator=GrpoPasskAdvantage(std="none")))
    assert credit.advantages.tolist() == [0, 0, 0, 1, 0] and credit.active.tolist() == [False] * 3 + [True] * 2
    assert metrics["groups/zero_signal"] == 1


def test_gpg_counts_zero_signal_groups_once():
    """In the factor when they stay in the denominators, in the denominators when they leave: B / (B - M) over B is 1
    over what is left."""
    scores, per_sample = scores_of([1.0, 0.0], [1.0, 1.0]), []
    for drop in (False, True):
        cfg = AlgorithmConfig(adv_estimator=GpgAdvantage(), drop_zero_signal=drop)
        credit, _ = estimate_advantages(scores, cfg)
        per_sample.append(credit.advantages / credit.active.sum())
    assert per_sample[0].tolist() == per_sample[1].tolist() == [0.25, -0.25, 0, 0]


@pytest.mark.parametrize(
    ("estimator", "function"),
    [
        (GrpoAdvantage(std="batch"), lambda b: grpo(b.rewards, b.group_of, "batch")),
        (RlooAdvantage(), lambda b: rloo(b.rewards, b.group_of, "none")),
        (RlooAdvantage(std="others"), lambda b: rloo(b.rewards, b.group_of, "others")),
        (ReinforcePlusPlusAdvantage(), lambda b: reinforce_plus_plus(b.rewards, b.num_actions, True)),
        (ReinforcePlusPlusAdvantage(whiten=False), lambda b: np.nan_to_num(b.rewards)),
        (
            ReinforcePlusPlusBaselineAdvantage(),
            lambda b: reinforce_plus_plus_baseline(b.rewards, b.group_of, b.num_actions),
        ),
        (RemaxAdvantage(), lambda b: remax(b.rewards, b.greedy_rewards)),
        (A2poAdvantage(), lambda b: a2po(b.rewards, b.pass_rates, 0.5)),
        (OpoAdvantage(), lambda b: opo(b.rewards, b.group_of, b.num_actions)),
        (GpgAdvantage(), lambda b: gpg(b.rewards, b.group_of, True)),
        (MaxRlAdvantage(), lambda b: max_rl(b.rewards, b.group_of)),
        (GrpoPasskAdvantage(std="group"), lambda b: grpo_passk(b.rewards, b.group_of, "group")),
        (GdpoAdvantage(), lambda b: gdpo(b.reward_parts, b.reward_weights, b.group_of)),
    ],
)
def test_the_registry_gives_each_estimator_its_fields(estimator, function):
    scores = scores_of(
        [1.0, 0.0, 2.0],
        [3.0, None, 1.0],
        num_actions=np.array([1, 4, 2, 5, 1, 3]),
        greedy_rewards=np.array([0.5, 0.5, 0.5, 2, 2, 2]),
        reward_parts=np.array([[1.0, 0], [0, 9], [2, 4], [3, 1], [NAN, NAN], [1, 8]]),
        reward_weights=np.array([1.0, 0.5]),
    )
    fields = {name: getattr(scores, name) for name in scores.__dataclass_fields__}
    scores = AnnotatedBatch(**fields, pass_rates=np.repeat([0.25, 0.75], 3))
    credit, _ = estimate_advantages(scores, AlgorithmConfig(adv_estimator=estimator))
    assert credit.advantages.tolist() == function(scores).tolist() and np.count_nonzero(credit.advantages)


def test_every_kind_names_its_source():
    published = set(KINDS) - {FunctionAdvantage}
    assert all(kind.formula and "arXiv" in kind.source and "arXiv" in kind.__doc__ for kind in published)


@pytest.mark.parametrize(
    ("estimator", "missing"),
    [
        (A2poAdvantage(), "a2po needs pass_rate, but there are no pass_rates"),
        (RemaxAdvantage(), "remax needs greedy_reward, but there are no greedy_rewards"),
        (GdpoAdvantage(), "gdpo needs reward_parts, but there are no reward_parts and no reward_weights"),
        (GrpoProcessAdvantage(), "grpo_process needs token_rewards, but there are no token_rewards"),
    ],
)
def test_what_cannot_be_fed_is_refused(estimator, missing):
    with pytest.raises(ValueError, match=missing):
        estimate_advantages(scores_of([1.0, 0.0]), AlgorithmConfig(adv_estimator=estimator))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"kind": "gae", "lam": 0.9, "length_adaptive_alpha": 0.05, "lam_critic": 1.0}, "give only one of them"),
        ({"kind": "gae", "length_adaptive_alpha": 0.05}, "give lam_critic too"),
        ({"kind": "gae", "gamma": 1.1}, "less than or equal to 1"),
        ({"kind": "grpo", "std": "token"}, "'group', 'batch' or 'none'"),
        ({"kind": "grop"}, "does not match any of the expected tags"),
    ],
)
def test_the_configuration_refuses_what_means_nothing(bad, reason):
    with pytest.raises(ValidationError, match=reason):
        TypeAdapter(AdvantageConfig).validate_python(bad)


def centred(scores: StepBatch) -> np.ndarray:
    return scores.rewards - np.nanmean(scores.rewards)


def too_few(scores: StepBatch) -> np.ndarray:
    return np.zeros(1)


def interrupts(batch):
    raise KeyboardInterrupt


def raises(scores: StepBatch) -> np.ndarray:
    raise KeyError("x")


def test_a_function_of_ones_own():
    scores = scores_of([1.0, 0.0, None], [1.0, 1.0])
    cfg = AlgorithmConfig(adv_estimator=FunctionAdvantage(path=f"{__name__}:centred"))
    credit, metrics = estimate_advantages(scores, cfg)
    assert credit.advantages.tolist() == [0.25, -0.75, 0.0, 0.25, 0.25]
    assert credit.active.tolist() == [True, True, False, True, True] and metrics["groups/zero_signal"] == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few", "must return one finite number for each of the 2 samples, but it returned .1,. numbers"),
        ("raises", "raises raised KeyError: 'x'"),
        ("interrupts", r"interrupts raised KeyboardInterrupt \(.*test_algorithms_advantages.py:\d+\)"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_a_function_that_is_no_estimator_is_named(name, message):
    cfg = AlgorithmConfig(adv_estimator=FunctionAdvantage(path=f"{__name__}:{name}"))
    with pytest.raises(ValueError, match=message):
        estimate_advantages(scores_of([1.0, 0.0]), cfg)


def test_gae_takes_all_rewards_as_they_are():
    """An outcome of 1 and rewards of 0.03 and -0.03 at tokens keep their sizes. A group of equal rewards has a signal,
    because the critic may have expected something else."""
    given = batch_without_tokens(
        group_of=np.array([0, 0, 1, 1]),
        lengths=np.array([5, 6, 7, 8]),
        num_actions=np.array([3, 3, 3, 3]),
        rewards=np.array([1.0, np.nan, 0.0, 0.0]),
        token_rewards=TokenRewards(
            np.array([0, 0, 2]), np.array([2, 3, 4]), np.array([0.03, -0.03, np.nan]), ["utility", "tool", "utility"]
        ),
    )
    cfg = AlgorithmConfig(adv_estimator={"kind": "gae", "weights": {"tool": 2.0, "outcome": 0.5}})
    credit, metrics = estimate_advantages(given, cfg)
    rewards = credit.token_rewards
    found = sorted(zip(rewards.sample.tolist(), rewards.position.tolist(), rewards.value.tolist(), strict=True))
    assert found == [(0, 2, 0.03), (0, 3, -0.06), (0, 4, 0.5), (2, 6, 0.0), (3, 7, 0.0)]
    assert credit.active.tolist() == [True, False, True, True] and metrics["groups/zero_signal"] == 0
    assert not credit.advantages.any()
