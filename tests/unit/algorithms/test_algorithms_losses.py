"""Golden values of each loss by hand, and gradcheck."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms.columns import segments
from megatron_rl.algorithms.correction import interpolated
from megatron_rl.algorithms.losses import LOSSES
from megatron_rl.algorithms.losses.dppo import binary_kl, total_variation
from megatron_rl.algorithms.losses.dual_clip import dual_clip
from megatron_rl.algorithms.losses.terms import Terms
from megatron_rl.config import losses as config

BOUNDS = {"low": 0.2, "high": 0.28, "c": 3.0}

OWN = config.FunctionLoss(path="megatron_rl.recipes.tiny.losses:penalised")


def real(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def terms(ratio, advantage, *, old=-1.0, sample=None, selected=None, rollout=None, lag=0) -> Terms:
    """Actions with these ratios to an anchor of `old`."""
    num = len(ratio)
    anchor = torch.full((num,), old, dtype=torch.float64)
    return Terms(
        mask_T=torch.ones(num, dtype=torch.bool),
        sample_T=torch.tensor(sample or [0] * num),
        advantage_T=real(advantage),
        logp_T=(anchor + real(ratio).log()).requires_grad_(),
        anchor_T=anchor,
        logp_rollout_T=anchor if rollout is None else real(rollout),
        lag_T=torch.full((num,), lag),
        selected_T=None if selected is None else torch.tensor(selected),
        logp_ref_T=anchor,
    )


def evaluate(cfg, given: Terms) -> tuple[list[float], list[float], dict[str, list[float]]]:
    """Loss of each token, gradient of their sum to logp, indicators."""
    loss_T, shares = LOSSES[type(cfg)](cfg)(given)
    loss_T.sum().backward()
    return loss_T.tolist(), given.logp_T.grad.tolist(), {name: x_T.tolist() for name, x_T in shares.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.56, 0.0),  # clipped above
        (0.5, 2.0, -1.0, -2.0),  # a better action got rarer: not clipped
        (0.5, -2.0, 1.6, 0.0),  # clipped below
        (1.5, -2.0, 3.0, 2.0),
        (5.0, -1.0, 3.0, 0.0),  # bounded at c |A|
        (1e9, -1.0, 3.0, 0.0),
        (1e9, 1.0, -1.28, 0.0),
        (5.0, 0.0, 0.0, 0.0),
    ],
)
def test_dual_clip(ratio, advantage, loss, slope):
    ratio_T = real([ratio]).requires_grad_()
    loss_T = dual_clip(ratio_T, real([advantage]), **BOUNDS)
    loss_T.sum().backward()
    # float64 rounding.
    assert loss_T.item() == pytest.approx(loss, abs=1e-12)
    assert ratio_T.grad.item() == pytest.approx(slope, abs=1e-12)


def test_without_the_bound_it_is_ppo():
    """An action that got a thousand times likelier and was bad keeps its whole gradient."""
    given = terms([1000.0, 0.5, 1.5], [-1.0, -1.0, 1.0])
    loss, slope, shares = evaluate(config.DualClipLoss(clip_ratio_c=None), given)
    assert loss == pytest.approx([1000.0, 0.8, -1.2]) and slope == pytest.approx([1000.0, 0.0, 0.0])
    assert shares["pg_clipfrac_lower"] == [False] * 3 and shares["pg_clipfrac"] == [False, True, True]


@pytest.mark.parametrize("cfg", [config.GspoLoss(clip_ratio_low=0.95), config.GmpoLoss(clip_ratio_low=200.0)])
def test_one_token_far_off_counts_in_its_samples_mean_with_its_own_log_ratio(cfg):
    """-90 of 40 tokens: exp(-90 / 40) = 0.11, and not exp(-20 / 40) = 0.61."""
    given = terms([1.0] * 40, [1.0] * 40)
    logp_T = given.logp_T.detach() + torch.tensor([-90.0] + [0.0] * 39)
    loss_T, _ = LOSSES[type(cfg)](cfg)(replace(given, logp_T=logp_T.requires_grad_()))
    assert loss_T.tolist() == pytest.approx([-math.exp(-90 / 40)] * 40)


def test_the_penalty_of_kl_cov_pulls_back_from_beyond_the_bound_of_the_ratio():
    given = terms([1.0], [1.0], selected=[True])
    logp_T = (given.logp_T.detach() - 90).requires_grad_()
    loss_T, _ = LOSSES[config.KlCovLoss](config.KlCovLoss(coef=0.5))(replace(given, logp_T=logp_T))
    loss_T.sum().backward()
    assert loss_T.item() == pytest.approx(45) and logp_T.grad.item() == pytest.approx(-0.5)


def test_dual_clip_refuses_a_bound_below_the_unchanged_policy():
    with pytest.raises(ValueError, match="c > 1"):
        dual_clip(torch.ones(1), torch.ones(1), low=0.2, high=0.2, c=1.0)


def test_gspo_clips_the_sample_as_a_whole():
    # Sample 0: ratios 4 and 1, geometric mean 2, clipped at 1.5. Sample 1: ratios 1.21 and 1, mean 1.1.
    cfg = config.GspoLoss(clip_ratio_low=0.5, clip_ratio_high=0.5)
    loss, slope, shares = evaluate(cfg, terms([4, 1, 1.21, 1], [1, 1, 2, 2], sample=[0, 0, 1, 1]))
    assert loss == pytest.approx([-1.5, -1.5, -2.2, -2.2])
    assert slope == pytest.approx([0, 0, -2.2, -2.2])
    assert shares["pg_clipfrac"] == [True, True, False, False]


def test_gmpo_is_the_geometric_mean_of_clipped_ratios():
    # A > 0: log-ratios log 4 (clipped at .5) and 0, mean .25. A < 0: -log 4 (clipped at -.4) and 0, mean -.2.
    cfg = config.GmpoLoss(clip_ratio_low=0.4, clip_ratio_high=0.5)
    loss, slope, shares = evaluate(cfg, terms([4, 1, 0.25, 1], [1, 1, -2, -2], sample=[0, 0, 1, 1]))
    up, down = math.exp(0.25), math.exp(-0.2)
    assert loss == pytest.approx([-up, -up, 2 * down, 2 * down])
    # Two tokens bear the loss, each log-ratio is half of the mean: one whole share for the token that is not clipped.
    assert slope == pytest.approx([0, -up, 0, 2 * down])
    assert shares["pg_clipfrac"] == [True, False, True, False]


def test_cispo_weighs_log_probs():
    cfg = config.CispoLoss(clip_ratio_low=1.0, clip_ratio_high=0.2)
    loss, slope, shares = evaluate(cfg, terms([2, 0.5], [1, -2]))
    assert loss == pytest.approx([-1.2 * (math.log(2) - 1), 2 * 0.5 * (math.log(0.5) - 1)])
    assert slope == pytest.approx([-1.2, 1.0])  # clipped, and yet it pulls
    assert shares["pg_clipfrac"] == [True, False]


def test_sapo_has_slope_one_at_the_anchor_and_flattens():
    cfg = config.SapoLoss(tau_pos=1.0, tau_neg=2.0)
    loss, slope, _ = evaluate(cfg, terms([1, 1, 3], [1, -1, 1]))
    assert loss == pytest.approx([-2.0, 1.0, -4 / (1 + math.exp(-2))])
    sigmoid = 1 / (1 + math.exp(-2))
    assert slope == pytest.approx([-1, 1, -4 * sigmoid * (1 - sigmoid) * 3])


def test_dro_pulls_back_with_the_log_ratio():
    loss, slope, _ = evaluate(config.DroLoss(beta=0.5), terms([1, math.e, math.e**4], [2, 1, 2]))
    assert loss == pytest.approx([2.0, 0.25 - 0.0, 4.0 - 6.0])
    assert slope == pytest.approx([-2.0, 0.5 - 1, 0.0])


def test_a2po_fits_the_log_ratio_of_a_sample_to_its_advantage():
    given = replace(terms([1.0] * 3, [0.3, 0.3, -0.2], sample=[0, 0, 1]), logp_ref_T=real([-1.5, -1.25, -0.5]))
    loss, slope, _ = evaluate(config.A2poLoss(beta=0.2), given)
    first, second = 0.2 * (0.5 + 0.25) - 0.3, 0.2 * -0.5 + 0.2
    assert loss == pytest.approx([first**2, first**2, second**2])
    assert slope == pytest.approx([2 * 2 * 0.2 * first] * 2 + [2 * 0.2 * second])  # the sample's loss is the mean


def test_vespo_weighs_a_sample_by_the_product_of_its_ratios():
    """Two samples: the ratios 2 and 1/2 multiply to 1, and 2 and 1 to 2."""
    given = terms([2, 0.5, 2, 1], [1, 1, -1, -1], sample=[0, 0, 1, 1])
    loss, slope, shares = evaluate(config.VespoLoss(), given)
    down = 2**3 * math.exp(2 - 2 * 2)
    assert shares["vespo/weight"] == pytest.approx([1, 1, down, down])
    assert slope == pytest.approx([-1, -1, down, down])
    assert loss == pytest.approx([1 - math.log(2), 1 + math.log(2), (math.log(2) - 1) * down, -down])


def test_the_cap_of_vespo_bounds_each_tokens_ratio_to_the_engine():
    """pi_old / mu is e^2 and e^-1, of which the first becomes 3."""
    given = terms([1, 1], [1, 1], old=-1.0, rollout=[-3.0, 0.0])
    _, slope, _ = evaluate(config.VespoLoss(cap=3.0), given)
    w = 3 / math.e
    assert slope == pytest.approx([-(w**2) * math.exp(3 - 3 * w)] * 2)


@pytest.mark.parametrize("cfg", [config.ReinforceLoss(), config.GpgLoss()])
def test_reinforce(cfg):
    loss, slope, _ = evaluate(cfg, terms([1, 1], [2, -1], old=-3.0))
    assert (loss, slope) == ([6.0, -3.0], [-2.0, 1.0])


def test_covariance_losses_read_the_choice():
    given = terms([1.1, 2.0, 2.0], [1, 1, -1], selected=[True, False, True])
    loss, slope, shares = evaluate(config.ClipCovLoss(), given)
    assert (loss, slope) == (pytest.approx([0, -1.2, 0]), pytest.approx([0, 0, 0]))
    assert shares["cov/chosen"] == [True, False, True] and shares["pg_clipfrac"] == [False, True, False]
    given = terms([1.1, 2.0, 2.0], [1, 1, -1], selected=[True, False, True])
    loss, slope, _ = evaluate(config.KlCovLoss(coef=0.5), given)
    assert loss == pytest.approx([-1.1 + 0.5 * math.log(1.1), -2, 2 + 0.5 * math.log(2)])
    assert slope == pytest.approx([-1.1 + 0.5, -2, 2 + 0.5])


def test_dppo_masks_moves_of_probability_not_of_ratio():
    # 0.001 -> 0.003 triples and moves .002; 0.5 -> 0.7 moves .2, outwards for A > 0 only.
    tripled = terms([3.0], [1.0], old=math.log(0.001))
    assert evaluate(config.DppoTvLoss(), tripled)[1] == pytest.approx([-3.0])
    up = terms([1.4, 1.4], [1.0, -1.0], old=math.log(0.5))
    loss, slope, shares = evaluate(config.DppoTvLoss(), up)
    assert (loss[0], slope) == (0, pytest.approx([0, 1.4])) and shares["pg_clipfrac"] == [True, False]
    truncated = terms([50.0], [-1.0], old=math.log(0.001))
    _, slope, shares = evaluate(config.DppoTvLoss(c=20), truncated)
    assert slope == pytest.approx([20.0]) and shares["pg_clipfrac_lower"] == [True]


def test_binary_divergences():
    p, q = real([0.7]).log(), real([0.5]).log()
    assert total_variation(p, q).item() == pytest.approx(0.2)
    assert binary_kl(p, q).item() == pytest.approx(0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3))
    certain, single = torch.zeros(1), torch.tensor([-1e-9])
    assert binary_kl(certain, single).isfinite().all() and binary_kl(single, torch.tensor([-100.0])).isfinite().all()


def test_the_policy_between_the_engine_and_the_present_one():
    got = interpolated(real([-1.0, -1.0, -1.0]), real([-2.0, -2.0, -2.0]), torch.tensor([0, 1, 3]))
    assert got.tolist() == [-2.0, -1.5, -1.25]


def test_segments_are_runs_of_actions():
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 0], dtype=torch.bool)
    sample = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1])
    assert segments(mask, sample)[mask].tolist() == [1, 1, 2, 3, 3]
    assert segments(torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1])).tolist() == [1, 1, 2, 2]


SMOOTH = [config.DualClipLoss(), config.GmpoLoss(), config.SapoLoss(), config.ReinforceLoss(), config.KlCovLoss()]
SMOOTH += [config.A2poLoss(beta=0.3)]
"""Without stop-gradients: for the others the slopes above and the slow reference speak."""


@pytest.mark.parametrize("cfg", SMOOTH, ids=lambda cfg: cfg.kind)
def test_gradcheck(cfg):
    generator = torch.Generator().manual_seed(3)
    ratio = torch.rand(12, generator=generator, dtype=torch.float64) + 0.5
    advantage = torch.randn(12, generator=generator, dtype=torch.float64)
    given = terms(ratio.tolist(), advantage.tolist(), sample=[0] * 5 + [1] * 7, selected=[True, False, False] * 4)
    loss = LOSSES[type(cfg)](cfg)

    def total(logp_T):
        fields = {name: getattr(given, name) for name in given.__dataclass_fields__}
        return loss(Terms(**{**fields, "logp_T": logp_T}))[0]

    assert torch.autograd.gradcheck(total, given.logp_T.detach().requires_grad_())


@pytest.mark.parametrize(
    "cfg", [OWN if kind is config.FunctionLoss else kind() for kind in LOSSES], ids=lambda cfg: cfg.kind
)
@pytest.mark.parametrize("ratio", [1e9, 1e-9])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_ratio_of_a_billion_stays_finite(cfg, ratio, advantage):
    loss, slope, _ = evaluate(cfg, terms([ratio], [advantage], selected=[True], old=-30.0))
    assert math.isfinite(loss[0]) and math.isfinite(slope[0])
    if advantage == 0:
        assert (loss[0], slope[0]) == (0, 0) or cfg.kind in (
            "kl_cov",
            "function",
            "dro",
            "a2po",
        )  # these have a penalty


def no_tuple(given: Terms):
    return given.logp_T


def one_number(given: Terms):
    return given.logp_T.sum(), {}


def interrupts(given: Terms):
    raise KeyboardInterrupt


def raises(given: Terms):
    raise KeyError("x")


def test_a_loss_of_ones_own():
    loss, slope, shares = evaluate(OWN, terms([1.0, math.e], [2.0, -1.0]))
    assert loss == pytest.approx([-2.0, math.e + 0.25]) and slope == pytest.approx([-2.0, math.e + 0.5])
    assert shares["penalty"] == pytest.approx([0.0, 0.25])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_tuple", "must return .loss_T, columns.: a tensor with one number for each of the 1 tokens"),
        ("one_number", "must return .loss_T, columns."),
        ("raises", "raises raised KeyError: 'x'"),
        ("interrupts", r"interrupts raised KeyboardInterrupt \(.*test_algorithms_losses.py:\d+\)"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_a_function_that_is_no_loss_is_named(name, message):
    with pytest.raises(ValueError, match=message):
        evaluate(config.FunctionLoss(path=f"{__name__}:{name}"), terms([1.0], [1.0]))
