from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms import PackedColumns, policy_objective, supervised_objective
from megatron_rl.algorithms.correction import truncated_weight
from megatron_rl.algorithms.dual_clip import dual_clip
from megatron_rl.config.algorithm import AlgorithmConfig, TruncatedCorrection
from megatron_rl.types import Denominators

BOUNDS = {"low": 0.2, "high": 0.28, "c": 3.0}


def columns_of(mask, advantage, old, rollout=None, sample=None) -> PackedColumns:
    old = torch.tensor(old, dtype=torch.float64)
    return PackedColumns(
        action_mask_T=torch.tensor(mask, dtype=torch.bool),
        advantage_T=torch.tensor(advantage, dtype=torch.float64),
        logp_old_T=old,
        logp_rollout_T=old if rollout is None else torch.tensor(rollout, dtype=torch.float64),
        sample_T=torch.tensor(sample or [0] * len(mask)),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.56, 0.0),  # clipped above
        (0.5, 2.0, -1.0, -2.0),  # a better action got rarer: not clipped
        (0.5, -2.0, 1.6, 0.0),  # clipped below
        (1.5, -2.0, 3.0, 2.0),
        (5.0, -1.0, 3.0, 0.0),  # bounded at c |A|
        (5.0, 0.0, 0.0, 0.0),
    ],
)
def test_dual_clip_golden(ratio, advantage, loss, slope):
    ratio_T = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    loss_T = dual_clip(ratio_T, torch.tensor([advantage], dtype=torch.float64), **BOUNDS)
    loss_T.sum().backward()
    # float64 rounding.
    assert loss_T.item() == pytest.approx(loss, abs=1e-12)
    assert ratio_T.grad.item() == pytest.approx(slope, abs=1e-12)


def test_dual_clip_refuses_a_bound_below_the_unchanged_policy():
    with pytest.raises(ValueError, match="c > 1"):
        dual_clip(torch.ones(1), torch.ones(1), low=0.2, high=0.2, c=1.0)


def test_truncated_weight_golden():
    old = torch.tensor([0.0, math.log(1.5), math.log(8.0), -1.0, 900.0], requires_grad=True)
    weight = truncated_weight(old, torch.zeros(5), cap=2.0)
    torch.testing.assert_close(weight, torch.tensor([1.0, 1.5, 2.0, math.exp(-1), 2.0]))
    assert not weight.requires_grad


def test_policy_objective_golden():
    """Three actions of four tokens, the denominator of a larger mini-batch: 10."""
    old, rollout = [-1.0, -2.0, -1.0, 0.0], [-1.0, -2.0 - math.log(1.5), -1.0 - math.log(4.0), 0.0]
    columns = columns_of([1, 1, 1, 0], [1.0, -2.0, -1.0, 5.0], old, rollout)
    logp = torch.tensor(old, dtype=torch.float64) + torch.tensor([2.0, 0.5, 5.0, 9.0]).log()
    loss, metrics = policy_objective(AlgorithmConfig())(logp, columns, Denominators(10, 2))
    # -1.2 (clipped) x 1, 1.6 (clipped) x 1.5, 3.0 (bounded) x 2.0 (capped)
    assert loss.item() == pytest.approx((-1.2 + 1.6 * 1.5 + 3.0 * 2.0) / 10)
    got = {name: (metric.value.item(), metric.reduction) for name, metric in metrics.items()}
    k3 = (1 - math.log(2)) + (-0.5 - math.log(0.5)) + (4 - math.log(5))
    for name, value in {
        "loss": 0.72,
        "pg_clipfrac": 0.2,
        "pg_clipfrac_lower": 0.1,
        "ppo_kl": k3 / 10,
        "ratio/mean": 0.75,
        "correction/mean": 0.45,
        "correction/capped": 0.1,
    }.items():
        assert got.pop(name) == (pytest.approx(value, rel=1e-6), "sum"), name
    assert got == {"ratio/max": (pytest.approx(5.0), "max"), "ratio/min": (pytest.approx(0.5), "min")}


def test_correction_can_be_off():
    columns = columns_of([1], [1.0], [-1.0], [-9.0])
    objective = policy_objective(AlgorithmConfig(correction=None))
    loss, metrics = objective(torch.tensor([-1.0], dtype=torch.float64), columns, Denominators(1, 1))
    assert loss.item() == -1.0 and not any(name.startswith("correction") for name in metrics)


def reference_loss(logp, columns, num_tokens, cfg) -> float:
    """Token by token, in Python's float64."""
    total = 0.0
    for t in range(len(logp)):
        if not columns.action_mask_T[t]:
            continue
        advantage, old = columns.advantage_T[t].item(), columns.logp_old_T[t].item()
        ratio = math.exp(logp[t].item() - old)
        clipped = min(max(ratio, 1 - cfg.loss.clip_ratio_low), 1 + cfg.loss.clip_ratio_high)
        loss = max(-advantage * ratio, -advantage * clipped)
        if advantage < 0:
            loss = min(loss, -advantage * cfg.loss.clip_ratio_c)
        total += loss * min(math.exp(old - columns.logp_rollout_T[t].item()), cfg.correction.cap)
    return total / num_tokens


def random_columns(length: int, seed: int) -> tuple[torch.Tensor, PackedColumns]:
    random_ = torch.Generator().manual_seed(seed)
    normal = lambda: torch.randn(length, generator=random_, dtype=torch.float64)  # noqa: E731
    mask = torch.rand(length, generator=random_) < 0.7
    return normal(), PackedColumns(mask, normal(), normal(), normal(), torch.zeros(length, dtype=torch.int64))


@pytest.mark.parametrize("seed", range(5))
def test_equals_a_loop_over_tokens(seed):
    cfg = AlgorithmConfig(correction=TruncatedCorrection(cap=1.7))
    logp, columns = random_columns(60, seed)
    loss, _ = policy_objective(cfg)(logp, columns, Denominators(97, 5))
    # float64 sums of 60 terms.
    assert loss.item() == pytest.approx(reference_loss(logp, columns, 97, cfg), rel=1e-12)


@pytest.mark.parametrize("objective", [policy_objective(AlgorithmConfig()), supervised_objective()])
def test_gradcheck(objective):
    logp, columns = random_columns(20, seed=11)
    logp.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: objective(x, columns, Denominators(13, 2))[0], logp)


def test_on_policy_is_exactly_one_and_zero():
    logp, columns = random_columns(50, seed=3)
    columns = replace(columns, logp_old_T=logp.float(), logp_rollout_T=logp.float())
    num_tokens = int(columns.action_mask_T.sum())
    _, metrics = policy_objective(AlgorithmConfig())(logp.float(), columns, Denominators(num_tokens, 1))
    values = {name: metric.value.item() for name, metric in metrics.items()}
    assert (values["ratio/mean"], values["ratio/max"], values["ratio/min"], values["ppo_kl"]) == (1, 1, 1, 0)
    assert values["pg_clipfrac"] == values["pg_clipfrac_lower"] == 0


V = 7
"""Vocabulary of the model below: log p(next | token) = log softmax(theta[token])."""


def sample_of(rng: random.Random) -> dict:
    length = rng.randrange(2, 9)
    return {
        "ids": [rng.randrange(V) for _ in range(length)],
        "mask": [False] + [rng.random() < 0.7 for _ in range(length - 1)],
        "old": [rng.gauss(-2, 0.5) for _ in range(length)],
        "rollout": [rng.gauss(-2, 0.5) for _ in range(length)],
        "advantage": rng.gauss(0, 1),
    }


def pack(samples: list[dict], theta, padding: int) -> tuple[torch.Tensor, PackedColumns]:
    """Rows of predicted tokens; the last position of each sample and the padding hold NaN and no action."""
    nan, logp, mask, advantage, old, rollout, owner = float("nan"), [], [], [], [], [], []
    for index, s in enumerate(samples):
        inner = torch.log_softmax(theta[s["ids"][:-1]], -1)[torch.arange(len(s["ids"]) - 1), s["ids"][1:]]
        tail = 1 + padding
        logp += [inner, torch.full((tail,), nan, dtype=torch.float64)]
        mask += s["mask"][1:] + [False] * tail
        advantage += [s["advantage"]] * len(inner) + [nan] * tail
        old += s["old"][1:] + [math.inf] * tail
        rollout += s["rollout"][1:] + [-math.inf] * tail
        owner += [index] * (len(inner) + tail)
    empty = theta.flatten()[:0]  # keeps the graph when the micro-batch holds nothing
    return torch.cat([empty, *logp]), columns_of(mask, advantage, old, rollout, owner)


def gradient(microbatches: list[list[dict]], objective, denominators, padding: int):
    """Gradient of theta and the reported loss, added up over the micro-batches."""
    theta = torch.randn(V, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theta.requires_grad_()
    total = 0.0
    for samples in microbatches:
        loss, metrics = objective(*pack(samples, theta, padding), denominators)
        loss.backward()
        total += metrics["loss"].value.item()
    return theta.grad, total


@pytest.mark.parametrize("objective", [policy_objective(AlgorithmConfig()), supervised_objective()])
def test_gradient_does_not_depend_on_micro_batches_order_or_padding(objective):
    rng = random.Random(5)
    samples = [sample_of(rng) for _ in range(12)]
    denominators = Denominators(sum(sum(s["mask"]) for s in samples), len(samples))
    expected, loss = gradient([samples], objective, denominators, padding=0)
    assert expected.isfinite().all() and expected.abs().max() > 1e-3
    for num_microbatches, padding in [(1, 3), (2, 0), (5, 2), (12, 1), (20, 0)]:  # 20: eight are empty
        rng.shuffle(samples)
        split = [samples[m::num_microbatches] for m in range(num_microbatches)]
        got, got_loss = gradient(split, objective, denominators, padding)
        # float64: only the order of additions differs.
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
        assert got_loss == pytest.approx(loss, rel=1e-9)


def test_an_empty_micro_batch_gives_the_identities():
    columns = columns_of([0, 0], [1.0, 1.0], [-1.0, -1.0])
    logp = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    loss, metrics = policy_objective(AlgorithmConfig())(logp, columns, Denominators(3, 1))
    loss.backward()
    assert loss.item() == 0 and logp.grad.tolist() == [0, 0]
    assert metrics["ratio/max"].value.item() == -math.inf and metrics["ratio/min"].value.item() == math.inf
    assert all(metric.value.item() == 0 for metric in metrics.values() if metric.reduction == "sum")


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("objective", [policy_objective(AlgorithmConfig()), supervised_objective()])
def test_what_stands_at_no_action_reaches_neither_loss_nor_gradient(objective, junk):
    columns = columns_of([1, 0], [1.0, junk], [-1.0, junk], [-1.0, -junk])
    logp = torch.tensor([-1.0, junk], dtype=torch.float64, requires_grad=True)
    loss, metrics = objective(logp, columns, Denominators(2, 1))
    loss.backward()
    assert abs(loss.item()) == 0.5 and logp.grad.tolist() == [-0.5, 0.0]
    assert all(metric.value.isfinite() for metric in metrics.values())


@pytest.mark.parametrize(("gap", "advantage"), [(500.0, 1.0), (500.0, -1.0), (-500.0, 1.0), (-500.0, -1.0)])
def test_a_huge_log_ratio_stays_finite(gap, advantage):
    columns = columns_of([1], [advantage], [-600.0])
    columns = replace(columns, logp_old_T=columns.logp_old_T.float())  # in fp32 exp(500) is infinite
    logp = torch.tensor([-600.0 + gap], requires_grad=True)
    loss, metrics = policy_objective(AlgorithmConfig())(logp, columns, Denominators(1, 1))
    loss.backward()
    assert abs(loss.item()) <= 3.0 and logp.grad.item() == 0
    assert all(metric.value.isfinite() for metric in metrics.values())


@pytest.mark.parametrize("bad", [float("nan"), -math.inf])
@pytest.mark.parametrize("column", ["logp", "logp_old", "logp_rollout"])
def test_a_log_prob_that_is_not_finite_names_its_sample(column, bad):
    values = {name: [-1.0, -1.0, -1.0] for name in ("logp", "logp_old", "logp_rollout")}
    values[column][1] = bad
    columns = columns_of([1, 1, 1], [1.0] * 3, values["logp_old"], values["logp_rollout"], sample=[3, 4, 4])
    with pytest.raises(ValueError, match=rf"sample 4 of the micro-batch .* position 1 .*{column} {bad}"):
        logp = torch.tensor(values["logp"], dtype=torch.float64)
        policy_objective(AlgorithmConfig())(logp, columns, Denominators(3, 2))


def test_supervised_golden():
    columns = columns_of([1, 0, 1], [0.0] * 3, [0.0] * 3)
    logp = torch.tensor([-1.0, math.nan, -3.0], dtype=torch.float64)
    loss, metrics = supervised_objective()(logp, columns, Denominators(8, 2))
    assert loss.item() == metrics["loss"].value.item() == 0.5
