from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.algorithms.coefficients import Coefficients, adapted_entropy, adapted_kl
from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.config.algorithm import (
    AdaptiveEntropyCoefficient,
    AdaptiveKlCoefficient,
    AlgorithmConfig,
    FixedCoefficient,
    KlConfig,
)

HALF, QUARTER = torch.tensor([0.5], dtype=torch.float64).log(), torch.tensor([0.25], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", math.log(2), 1.0),
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", 0.5 - 1 + math.log(2), 0.5),
        ("abs", math.log(2), 1.0),
    ],
)
def test_estimators(estimator, value, slope):
    logp_T = HALF.clone().requires_grad_()
    kl_T = kl_estimate(logp_T, QUARTER, estimator)
    kl_T.sum().backward()
    assert (kl_T.item(), logp_T.grad.item()) == (pytest.approx(value), pytest.approx(slope))


@pytest.mark.parametrize("estimator", ["k1", "k3", "abs"])
def test_straight_through_has_the_value_of_one_and_the_gradient_of_k2(estimator):
    logp_T = HALF.clone().requires_grad_()
    kl_T = kl_estimate(logp_T, QUARTER, estimator, straight_through=True)
    kl_T.sum().backward()
    assert kl_T.item() == pytest.approx(kl_estimate(HALF, QUARTER, estimator).item())
    assert logp_T.grad.item() == pytest.approx(math.log(2))


def test_expectations_over_a_known_distribution():
    """k1 and k3 have the KL's value, k2's gradient is the KL's gradient, k1's gradient is zero."""
    theta = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64, requires_grad=True)
    logp, ref = torch.log_softmax(theta, 0), torch.log_softmax(torch.tensor([0.0, 0.5, -0.2, 0.3]).double(), 0)
    p = logp.exp().detach()
    kl = (logp.exp() * (logp - ref)).sum()
    (true,) = torch.autograd.grad(kl, theta, retain_graph=True)
    for estimator in ("k1", "k3"):
        assert (p * kl_estimate(logp, ref, estimator)).sum().item() == pytest.approx(kl.item())
    gradient = {
        name: torch.autograd.grad((p * kl_estimate(logp, ref, *name)).sum(), theta, retain_graph=True)[0]
        for name in [("k1", False), ("k2", False), ("k3", True)]
    }
    torch.testing.assert_close(gradient["k2", False], true)
    torch.testing.assert_close(gradient["k3", True], true)
    assert gradient["k1", False].abs().max() < 1e-12


def test_far_policies_stay_finite():
    far = torch.tensor([-500.0])
    for estimator in ("k1", "k2", "k3", "abs"):
        assert kl_estimate(far, torch.zeros(1), estimator).isfinite().all()


@pytest.mark.parametrize("gap", [-90.0, -21.0, 21.0, 90.0])
def test_only_what_is_exponentiated_is_bounded(gap):
    for estimator, value, slope in [
        ("k1", gap, 1.0),
        ("k2", gap**2 / 2, gap),
        ("abs", abs(gap), math.copysign(1, gap)),
    ]:
        logp_T = torch.tensor([gap], dtype=torch.float64).requires_grad_()
        kl_T = kl_estimate(logp_T, torch.zeros(1, dtype=torch.float64), estimator, cap=10.0)
        kl_T.sum().backward()
        assert (kl_T.item(), logp_T.grad.item()) == (value, slope)


@pytest.mark.parametrize(
    ("d", "cap", "value", "slope"),
    [
        (-2.6, 10.0, math.exp(2.6) - 3.6, 1 - math.exp(2.6)),  # 9.86: within the cap
        (-2.62, 10.0, 10.0, 0.0),
        (-20.0, 10.0, 10.0, 0.0),
        (10.9, 10.0, math.exp(-10.9) + 9.9, 1 - math.exp(-10.9)),
        (11.1, 10.0, 10.0, 0.0),
        (-20.0, None, math.exp(20) - 21, 1 - math.exp(20)),
        (-21.0, None, math.exp(20) - 21, 0.0),  # bounded where fp32 would end
        (90.0, None, 89.0, 1.0),
    ],
)
def test_the_cap_of_k3(d, cap, value, slope):
    logp_T = torch.tensor([d], dtype=torch.float64).requires_grad_()
    kl_T = kl_estimate(logp_T, torch.zeros(1, dtype=torch.float64), "k3", cap=cap)
    kl_T.sum().backward()
    assert (kl_T.item(), logp_T.grad.item()) == (pytest.approx(value), pytest.approx(slope))
    logp_T.grad = None
    kl_estimate(logp_T, torch.zeros(1, dtype=torch.float64), "k3", straight_through=True, cap=cap).sum().backward()
    assert logp_T.grad.item() == pytest.approx(d)


def test_the_configured_cap_is_that_of_k3_alone():
    assert KlConfig().cap == 10.0 and KlConfig(cap=None).cap is None
    with pytest.raises(ValueError, match="the estimator is k2; leave cap out"):
        KlConfig(estimator="k2", cap=5.0)


def test_adaptive_kl():
    cfg = AdaptiveKlCoefficient(initial=0.1, target=0.01, horizon=1000)
    assert adapted_kl(0.1, 0.02, 100, cfg) == pytest.approx(0.1 * 1.02)  # the error is clipped to .2
    assert adapted_kl(0.1, 0.011, 100, cfg) == pytest.approx(0.1 * 1.01)
    assert adapted_kl(0.1, 0.0, 100, cfg) == pytest.approx(0.1 * 0.98)


def test_adaptive_entropy_acts_only_below_its_target():
    cfg = AdaptiveEntropyCoefficient(target=0.5, delta=0.01, maximum=0.015)
    assert adapted_entropy(0.0, 0.4, cfg) == (pytest.approx(0.01), pytest.approx(0.01))
    assert adapted_entropy(0.01, 0.4, cfg) == (0.015, 0.015)
    assert adapted_entropy(0.015, 0.6, cfg) == (pytest.approx(0.005), 0.0)
    assert adapted_entropy(0.005, 0.6, cfg) == (0.0, 0.0)


def test_a_restored_controller_goes_on_as_if_never_stopped():
    cfg = AlgorithmConfig(
        kl=KlConfig(coefficient=AdaptiveKlCoefficient(target=0.01)),
        entropy={"coefficient": AdaptiveEntropyCoefficient(target=0.5)},
    )
    steps = [{"kl": 0.02, "entropy": 0.4}, {"kl": 0.001, "entropy": 0.6}, {"kl": 0.03, "entropy": 0.3}]
    whole, first, second = Coefficients(cfg), Coefficients(cfg), Coefficients(cfg)
    for metrics in steps:
        whole.adapt(metrics, 64)
    for metrics in steps[:2]:
        first.adapt(metrics, 64)
    second.restore(first.state())
    second.adapt(steps[2], 64)
    assert second.values == whole.values and second.values["kl"] != 0.05


def test_a_fixed_coefficient_follows_the_configuration():
    old, new = (AlgorithmConfig(kl=KlConfig(coefficient=FixedCoefficient(value=v))) for v in (0.1, 0.2))
    resumed = Coefficients(new)
    resumed.restore(Coefficients(old).state())
    resumed.adapt({"kl": 9.0}, 64)
    assert resumed.values["kl"] == 0.2


def test_the_bound_of_the_mismatch_follows_the_first_step():
    exact, coarse, given = (
        Coefficients(AlgorithmConfig(max_mismatch=bound), is_exact)
        for bound, is_exact in ((None, True), (None, False), (0.5, False))
    )
    assert [one.max_mismatch for one in (exact, coarse, given)] == [1e-3, 0.2, 0.5]
    for one in (exact, coarse, given):
        one.adapt({"mismatch/mean_abs": 0.03}, 8)
    assert [one.values["max_mismatch"] for one in (exact, coarse, given)] == [1e-3, pytest.approx(0.12), 0.5]
    coarse.adapt({"mismatch/mean_abs": 0.1}, 8)
    assert coarse.max_mismatch == pytest.approx(0.12), "the first step alone sets it"
    resumed = Coefficients(AlgorithmConfig(), is_exact=False)
    resumed.restore(coarse.state())
    assert resumed.max_mismatch == coarse.max_mismatch


def test_a_small_mismatch_of_the_first_step_leaves_room():
    coarse = Coefficients(AlgorithmConfig(), is_exact=False)
    coarse.adapt({}, 8)  # no token was judged
    assert coarse.max_mismatch == 0.2
    coarse.adapt({"mismatch/mean_abs": 1e-4}, 8)
    assert coarse.max_mismatch == 0.02
