"""The losses of preferences: golden values. Their objective is in tests/unit/actor, because it needs packed rows."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.algorithms.preferences import answer_loss, likelihood_loss, pair_loss
from megatron_rl.config.preferences import BradleyTerryLoss, CpoLoss, DpoLoss, IpoLoss, KtoLoss, OrpoLoss, SimpoLoss

LOSSES = [
    DpoLoss(beta=0.4),
    DpoLoss(beta=0.4, label_smoothing=0.2),
    CpoLoss(beta=0.4, label_smoothing=0.2, alpha=0.7),
    IpoLoss(beta=0.3),
    SimpoLoss(beta=1.5, gamma=0.7),
    OrpoLoss(beta=0.6),
    BradleyTerryLoss(center=0.02),
    KtoLoss(beta=0.5, desirable_weight=1.3, undesirable_weight=0.8),
]


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def log_odds(logp: float) -> float:
    return logp - math.log(1 - math.exp(logp))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (DpoLoss(beta=0.5), -log_sigmoid(0.6)),
        (DpoLoss(beta=0.5, label_smoothing=0.1), -0.9 * log_sigmoid(0.6) - 0.1 * log_sigmoid(-0.6)),
        (CpoLoss(beta=0.5, label_smoothing=0.1), -0.9 * log_sigmoid(0.6) - 0.1 * log_sigmoid(-0.6)),
        (IpoLoss(beta=0.5), (1.2 - 1.0) ** 2),
        (SimpoLoss(beta=0.5, gamma=0.1), -log_sigmoid(0.6 - 0.1)),
        (OrpoLoss(beta=0.5), 0.3 - 0.5 * log_sigmoid(log_odds(-0.3) - log_odds(-1.5))),
        (BradleyTerryLoss(center=0.1), -log_sigmoid(1.2) + 0.1 * 1.8**2),
    ],
    ids=str,
)
def test_golden_pair_of_minus_0_3_and_minus_1_5(loss, expected):
    chosen, rejected = torch.tensor([-0.3, -1.5], dtype=torch.float64).view(2, 1)
    assert pair_loss(loss, chosen, rejected).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("loss", "expected"), [(CpoLoss(alpha=0.5), 0.3), (SimpoLoss(alpha=0.5), 1.2), (SimpoLoss(), 0), (DpoLoss(), 0)]
)
def test_golden_likelihood_of_four_tokens_with_minus_2_4(loss, expected):
    number = torch.tensor([-2.4], dtype=torch.float64)
    assert likelihood_loss(loss, number, torch.tensor([4.0])).item() == pytest.approx(expected, abs=1e-12)


def test_a_margin_is_asked_of_the_lead():
    chosen, rejected, least = torch.tensor([2.0, 2.0, 0.5], dtype=torch.float64)
    loss = pair_loss(BradleyTerryLoss(), chosen + 1, rejected, least)
    assert loss.item() == pytest.approx(-log_sigmoid(0.5), rel=1e-12)


def test_golden_answers_of_kto():
    loss = KtoLoss(beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    number, label = torch.tensor([1.4, 1.4, 1.4], dtype=torch.float64), torch.tensor([1.0, -1.0, 0.0])
    got = answer_loss(loss, number, torch.tensor(0.4), label).tolist()
    liked, disliked = 1 - 1 / (1 + math.exp(-0.5)), 1 - 1 / (1 + math.exp(0.5))
    assert got == pytest.approx([2 * liked, 3 * disliked, 0.0])


@pytest.mark.parametrize("loss", LOSSES[:-1], ids=str)
def test_numbers_far_from_zero_have_finite_losses_and_gradients(loss):
    sign = -1 if loss.is_mean else 1  # a mean log-prob is below 0
    chosen = torch.tensor([sign * 5000.0, -1e-12], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([-5000.0, -5000.0], dtype=torch.float64, requires_grad=True)
    value = pair_loss(loss, chosen, rejected).sum()
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(chosen.grad).all() and torch.isfinite(rejected.grad).all()
