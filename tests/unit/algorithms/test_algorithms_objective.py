"""The objective as a whole: its metrics by hand, masks, numbers that are not finite. Values and gradients of all
combinations: test_algorithms_reference.py and test_algorithms_invariance.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms import PackedColumns, PolicyObjective, SupervisedObjective
from megatron_rl.config.algorithm import (
    AGGREGATIONS,
    AlgorithmConfig,
    DppoTvLoss,
    MaskedCorrection,
    TruncatedCorrection,
)
from megatron_rl.types import Denominators

NONE = {"kl": 0.0, "entropy": 0.0}


def real(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def columns_of(mask, advantage, old, rollout=None, sample=None, weight=1.0) -> PackedColumns:
    num = len(mask)
    return PackedColumns(
        action_mask_T=torch.tensor(mask, dtype=torch.bool),
        sample_T=torch.tensor(sample or [0] * num),
        token_T=torch.arange(num),
        weight_T=torch.full((num,), weight, dtype=torch.float64),
        advantage_T=real(advantage),
        logp_rollout_T=real(old if rollout is None else rollout),
        lag_T=torch.zeros(num, dtype=torch.int64),
        logp_old_T=real(old),
    )


def evaluate(objective, logp, columns: PackedColumns, denominators: Denominators, entropy=None):
    """(loss, gradient of logp, metrics as numbers with their reductions)"""
    logp_T = torch.as_tensor(logp, dtype=torch.float64).clone().requires_grad_()
    entropy_T = torch.zeros_like(logp_T) if entropy is None else real(entropy)
    (prepared,), whole = objective.prepare([columns], None, denominators, lambda x: x)
    loss, metrics = objective(logp_T, entropy_T, prepared, denominators, NONE)
    loss.backward()
    numbers = {name: (m.value.item(), m.reduction) for name, m in metrics.items()}
    return loss.item(), logp_T.grad.tolist(), numbers | {name: (value, "whole") for name, value in whole.items()}


def test_policy_objective_golden():
    """Three actions of four tokens, the denominator of a larger mini-batch: 10."""
    old, rollout = [-1.0, -2.0, -1.0, 0.0], [-1.0, -2.0 - math.log(1.5), -1.0 - math.log(4.0), 0.0]
    columns = columns_of([1, 1, 1, 0], [1.0, -2.0, -1.0, 5.0], old, rollout, weight=0.1)
    logp = real(old) + real([2.0, 0.5, 5.0, 9.0]).log()
    loss, _, got = evaluate(
        PolicyObjective(AlgorithmConfig()), logp, columns, Denominators(10, 2), entropy=[1.0, 2.0, 3.0, 4.0]
    )
    # -1.2 (clipped) x 1, 1.6 (clipped) x 1.5, 3.0 (bounded) x 2.0 (capped)
    assert loss == pytest.approx((-1.2 + 1.6 * 1.5 + 3.0 * 2.0) / 10)
    k3 = (1 - math.log(2)) + (-0.5 - math.log(0.5)) + (4 - math.log(5))
    expected = {
        "loss": (0.72, "sum"),
        "pg_loss": (0.72, "sum"),
        "pg_clipfrac": (0.2, "sum"),
        "pg_clipfrac_lower": (0.1, "sum"),
        "ppo_kl": (k3 / 10, "sum"),
        "ratio/mean": (0.75, "sum"),
        "ratio/max": (5.0, "max"),
        "ratio/min": (0.5, "min"),
        "entropy": (0.6, "sum"),
        "masked": (0.0, "sum"),
        "correction/mean": (0.45, "whole"),
        "correction/bounded": (0.1, "whole"),
        "correction/masked": (0.0, "whole"),
        "correction/ess": (4.5**2 / (1 + 2.25 + 4) / 10, "whole"),
    }
    assert {name: reduction for name, (_, reduction) in got.items()} == {n: r for n, (_, r) in expected.items()}
    assert {n: v for n, (v, _) in got.items()} == pytest.approx({n: v for n, (v, _) in expected.items()}, rel=1e-6)


def test_correction_can_be_off():
    objective = PolicyObjective(AlgorithmConfig(correction=None))
    loss, _, metrics = evaluate(objective, [-1.0], columns_of([1], [1.0], [-1.0], [-9.0]), Denominators(1, 1))
    assert loss == -1.0 and not any(name.startswith("correction") for name in metrics)


def test_on_policy_is_exactly_one_and_zero():
    """In fp32, with numbers as a model gives them."""
    generator = torch.Generator().manual_seed(3)
    logp_T = -torch.rand(50, generator=generator) * 8
    columns = columns_of([1] * 50, [0.5] * 50, [0.0] * 50)
    columns = replace(columns, logp_old_T=logp_T, logp_rollout_T=logp_T)
    _, metrics = PolicyObjective(AlgorithmConfig(correction=None))(logp_T, None, columns, Denominators(50, 1), NONE)
    values = {name: metric.value.item() for name, metric in metrics.items()}
    assert (values["ratio/mean"], values["ratio/max"], values["ratio/min"], values["ppo_kl"]) == (1, 1, 1, 0)
    assert values["pg_clipfrac"] == values["pg_clipfrac_lower"] == 0


def test_an_empty_micro_batch_gives_the_identities():
    columns = columns_of([0, 0], [1.0, 1.0], [-1.0, -1.0])
    loss, slope, metrics = evaluate(PolicyObjective(AlgorithmConfig()), [0.0, 0.0], columns, Denominators(3, 1))
    assert loss == 0 and slope == [0, 0]
    assert metrics["ratio/max"][0] == -math.inf and metrics["ratio/min"][0] == math.inf
    assert all(value == 0 for value, reduction in metrics.values() if reduction in ("sum", "whole"))


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("objective", [PolicyObjective(AlgorithmConfig()), SupervisedObjective()])
def test_what_stands_at_no_action_reaches_neither_loss_nor_gradient(objective, junk):
    columns = columns_of([1, 0], [1.0, junk], [-1.0, junk], [-1.0, -junk], weight=0.5)
    columns = replace(columns, weight_T=real([0.5, junk]))
    loss, slope, metrics = evaluate(objective, [-1.0, junk], columns, Denominators(2, 1), entropy=[1.0, junk])
    assert abs(loss) == 0.5 and slope == [-0.5, 0.0]
    assert all(math.isfinite(value) for value, _ in metrics.values())


@pytest.mark.parametrize(("gap", "advantage"), [(500.0, 1.0), (500.0, -1.0), (-500.0, 1.0), (-500.0, -1.0)])
def test_a_huge_log_ratio_stays_finite(gap, advantage):
    columns = columns_of([1], [advantage], [-600.0], rollout=[-600.0 + gap])
    columns = replace(columns, logp_old_T=columns.logp_old_T.float())  # in fp32 exp(500) is infinite
    loss, slope, metrics = evaluate(PolicyObjective(AlgorithmConfig()), [-600.0 + gap], columns, Denominators(1, 1))
    assert abs(loss) <= 3.0 and slope == [0.0]
    assert all(math.isfinite(value) for value, _ in metrics.values())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("column", ["logp", "logp_old", "logp_rollout", "advantage"])
def test_a_number_that_is_not_finite_names_its_sample(column, bad):
    values = {name: [-1.0, -1.0, -1.0] for name in ("logp", "logp_old", "logp_rollout", "advantage")}
    values[column][1] = bad
    columns = columns_of([1, 1, 1], values["advantage"], values["logp_old"], values["logp_rollout"], sample=[0, 2, 2])
    with pytest.raises(ValueError, match=rf"sample 2 of the micro-batch .* position 1 .*{column} {bad}"):
        evaluate(PolicyObjective(AlgorithmConfig()), values["logp"], columns, Denominators(3, 2))


def test_minus_infinity_of_the_trainer_is_refused_and_of_the_engine_is_an_extreme_ratio():
    impossible = columns_of([1, 1], [1.0, 1.0], [-1.0, -1.0], [-1.0, -math.inf], sample=[0, 1], weight=0.5)
    with pytest.raises(ValueError, match=r"sample 1 .*\(logp -inf"):
        evaluate(PolicyObjective(AlgorithmConfig()), [-1.0, -math.inf], impossible, Denominators(2, 2))
    capped = PolicyObjective(AlgorithmConfig(correction=TruncatedCorrection(cap=2.0)))
    loss, _, metrics = evaluate(capped, [-1.0, -1.0], impossible, Denominators(2, 2))
    assert loss == -1.5 and metrics["correction/bounded"][0] == 0.5
    masked = PolicyObjective(AlgorithmConfig(correction=MaskedCorrection()))
    loss, slope, metrics = evaluate(masked, [-1.0, -1.0], impossible, Denominators(2, 2))
    assert (loss, slope, metrics["masked"][0]) == (-0.5, [-0.5, 0.0], 0.5)


def test_a_loss_around_the_engine_needs_no_old_log_probs_and_reports_the_mismatch():
    objective = PolicyObjective(AlgorithmConfig(loss=DppoTvLoss(), correction=None))
    assert not objective.needs.logp_old
    columns = replace(columns_of([1, 1], [1.0, 1.0], [0.0, 0.0], [-1.0, -2.0]), logp_old_T=None)
    _, _, metrics = evaluate(objective, [-1.1, -1.7], columns, Denominators(2, 1))
    assert metrics["mismatch/mean_abs"] == (pytest.approx(0.2), "sum")
    assert metrics["mismatch/max_abs"] == (pytest.approx(0.3), "max")


def test_masking_leaves_the_denominator_alone():
    """CONTRACTS: rejection changes numerators only."""
    columns = columns_of([1, 1], [1.0, 1.0], [-1.0, -1.0], [-1.0, -9.0], weight=0.5)
    masked = PolicyObjective(AlgorithmConfig(correction=MaskedCorrection()))
    loss, _, metrics = evaluate(masked, [-1.0, -1.0], columns, Denominators(2, 1))
    assert loss == -0.5 and metrics["ratio/mean"][0] == 1.0


def test_supervised_golden():
    columns = columns_of([1, 0, 1], [0.0] * 3, [0.0] * 3, weight=1 / 8)
    loss, slope, metrics = evaluate(SupervisedObjective(), [-1.0, math.nan, -3.0], columns, Denominators(8, 2))
    assert loss == metrics["loss"][0] == 0.5 and slope == [-1 / 8, 0, -1 / 8]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loss": {"kind": "dual_clip", "clip_ratio_c": 1.0}}, "greater than 1"),
        ({"loss": {"kind": "gspo"}, "correction": {"kind": "mask"}}, "masks single tokens contradicts"),
        ({"loss": {"kind": "gmpo"}, "top_entropy_share": 0.2}, "top_entropy_share masks single tokens"),
        ({"loss": {"kind": "decoupled"}}, "a correction would do it twice"),
        ({"loss": {"kind": "dppo_kl"}}, "a correction would do it twice"),
        ({"loss": {"kind": "clip_cov", "cov_low": 5.0}}, "must be below cov_high"),
        ({"kl": {"estimator": "k1"}}, "the expectation of its gradient.*is zero"),
        ({"kl": {"place": "reward", "straight_through": True}}, "a KL in the reward has none"),
        ({"kl": {"estimator": "k2", "straight_through": True}}, "which k2 has"),
        ({"correction": {"kind": "mask", "low": 1.0}}, "less than 1"),
        ({"correction": {"kind": "truncate", "cap": 0.5}}, "greater than or equal to 1"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "give both or neither"),
        ({"loss_agg_tokens": 9}, "give both or neither"),
        ({"loss": {"kind": "ppo"}}, "dual_clip"),
    ],
)
def test_combinations_that_mean_nothing_are_refused_with_the_reason(changes, reason):
    with pytest.raises(ValueError, match=reason):
        AlgorithmConfig(**changes)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_every_aggregation_is_a_valid_choice(mode):
    AlgorithmConfig(loss_agg_mode=mode, loss_agg_tokens=9 if mode.endswith("norm") else None)
