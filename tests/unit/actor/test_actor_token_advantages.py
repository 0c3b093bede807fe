"""Rewards at single tokens, from the scores of the driver to the advantages of packed tokens on the ranks."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import batch_without_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from shares import TrainSample, share_of

from megatron_rl.actor.packing import column_of, pack
from megatron_rl.algorithms import estimate_advantages
from megatron_rl.algorithms.outcomes import grpo
from megatron_rl.algorithms.process_rewards import at_actions, grpo_process, normalised
from megatron_rl.algorithms.token_advantages import token_advantages
from megatron_rl.algorithms.whitening import one_rank
from megatron_rl.config.advantages import (
    GrpoProcessAdvantage,
    OptimalTokenBaselineAdvantage,
    ReinforcePlusPlusAdvantage,
)
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.types import Credit, StepBatch, TokenRewards, Tokens

NAN = float("nan")
EPS = 1e-6  # what is added to every standard deviation


def scores_of(masks, group_of, rewards, steps=()) -> StepBatch:
    """
    Args:
        masks: the action mask of each sample.
        rewards: those of whole answers.
        steps: (sample, position, kind, value) of each reward at a token.
    """
    return batch_without_tokens(
        group_of=np.array(group_of),
        lengths=np.array([len(mask) for mask in masks]),
        num_actions=np.array([sum(mask) for mask in masks]),
        rewards=np.array(rewards, float),
        token_rewards=TokenRewards(
            np.array([s[0] for s in steps], np.int64),
            np.array([s[1] for s in steps], np.int64),
            np.array([s[3] for s in steps], float),
            [s[2] for s in steps],
        ),
    )


def tokens_of(mask) -> Tokens:
    n = len(mask)
    return Tokens(np.arange(n, dtype=np.int32), np.array(mask, bool), np.zeros(n, np.float32), np.zeros(n, np.int32))


def packed(masks, credit: Credit, layout):
    """The columns of a share with the samples of each micro-batch of `layout`."""
    order = [sample for micro in layout for sample in micro]
    made = [[TrainSample(str(i), tokens_of(masks[i]), credit.advantages[i], 1.0, i) for i in micro] for micro in layout]
    place = {sample: position for position, sample in enumerate(order)}
    rewards = credit.token_rewards
    own = [k for k, sample in enumerate(rewards.sample.tolist()) if sample in place]
    numbered = np.array([place[sample] for sample in rewards.sample[own].tolist()], np.int64)
    share = replace(
        share_of([made], alignment=4),
        token_rewards=TokenRewards(numbered, rewards.position[own], rewards.value[own]),
    )
    [minibatch] = pack(share)
    return order, [batch.columns for batch in minibatch]


def by_sample(order, columns, masks) -> dict[int, list[float]]:
    """The advantages of each sample's tokens, 0 where there is no action."""
    found, remaining = {}, iter(order)
    for column in columns:
        for slot in column.sample_T.unique().tolist():
            sample = next(remaining)
            row = column.advantage_T[column.sample_T == slot].tolist()
            mask = masks[sample]
            # Entry t of a column is the token that position t predicts.
            found[sample] = [0.0] + [row[t - 1] if mask[t] else 0.0 for t in range(1, len(mask))]
    return found


def advantages(masks, scores, section, layout, sum_over_ranks=one_rank):
    cfg = AlgorithmConfig(adv_estimator=section)
    credit, _ = estimate_advantages(scores, cfg)
    order, columns = packed(masks, credit, layout)
    # The engine's numbers are float32; these are kept in float64 to see the estimator alone.
    columns = [replace(c, advantage_T=c.advantage_T.double()) for c in columns]
    columns, _ = token_advantages(columns, cfg, 0.0, sum_over_ranks)
    return by_sample(order, columns, masks)


def test_golden_an_outcome_and_a_judge_of_steps_each_keep_their_weight():
    """Outcomes of 0 and 1 beside rewards of +-0.03: normalised apart, the small ones are as heavy as the large ones."""
    #         prompt, action, forced, action, action      prompt, action, action, action
    masks = [[0, 1, 0, 1, 1], [0, 1, 1, 1]]
    steps = [(0, 1, "judge", 0.01), (0, 3, "judge", 0.02), (1, 2, "judge", 0.06)]
    scores = scores_of(masks, [0, 0], [0.0, 1.0], steps)
    deviation = math.sqrt((4 + 1 + 9) / 2) / 100 + EPS  # of .01, .02, .06: mean .03
    a, b, c = (x / 100 / deviation for x in (-2, -1, 3))
    low, high = (x / (math.sqrt(0.5) + EPS) for x in (-0.5, 0.5))
    got = advantages(masks, scores, GrpoProcessAdvantage(gamma=0.5), [[0], [1]])
    assert got[0] == pytest.approx([0, a + b / 2 + low / 4, 0, b + low / 2, low], rel=1e-12)
    assert got[1] == pytest.approx([0, c / 2 + high / 4, c + high / 2, high], rel=1e-12)
    got = advantages(masks, scores, GrpoProcessAdvantage(weights={"outcome": 0.0, "judge": 2.0}, std=False), [[0, 1]])
    assert got[0] == pytest.approx([0, -0.06, 0, -0.02, 0], rel=1e-12)
    assert got[1] == pytest.approx([0, 0.06, 0.06, 0], rel=1e-12)


def test_the_example_in_the_readme_of_rollout():
    """Two answers to a prompt. The utilities 2, -0.5 and 0.5 have the mean 0.667 and the deviation 1.258; the outcomes
    1 and 0 have 0.5 and 0.707."""
    #         prompt, hm . | So it . | </think> 42        prompt, two tokens, forced delimiter, answer
    masks = [[0, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1]]
    utilities = [(0, 2, "utility", 2.0), (0, 5, "utility", -0.5), (1, 2, "utility", 0.5)]
    got = advantages(masks, scores_of(masks, [0, 0], [1.0, 0.0], utilities), GrpoProcessAdvantage(), [[0, 1]])
    first, second, other, right = 1.0596, -0.9272, -0.1325, 0.7071
    passages = [first + second + right] * 2 + [second + right] * 3
    assert got[0] == pytest.approx([0, *passages, right, right], abs=2e-4)
    assert got[0][1:4] == pytest.approx([0.8395, 0.8395, -0.2201], abs=2e-4)
    assert got[1] == pytest.approx([0, other - right, other - right, 0, -right], abs=2e-4)


def test_over_the_batch_all_groups_have_one_mean_and_deviation():
    masks, steps = [[0, 1]] * 4, [(0, 1, "k", 1.0), (1, 1, "k", 1.0), (2, 1, "k", 4.0), (3, 1, "k", 6.0)]
    scores = scores_of(masks, [0, 0, 1, 1], [0.0] * 4, steps)
    got = advantages(masks, scores, GrpoProcessAdvantage(over="batch", std=False), [[0, 1, 2, 3]])
    assert {sample: row[1] for sample, row in got.items()} == {0: -2.0, 1: -2.0, 2: 1.0, 3: 3.0}
    credit, metrics = estimate_advantages(scores, AlgorithmConfig(adv_estimator=GrpoProcessAdvantage(std=False)))
    assert credit.active.tolist() == [False, False, True, True] and metrics["groups/zero_signal"] == 1
    assert sorted(credit.token_rewards.value.tolist()) == [-1.0, 1.0]


def test_rewards_that_are_gains_keep_their_sign_and_their_zero():
    """Utilities 0.3, 0.1 and -0.2 beside outcomes of 0 and 1. Less help than others is still help; and a kind of which
    only one sample has a reward counts."""
    masks, utilities = [[0, 1, 1], [0, 1, 1]], [(0, 1, "utility", 0.3), (0, 2, "utility", 0.1), (1, 1, "utility", -0.2)]
    scores = scores_of(masks, [0, 0], [0.0, 1.0], utilities)
    gains = GrpoProcessAdvantage(uncentred=("utility",), gamma=0.5)
    rms = math.sqrt((0.09 + 0.01 + 0.04) / 3) + EPS
    low, high = (x / (math.sqrt(0.5) + EPS) for x in (-0.5, 0.5))
    got = advantages(masks, scores, gains, [[0, 1]])
    assert got[0] == pytest.approx([0, 0.3 / rms + 0.1 / rms / 2 + low / 2, 0.1 / rms + low], rel=1e-12)
    assert got[1] == pytest.approx([0, -0.2 / rms + high / 2, high], rel=1e-12)
    undivided = gains.model_copy(update={"std": False})
    got = advantages(masks, scores_of(masks, [0, 0], [1.0, 1.0], utilities[:1]), undivided, [[0, 1]])
    assert got == {0: pytest.approx([0, 0.3, 0]), 1: [0, 0, 0]}


def test_outcomes_alone_are_grpo():
    rng = random.Random(4)
    masks = [[0] + [int(rng.random() < 0.6) for _ in range(6)] for _ in range(9)]
    group_of, rewards = [0, 0, 0, 1, 1, 1, 2, 2, 2], [rng.gauss(0, 1) for _ in masks]
    got = advantages(
        masks, scores_of(masks, group_of, rewards), GrpoProcessAdvantage(), [[0, 1, 2], [3, 4, 5, 6, 7, 8]]
    )
    expected = grpo(np.array(rewards), np.array(group_of), "group")
    for sample, row in got.items():
        assert row == pytest.approx([expected[sample] * m for m in masks[sample]], rel=1e-12)


def slow_process(steps, group_of, masks, cfg):
    """The advantage of every token, by loops."""
    result = [[0.0] * len(mask) for mask in masks]
    for sample, position, kind, value in steps:
        peers = [x for x in steps if group_of[x[0]] == group_of[sample] and x[2] == kind and not math.isnan(x[3])]
        numbers = [x[3] for x in peers]
        if math.isnan(value) or len(set(numbers)) < 2 or len({x[0] for x in peers}) < 2:
            continue
        mean = math.fsum(numbers) / len(numbers)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))
        reward = (value - mean) / (deviation + EPS if cfg.std else 1.0)
        actions = [t for t, m in enumerate(masks[sample]) if m and t <= position]
        for age, t in enumerate(reversed(actions)):
            result[sample][t] += cfg.gamma**age * reward
    return result


@pytest.mark.parametrize("cfg", [GrpoProcessAdvantage(), GrpoProcessAdvantage(gamma=0.8, std=False)])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(1, 7), num_steps=st.integers(0, 25))
def test_any_packing_equals_a_loop(cfg, seed, size, num_steps):
    rng = random.Random(seed)
    masks = [[0] + [int(rng.random() < 0.6) for _ in range(rng.randrange(1, 12))] for _ in range(size)]
    group_of = [rng.randrange(3) for _ in masks]
    group_of = [sorted(set(group_of)).index(group) for group in group_of]
    steps = []
    for _ in range(num_steps):
        sample = rng.randrange(size)
        value = NAN if rng.random() < 0.1 else round(rng.gauss(0, 1), 1)
        steps.append((sample, rng.randrange(len(masks[sample])), rng.choice("abc"), value))
    layout, order = [], list(range(size))
    rng.shuffle(order)
    while order:
        cut = rng.randint(1, len(order))
        layout, order = [*layout, order[:cut]], order[cut:]
    rewards = [0.0] * size  # equal outcomes add nothing
    got = advantages(masks, scores_of(masks, group_of, rewards, steps), cfg, layout)
    expected = slow_process(steps, group_of, masks, cfg)
    for sample, row in got.items():
        # float64 sums; rewards are tenths, so deviations are .03 at least.
        np.testing.assert_allclose(row, expected[sample], rtol=1e-9, atol=1e-9)


def test_a_group_of_one_and_equal_steps_are_exactly_zero():
    """Several steps of one sample are no group; a kind without spread is no signal; NaN abstains."""
    sample_N, kinds = np.array([0, 0, 1, 1, 2, 1, 2]), ["a"] * 5 + ["b"] * 2
    value_N = np.array([1.0, 5, 0.1, 0.1, 0.1, 3, NAN])
    assert normalised(value_N, kinds, sample_N, np.array([0, 1, 1])[sample_N], True).tolist() == [0] * 7
    assert normalised(np.array([]), [], np.array([]), np.array([]), True).tolist() == []


def test_statistics_see_a_sample_that_has_no_gradient():
    scores = scores_of([[0, 1], [0, 1]], [0, 0], [NAN, 1.0], [(0, 1, "k", 0.0), (1, 1, "k", 2.0)])
    rewards = grpo_process(scores, GrpoProcessAdvantage(std=False))
    assert dict(zip(rewards.sample.tolist(), rewards.value.tolist(), strict=True)) == {0: -1.0, 1: 1.0}
    credit, _ = estimate_advantages(scores, AlgorithmConfig(adv_estimator=GrpoProcessAdvantage()))
    assert credit.active.tolist() == [False, True]


def test_a_reward_between_two_actions_is_that_of_the_earlier():
    mask = np.array([0, 1, 0, 1, 1], bool)
    placed = at_actions(np.array([2, 0, 4, 4]), np.array([3.0, 5.0, 1.0, 1.5]), mask)
    assert placed.tolist() == [0, 3, 0, 0, 2.5]
    assert at_actions(np.array([1]), np.array([1.0]), np.zeros(2, bool)).tolist() == [0, 0]


@pytest.mark.parametrize("position", [5, -1])
def test_a_reward_outside_its_sample_is_refused_by_name(position):
    credit = Credit(np.zeros(1), np.ones(1, bool), TokenRewards(np.array([0]), np.array([position]), np.array([1.0])))
    with pytest.raises(ValueError, match=f"sample 0: there is a reward at token {position}, but the sample has 5 tok"):
        packed([[0, 1, 0, 1, 1]], credit, [[0]])


# The KL in the reward.


def with_logps(columns, logp, logp_ref):
    """Columns with the log-probs of each token, by sample and position."""
    return [
        replace(
            c,
            advantage_T=c.advantage_T.double(),
            logp_old_T=torch.where(c.action_mask_T, logp, NAN).double(),
            logp_ref_T=torch.where(c.action_mask_T, logp_ref, NAN).double(),
        )
        for c in columns
    ]


def test_golden_kl_in_the_reward():
    """k1 with the coefficient 0.5: each action pays half of log pi - log pi_ref = 1 nat, the last one gets the reward.
    What stands where there is no action, NaN, has no effect."""
    kl = {"estimator": "k1", "place": "reward"}
    cfg = AlgorithmConfig(adv_estimator=ReinforcePlusPlusAdvantage(whiten=False), kl=kl)
    masks = [[0, 1, 0, 1, 1], [0, 1, 1]]
    credit, metrics = estimate_advantages(scores_of(masks, [0, 0], [2.0, 2.0]), cfg)
    assert credit.active.all() and metrics["groups/zero_signal"] == 0, "a KL gives every group a signal"
    order, columns = packed(masks, credit, [[1], [0]])
    columns, total = token_advantages(with_logps(columns, -1.0, -2.0), cfg, 0.5, one_rank)
    got = by_sample(order, columns, masks)
    assert got == {0: [0, 0.5, 0, 1.0, 1.5], 1: [0, 1.0, 1.5]} and total.item() == 5.0


def test_without_a_divergence_the_kl_in_the_reward_changes_nothing():
    cfg = AlgorithmConfig(adv_estimator=ReinforcePlusPlusAdvantage(), kl={"estimator": "k1", "place": "reward"})
    masks, rewards = [[0, 1, 1], [0, 1, 0, 1, 1], [0, 1]], [1.0, 0.0, 3.0]
    credit, _ = estimate_advantages(scores_of(masks, [0, 1, 2], rewards), cfg)
    plain, _ = estimate_advantages(
        scores_of(masks, [0, 1, 2], rewards), AlgorithmConfig(adv_estimator=ReinforcePlusPlusAdvantage())
    )
    order, columns = packed(masks, credit, [[0, 1], [2]])
    columns, _ = token_advantages(with_logps(columns, -1.0, -1.0), cfg, 0.5, one_rank)
    for sample, row in by_sample(order, columns, masks).items():
        # float64: only the order of additions differs.
        assert row == pytest.approx([plain.advantages[sample] * m for m in masks[sample]], rel=1e-12)


# The optimal token baseline.

OTB = OptimalTokenBaselineAdvantage()


def above_baselines(masks, scores, energies, layout, sum_over_ranks=one_rank):
    """The advantages of each sample's tokens, from the driver's batch to the ranks.

    Args:
        energies: at each token of each sample, with anything where there is no action.
    """
    cfg = AlgorithmConfig(adv_estimator=OTB, correction=None)
    credit, _ = estimate_advantages(scores, cfg)
    order = [sample for micro in layout for sample in micro]
    place = {sample: position for position, sample in enumerate(order)}
    rewards, sums = credit.token_rewards, credit.sums
    own = [k for k, sample in enumerate(rewards.sample.tolist()) if sample in place]
    numbered = np.array([place[sample] for sample in rewards.sample[own].tolist()], np.int64)
    made = [[TrainSample(str(i), tokens_of(masks[i]), credit.advantages[i], 1.0, i) for i in micro] for micro in layout]
    share = replace(
        share_of([made], alignment=4),
        token_rewards=TokenRewards(numbered, rewards.position[own], rewards.value[own]),
        sums=sums._replace(first=sums.first[order], stop=sums.stop[order]),
    )
    [minibatch] = pack(share)
    columns = [
        replace(
            batch.columns,
            advantage_T=batch.columns.advantage_T.double(),
            energy_T=column_of(batch, {i: np.array(energies[i], float) for i in order}),
        )
        for batch in minibatch
    ]
    columns, _ = token_advantages(columns, cfg, 0.0, sum_over_ranks)
    return by_sample(order, columns, masks)


def test_golden_the_optimal_token_baseline():
    """The energies of the second actions are what both have reached by then; the third one has no other answer."""
    masks = [[0, 1, 0, 1], [0, 1, 1, 1], [0, 1]]
    energies = [[NAN, 0.5, NAN, 0.5], [NAN, 0.25, 0.75, 2.0], [NAN, 0.3]]
    got = above_baselines(masks, scores_of(masks, [0, 0, 1], [1.0, 0.5, 1.0]), energies, [[2, 0], [1]])
    first, second = (0.5 + 0.25 / 2) / 0.75, (1 + 1 / 2) / 2
    assert got[0] == pytest.approx([0, 1 - first, 0, 1 - second], rel=1e-12)
    assert got[1] == pytest.approx([0, 0.5 - first, 0.5 - second, 0.5], rel=1e-12)
    assert got[2] == [0, 0], "a group of one has no signal"


def test_equal_rewards_and_tokens_without_energy_have_exactly_no_advantage():
    masks, tenths = [[0, 1, 1, 1], [0, 1, 1]], [[0, 0.1, 0.3, 0.7], [0, 0.2, 0.6]]
    assert above_baselines(masks, scores_of(masks, [0, 0], [0.1, 0.1]), tenths, [[0, 1]]) == {
        0: [0.0] * 4,
        1: [0.0] * 3,
    }
    certain = [[0, 0, 0.3, 0.7], [0, 0, 0.6]]
    got = above_baselines(masks, scores_of(masks, [0, 0], [1.0, 0.0]), certain, [[0, 1]])
    assert np.isfinite(got[0]).all() and got[0][2] == pytest.approx(1 - 0.3 / 0.9)


def slow_baselines(masks, group_of, rewards, energies):
    """arXiv:2602.07078, by loops over the groups, the numbers of actions and the answers."""
    actions = [[t for t, m in enumerate(mask) if m] for mask in masks]
    result = [[0.0] * len(mask) for mask in masks]
    for i, group in enumerate(group_of):
        peers = [j for j, other in enumerate(group_of) if other == group and not math.isnan(rewards[j])]
        if math.isnan(rewards[i]) or len({rewards[j] for j in peers}) < 2:
            continue
        for k, t in enumerate(actions[i]):
            reach = [j for j in peers if len(actions[j]) > k]
            paths = [math.fsum(energies[j][u] for u in actions[j][: k + 1]) for j in reach]
            total = math.fsum(w * rewards[j] for w, j in zip(paths, reach, strict=True))
            baseline = total / math.fsum(paths) if len(reach) > 1 else 0.0
            result[i][t] = rewards[i] - baseline
    return result


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(1, 8))
def test_any_packing_and_any_split_over_ranks_equal_a_loop(seed, size):
    rng = random.Random(seed)
    masks = [[0] + [int(rng.random() < 0.6) for _ in range(rng.randrange(1, 12))] for _ in range(size)]
    group_of = sorted(rng.randrange(3) for _ in masks)
    group_of = [sorted(set(group_of)).index(group) for group in group_of]
    rewards = [NAN if rng.random() < 0.1 else round(rng.random(), 1) for _ in masks]
    energies = [[rng.random() for _ in mask] for mask in masks]
    scores = scores_of(masks, group_of, rewards)
    active = estimate_advantages(scores, AlgorithmConfig(adv_estimator=OTB))[0].active
    order = [i for i in range(size) if active[i]]
    rng.shuffle(order)
    if len(order) < 2:
        return
    cut = rng.randrange(1, len(order))
    expected = slow_baselines(masks, group_of, rewards, energies)
    for sample, row in above_baselines(masks, scores, energies, [order[:cut], order[cut:]]).items():
        np.testing.assert_allclose(row, expected[sample], rtol=1e-9, atol=1e-9)
    # Two ranks: each sees the sum of both, which a first pass has collected.
    parts = [[order[:cut]], [order[cut:]]]
    sums = []
    for layout in parts:
        above_baselines(masks, scores, energies, layout, lambda x: sums.append(x.clone()) or x)
    for layout in parts:
        for sample, row in above_baselines(masks, scores, energies, layout, lambda x: sum(sums)).items():
            np.testing.assert_allclose(row, expected[sample], rtol=1e-9, atol=1e-9)
