from __future__ import annotations

import math

import cover
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from megatron_rl.algorithms.shaping import (
    SHAPINGS,
    cosine,
    length_normalised,
    repeated_share,
    shape_rewards,
    shape_verdicts,
    soft_overlong,
)
from megatron_rl.config.shaping import (
    CosineShaping,
    LengthNormalisedShaping,
    RepetitionShaping,
    ShapingConfig,
    SoftOverlongShaping,
)
from megatron_rl.types import Rollout, Verdict

NAN = float("nan")
ALL = [
    CosineShaping(max_tokens=30),
    SoftOverlongShaping(max_tokens=20, cache_tokens=5),
    LengthNormalisedShaping(weight=0.5),
    RepetitionShaping(ngram_size=2),
]


def test_golden_soft_overlong():
    penalty = soft_overlong(np.array([0, 80, 85, 90, 100, 101, 500]), max_tokens=100, cache_tokens=20)
    assert penalty.tolist() == [0, 0, -0.25, -0.5, -1, -1, -1]


def test_golden_length_normalised():
    lengths, group_of = np.array([10, 30, 20, 10, 30, 7, 5, 5]), np.array([0, 0, 0, 0, 0, 1, 2, 2])
    correct = np.array([True, True, True, False, False, True, True, False])
    assert length_normalised(lengths, correct, group_of).tolist() == [0.5, -0.5, 0, 0, -0.5, 0, 0, 0]


def test_golden_cosine():
    cfg = CosineShaping(max_tokens=90)
    lengths = np.array([0, 30, 45, 60, 89, 90, 200])
    half = (1 + math.cos(89 / 90 * math.pi)) / 2
    # cos(60 degrees) = .5; float64 rounding of the cosine.
    right = cosine(lengths, np.ones(7, bool), cfg)
    np.testing.assert_allclose(right, [2, 1.75, 1.5, 1.25, 1 + half, -10, -10], rtol=1e-14)
    wrong = cosine(lengths, np.zeros(7, bool), cfg)
    np.testing.assert_allclose(wrong, [-10, -7.5, -5, -2.5, -10 * half, -10, -10], rtol=1e-12)


def test_golden_repetition():
    responses = [[1, 2, 1, 2, 1], [1, 2, 3], [7] * 11, [5], [], [4, 4, 4]]
    assert [repeated_share(ids, 2) for ids in responses] == pytest.approx([0.5, 0, 0.9, 0, 0, 0.5], rel=1e-15)


def slow_repetition(ids, n):
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    seen, repeats = [], 0
    for gram in grams:
        repeats += gram in seen
        seen.append(gram)
    return repeats / len(grams) if grams else 0.0


@given(st.lists(st.integers(0, 2), max_size=12), st.integers(1, 4))
def test_repetition_equals_a_loop(ids, n):
    # float64, 1 - a / b against (b - a) / b.
    assert repeated_share(ids, n) == pytest.approx(slow_repetition(ids, n), rel=1e-12, abs=1e-15)


def shape(rewards, lengths, group_of, responses, configs=ALL):
    repeated = {2: np.array([repeated_share(ids, 2) for ids in responses], np.float64)}
    return shape_rewards(rewards, lengths, group_of, repeated, configs)


def slow_shape(i, rewards, lengths, group_of, responses):
    """All four, for one sample."""
    if math.isnan(rewards[i]):
        return NAN
    length, correct = lengths[i], rewards[i] >= 0.5
    phase = (1 + math.cos(math.pi * length / 30)) / 2
    reward = -10 if length >= 30 else (1 + phase if correct else -10 * phase)
    reward += 0 if length <= 15 else (-1 if length > 20 else (15 - length) / 5)
    peers = [n for n, g, r in zip(lengths, group_of, rewards, strict=True) if g == group_of[i] and not math.isnan(r)]
    if max(peers) > min(peers):
        term = 0.5 - (length - min(peers)) / (max(peers) - min(peers))
        reward += 0.5 * (term if correct else min(0, term))
    return reward - slow_repetition(responses[i], 2)


@st.composite
def answers(draw):
    responses = draw(st.lists(st.lists(st.integers(0, 3), max_size=35), max_size=8))
    size = len(responses)
    rewards = draw(st.lists(st.sampled_from([NAN, 0.0, 0.5, 1.0]), min_size=size, max_size=size))
    group_of = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    return (
        np.array(rewards, np.float64),
        np.array([len(r) for r in responses], np.int64),
        np.array(group_of, np.int64),
        responses,
    )


@settings(max_examples=cover.examples(80), deadline=None)
@given(answers())
def test_all_in_order_equal_a_loop(case):
    rewards, *_ = case
    before = rewards.copy()
    shaped = shape(*case)
    # float64, a few operations on numbers up to 12.
    np.testing.assert_allclose(shaped, [slow_shape(i, *case) for i in range(len(rewards))], rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(rewards, before)


@settings(max_examples=cover.examples(40), deadline=None)
@given(answers(), st.integers(0, 99))
def test_the_order_of_the_samples_does_not_matter(case, seed):
    rewards, lengths, group_of, responses = case
    order = np.random.default_rng(seed).permutation(len(rewards))
    shuffled = shape(rewards[order], lengths[order], group_of[order], [responses[i] for i in order])
    np.testing.assert_array_equal(shuffled, shape(*case)[order])


def test_abstentions_stay_and_leave_the_lengths_of_their_group():
    rewards, lengths = np.array([1.0, NAN, 0.0]), np.array([10, 1000, 20])
    shaped = shape_rewards(rewards, lengths, np.zeros(3, np.int64), {}, [LengthNormalisedShaping()])
    np.testing.assert_array_equal(shaped, [1.5, NAN, -0.5])
    nothing = np.full(3, NAN)
    np.testing.assert_array_equal(shape(nothing, lengths, np.zeros(3, np.int64), [[]] * 3), nothing)


def test_no_shaping_and_no_samples():
    rewards = np.array([1.0, NAN])
    np.testing.assert_array_equal(shape_rewards(rewards, np.array([3, 4]), np.array([0, 0]), {}, []), rewards)
    none = np.zeros(0, np.int64)
    assert shape(np.zeros(0), none, none, []).shape == (0,)


def test_correct_is_judged_by_the_verified_reward():
    """After a penalty of 1 a right answer is still right."""
    configs = [SoftOverlongShaping(max_tokens=10, cache_tokens=2), LengthNormalisedShaping()]
    shaped = shape_rewards(np.array([1.0, 1.0]), np.array([20, 40]), np.array([0, 0]), {}, configs)
    assert shaped.tolist() == [1 - 1 + 0.5, 1 - 1 - 0.5]


def test_what_means_nothing_is_refused():
    one = (np.array([1.0]), np.array([3]), np.array([0]), {})
    with pytest.raises(ValueError, match="soft_overlong"):
        shape_rewards(*one, [SoftOverlongShaping(max_tokens=9, cache_tokens=1), CosineShaping(max_tokens=9)])
    for bad in (
        {"kind": "soft_overlong", "max_tokens": 10, "cache_tokens": 10},
        {"kind": "repetition", "max_penalty": 0.5},
        {"kind": "length_normalised", "weight": 0},
        {"kind": "cosine"},
    ):
        with pytest.raises(ValidationError):
            TypeAdapter(ShapingConfig).validate_python(bad)


def test_every_kind_is_registered():
    assert set(SHAPINGS) == {type(cfg) for cfg in ALL}
    assert all(kind.formula and "arXiv" in kind.source and "arXiv" in kind.__doc__ for kind in SHAPINGS)


def test_shaping_sees_the_response_alone_and_leaves_scores_and_abstentions():
    def rollout(num_tokens):
        return Rollout(2 + num_tokens, 2, num_tokens, 0, "stop")

    groups = [[rollout(4), rollout(6)], [rollout(1)]]
    away = Verdict(None, "the judge was away")
    verdicts = [[Verdict(1.0, "good", repeated={1: 0.0}), Verdict(1.0, repeated={1: 5 / 6})], [away]]
    shaping = [SoftOverlongShaping(max_tokens=6, cache_tokens=4), RepetitionShaping(ngram_size=1, max_penalty=-0.6)]
    shaped = shape_verdicts(verdicts, groups, shaping)
    # Four tokens are half of the way into the cache; six are all of it, and five of the six repeat.
    assert [v.shaped for v in shaped[0]] == [1.0 - 0.5, 1.0 - 1.0 - 0.5]
    assert [v.score for v in shaped[0]] == [1.0, 1.0] and shaped[0][0].reason == "good"
    assert shaped[1] == [away]
    assert shape_verdicts(verdicts, groups, []) == verdicts
