from __future__ import annotations

import math
import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.outcomes import reinforce_plus_plus
from megatron_rl.algorithms.returns import gae, returns_to_go, reverse_scan
from megatron_rl.algorithms.value_loss import explained_variance
from megatron_rl.algorithms.whitening import moments, whiten
from megatron_rl.config.advantages import GaeAdvantage

NAN = float("nan")
EPS = 1e-6  # what is added to every standard deviation
float64 = torch.float64


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=float64)


def flags(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


# Slow references: token by token, Python's floats.


def slow_gae(rewards, values, mask, gamma, lam):
    """Of one sample; None where there is no action."""
    result, next_value, next_advantage = [None] * len(mask), 0.0, 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value, result[t] = values[t], next_advantage
    return result


def slow_whitened(rows):
    """Over the actions of all rows; 0 elsewhere."""
    tokens = [x for row in rows for x in row if x is not None]
    mean = math.fsum(tokens) / max(len(tokens), 1)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in tokens) / max(len(tokens), 1))
    return [[0.0 if x is None else (x - mean) / (deviation + EPS) for x in row] for row in rows]


def sample_of(rng: random.Random) -> dict:
    """A sample with forced tokens between its actions; NaN where nothing may look."""
    mask = [rng.random() < 0.6 for _ in range(rng.randrange(1, 12))]
    junk = lambda keep, x: x if keep else NAN  # noqa: E731
    return {
        "mask": mask,
        "reward": [junk(m, rng.choice([0.0, 0.0, rng.gauss(0, 1)])) for m in mask],
        "value": [junk(m, rng.gauss(0, 1)) for m in mask],
    }


def pack(samples: list[dict], first: int = 0) -> dict[str, torch.Tensor]:
    owner = [first + i for i, s in enumerate(samples) for _ in s["mask"]]
    columns = {name: tensor([x for s in samples for x in s[name]]) for name in ("reward", "value")}
    mask = flags([x for s in samples for x in s["mask"]])
    return {**columns, "mask": mask, "sample": torch.tensor(owner, dtype=torch.int64)}


def run_gae(row, cfg, *ranks):
    return gae(row["reward"], row["value"], row["mask"], row["sample"], cfg, *ranks)


def on_ranks(num_ranks: int, work):
    """[work(rank, sum_over_ranks)] with a real sum over `num_ranks` threads that meet at a barrier."""
    barrier, slots, results = threading.Barrier(num_ranks, timeout=60), [None] * num_ranks, [None] * num_ranks

    def body(rank: int) -> None:
        def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
            slots[rank] = x
            barrier.wait()
            total = torch.stack([torch.as_tensor(s) for s in slots]).sum(0)
            barrier.wait()
            return total

        results[rank] = work(rank, sum_over_ranks)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result is not None for result in results)
    return results


# Golden numbers, by hand.


def test_golden_gae():
    """gamma .5, lambda .5: d = (1 + .5 x 2 - 1, 2 - 2) = (1, 0) and A = d; a forced token between changes nothing."""
    row = {
        "reward": tensor([NAN, 1.0, NAN, 2.0, 4.0]),
        "value": tensor([NAN, 1.0, 77.0, 2.0, 1.0]),
        "mask": flags([0, 1, 0, 1, 1]),
        "sample": torch.tensor([0, 0, 0, 0, 1]),
    }
    advantage_T, return_T = run_gae(row, GaeAdvantage(gamma=0.5, lam=0.5))
    raw = [1.0, 0.0, 3.0]
    mean, deviation = sum(raw) / 3, math.sqrt(sum((x - sum(raw) / 3) ** 2 for x in raw) / 3)
    expected = [0, (1 - mean) / (deviation + EPS), 0, (0 - mean) / (deviation + EPS), (3 - mean) / (deviation + EPS)]
    np.testing.assert_allclose(advantage_T, expected, rtol=1e-12)
    assert return_T.tolist() == [0, 2, 0, 2, 4]


def test_golden_lambdas_of_their_own():
    """lambda 0 for the policy: A = d = (0 + .5 - 1, 3 - .5); 1 for the critic: targets are the rewards to go."""
    row = {"reward": tensor([0.0, 3]), "value": tensor([1.0, 0.5]), "mask": flags([1, 1]), "sample": torch.zeros(2)}
    advantage_T, return_T = run_gae(row, GaeAdvantage(lam=0.0, lam_critic=1.0))
    assert return_T.tolist() == [3, 3]
    # Two numbers whiten to -1 and 1, but for 1e-6 over 1.5.
    np.testing.assert_allclose(advantage_T, [-1, 1], rtol=1e-6)


def test_golden_length_adaptive_lambda():
    """alpha .5: 1 - 1 / (.5 x 4) = .5 for four actions, 0 for two (1 - 1 = 0) and for one (negative)."""
    mask, reward = [1] * 7, [0.0, 0, 0, 1, 0, 1, 5]
    row = {"reward": tensor(reward), "value": tensor([0.0] * 7), "mask": flags(mask)}
    row["sample"] = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    advantage_T, return_T = run_gae(row, GaeAdvantage(length_adaptive_alpha=0.5, lam_critic=1.0))
    raw = [0.125, 0.25, 0.5, 1, 0, 1, 5]
    np.testing.assert_allclose(advantage_T, slow_whitened([raw])[0], rtol=1e-12)
    assert return_T.tolist() == [1, 1, 1, 1, 1, 1, 5]


def test_golden_returns_to_go():
    reward_T, mask_T = tensor([1.0, NAN, 4.0, 8.0, 2.0]), flags([1, 0, 1, 1, 1])
    got = returns_to_go(reward_T, mask_T, torch.tensor([3, 3, 3, 3, 5]), gamma=0.5)
    np.testing.assert_allclose(got, slow_whitened([[5.0, None, 8.0, 8.0, 2.0]])[0], rtol=1e-12)


# Loops.


@pytest.mark.parametrize(
    "cfg",
    [
        GaeAdvantage(),
        GaeAdvantage(gamma=0.9, lam=0.7),
        GaeAdvantage(gamma=0.97, lam=0.95, lam_critic=1.0),
        GaeAdvantage(length_adaptive_alpha=0.3, lam_critic=0.5),
    ],
)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(0, 7))
def test_gae_equals_a_loop_over_tokens(cfg, seed, size):
    rng = random.Random(seed)
    samples = [sample_of(rng) for _ in range(size)]
    advantage_T, return_T = run_gae(pack(samples), cfg)
    raw, targets = [], []
    for s in samples:
        n = sum(s["mask"])
        lam = cfg.lam
        if cfg.length_adaptive_alpha is not None and n:
            lam = max(0.0, 1 - 1 / (cfg.length_adaptive_alpha * n))
        raw.append(slow_gae(s["reward"], s["value"], s["mask"], cfg.gamma, lam))
        critic = slow_gae(
            s["reward"], s["value"], s["mask"], cfg.gamma, cfg.lam if not cfg.lam_critic else cfg.lam_critic
        )
        targets += [0.0 if a is None else a + v for a, v in zip(critic, s["value"], strict=True)]
    expected = [x for row in slow_whitened(raw) for x in row]
    # float64: other orders of additions; a single action whitens to exactly 0 in both.
    np.testing.assert_allclose(advantage_T, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(return_T, targets, rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(0, 7), gamma=st.sampled_from([1.0, 0.9, 0.5]))
def test_returns_to_go_equal_a_loop_and_gae_without_values(seed, size, gamma):
    rng = random.Random(seed)
    samples = [sample_of(rng) for _ in range(size)]
    row = pack(samples)
    got = returns_to_go(row["reward"], row["mask"], row["sample"], gamma)
    zeros = [[0.0] * len(s["mask"]) for s in samples]
    raw = [slow_gae(s["reward"], z, s["mask"], gamma, 1.0) for s, z in zip(samples, zeros, strict=True)]
    expected = [x for r in slow_whitened(raw) for x in r]
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)
    row["value"] = torch.zeros_like(row["value"])
    torch.testing.assert_close(run_gae(row, GaeAdvantage(gamma=gamma))[0], got, rtol=0, atol=0)


@settings(max_examples=60, deadline=None)
@given(
    x=st.lists(st.tuples(st.floats(-5, 5), st.sampled_from([0.0, 0.5, 0.9, 1.0])), max_size=70),
)
def test_the_scan_equals_the_recurrence(x):
    expected, y = [], 0.0
    for value, decay in reversed(x):
        y = value + decay * y
        expected.append(y)
    got = reverse_scan(tensor([v for v, _ in x]), tensor([d for _, d in x]))
    # float64 sums of up to 70 terms of size 5, in another order.
    np.testing.assert_allclose(got, expected[::-1], rtol=1e-12, atol=1e-12)


def test_without_whitening_the_recurrences_stay_as_they_are():
    rng = random.Random(11)
    samples = [sample_of(rng) for _ in range(6)]
    row = pack(samples)
    advantage_T, return_T = run_gae(row, GaeAdvantage(gamma=0.9, lam=0.8, whiten=False))
    slow = [slow_gae(s["reward"], s["value"], s["mask"], 0.9, 0.8) for s in samples]
    expected = [0.0 if x is None else x for x in sum(slow, [])]
    # float64 sums of a few terms in another order.
    np.testing.assert_allclose(advantage_T, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(return_T, run_gae(row, GaeAdvantage(gamma=0.9, lam=0.8))[1], rtol=1e-12)
    # Rewards to go are what GAE with lambda 1 makes of them without a critic.
    no_values = {**row, "value": torch.zeros_like(row["value"])}
    to_go_T = returns_to_go(row["reward"], row["mask"], row["sample"], 0.9, whitened=False)
    plain_T, _ = run_gae(no_values, GaeAdvantage(gamma=0.9, whiten=False))
    np.testing.assert_allclose(to_go_T, plain_T, rtol=1e-12, atol=1e-12)


def test_outcomes_alone_are_the_sample_level_estimator():
    """REINFORCE++ at tokens with gamma 1 is REINFORCE++."""
    rng = random.Random(4)
    samples = [sample_of(rng) for _ in range(9)]
    samples[3]["mask"] = [True] + samples[3]["mask"][1:]
    row = pack(samples)
    reward_S = np.array([rng.gauss(0, 1) for _ in samples])
    num_actions = np.array([sum(s["mask"]) for s in samples])
    reward_T = torch.zeros_like(row["reward"])
    for sample in np.flatnonzero(num_actions):  # the reward is at the last action
        actions = (row["mask"] & (row["sample"] == int(sample))).nonzero()
        reward_T[actions[-1]] = reward_S[sample]
    expected = tensor(reinforce_plus_plus(reward_S, num_actions, True))[row["sample"]] * row["mask"]
    # float64: only the order of additions differs.
    torch.testing.assert_close(returns_to_go(reward_T, row["mask"], row["sample"]), expected, rtol=1e-12, atol=1e-12)


# Several ranks.


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("estimator", ["gae", "returns_to_go"])
def test_whitening_does_not_depend_on_the_ranks(num_ranks, estimator):
    rng = random.Random(7)
    samples = [sample_of(rng) for _ in range(11)]
    cuts = {2: [0, 4, 11], 3: [0, 7, 7, 11]}[num_ranks]  # of three ranks one holds nothing

    def run(row, *ranks):
        if estimator == "gae":
            return run_gae(row, GaeAdvantage(gamma=0.9, lam=0.8), *ranks)[0]
        return returns_to_go(row["reward"], row["mask"], row["sample"], 0.9, *ranks)

    whole = run(pack(samples))
    assert whole.abs().max() > 0.5
    parts = on_ranks(num_ranks, lambda rank, total: run(pack(samples[cuts[rank] : cuts[rank + 1]], cuts[rank]), total))
    # float64: only the order of additions differs.
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cuts", [(0, 12, 31), (0, 12, 31, 31)])
def test_explained_variance_does_not_depend_on_the_ranks(cuts):
    generator = torch.Generator().manual_seed(1)
    values, returns = (5 + torch.randn(31, generator=generator, dtype=float64) for _ in range(2))
    mask = torch.rand(31, generator=generator) < 0.8
    whole = explained_variance(values, returns, mask)

    def on(rank, total):
        piece = slice(cuts[rank], cuts[rank + 1])
        return explained_variance(values[piece], returns[piece], mask[piece], total)

    for part in on_ranks(len(cuts) - 1, on):
        # float64: only the order of additions differs.
        assert part.item() == pytest.approx(whole.item(), rel=1e-12)


def test_moments_far_from_zero_do_not_cancel():
    x = 1e8 + torch.arange(1000, dtype=float64) / 1000
    mean, variance = moments(x, lambda total: total)
    # The variance of 0, .001, ... .999; 1e8 has a resolution of 1.5e-8 in float64.
    assert mean.item() == pytest.approx(1e8 + 0.4995, rel=1e-15)
    assert variance.item() == pytest.approx((1000**2 - 1) / 12e6, rel=1e-6)


def test_whitening_equal_numbers_and_nothing():
    # The float64 mean of a thousand 0.1 is not 0.1.
    assert whiten(torch.full((1000,), 0.1, dtype=float64)).tolist() == [0] * 1000
    assert whiten(tensor([])).tolist() == [] and whiten(tensor([5.0])).tolist() == [0]
    assert whiten(torch.zeros(3)).dtype == float64


# Edges.


def test_no_actions_and_an_empty_row():
    for length in (0, 3):
        row = {name: tensor([NAN] * length) for name in ("reward", "value")}
        row |= {"mask": flags([0] * length), "sample": torch.zeros(length, dtype=torch.int64)}
        for x_T in run_gae(row, GaeAdvantage(length_adaptive_alpha=0.05, lam_critic=1.0)):
            assert x_T.tolist() == [0] * length
        assert returns_to_go(row["reward"], row["mask"], row["sample"]).tolist() == [0] * length


@pytest.mark.parametrize("bad", [NAN, math.inf])
@pytest.mark.parametrize("column", ["reward", "value"])
def test_what_is_not_finite_names_its_sample(column, bad):
    row = {"reward": tensor([1.0] * 3), "value": tensor([1.0] * 3), "mask": flags([0, 1, 1])}
    row["sample"] = torch.tensor([4, 4, 9])
    row[column][2] = bad
    with pytest.raises(ValueError, match=rf"the {column} of sample 9 is {bad} at packed position 2"):
        run_gae(row, GaeAdvantage())


def test_a_sample_in_two_pieces_is_refused():
    with pytest.raises(ValueError, match="must be adjacent"):
        returns_to_go(torch.zeros(3), flags([1, 1, 1]), torch.tensor([0, 1, 0]))


def test_the_type_is_the_rewards_and_no_gradient_flows():
    value_T = torch.zeros(2, requires_grad=True)
    advantage_T, return_T = gae(torch.ones(2), value_T, flags([1, 1]), torch.zeros(2), GaeAdvantage(gamma=0.5))
    assert advantage_T.dtype == return_T.dtype == torch.float32
    assert not advantage_T.requires_grad and not return_T.requires_grad
