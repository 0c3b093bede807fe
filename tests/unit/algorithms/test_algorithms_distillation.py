"""Teachers in the objective: by hand, exactly 0 where teacher and policy agree, and which samples they keep."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from batches import batch_without_tokens
from test_algorithms_objective import columns_of, evaluate, real

from megatron_rl.algorithms import PolicyObjective, estimate_advantages
from megatron_rl.algorithms.columns import TaughtColumns
from megatron_rl.algorithms.distillation import DIVERGENCES, divergence
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.types import AnnotatedBatch, Denominators

NUMBERS = Denominators(num_tokens=3, num_samples=1)


def taught(logp_teacher, weight: float = 1.0, advantage=(0.0, 0.0, 0.0, 0.0), mask=(1, 0, 1, 1)):
    columns = columns_of(mask, list(advantage), [-1.0, 9.0, -2.0, -3.0], weight=1 / 3)
    packed = {field.name: getattr(columns, field.name) for field in fields(columns)}
    given = real([x or math.nan for x in logp_teacher])
    return TaughtColumns(**packed, teacher_weight_T=torch.full((4,), weight), logp_teacher_T=given)


@pytest.mark.parametrize("outcome", [0.0, 0.5])
def test_the_advantage_is_by_how_much_the_teacher_is_ahead(outcome):
    """Of the policy that the ratio is around; tokens without a log-prob, and tokens that are no action, have none."""
    objective = PolicyObjective(AlgorithmConfig(distillation={"form": "sampled"}, correction=None))
    columns = taught([-0.5, -7.0, None, -5.0], weight=2.0, advantage=[outcome] * 4)
    _, gradient, metrics = evaluate(objective, [-1.0, 0.0, -2.0, -3.0], columns, NUMBERS)
    ahead = [2 * 0.5 + outcome, 0.0, outcome, 2 * -2.0 + outcome]
    assert gradient == pytest.approx([-x / 3 for x in ahead])
    assert metrics["teacher/scored"] == pytest.approx(2 / 3)
    assert metrics["teacher/kl"] == pytest.approx((-0.5 + 2.0) / 2), "the mean over scored tokens"


def test_a_teacher_that_is_the_policy_gives_exactly_nothing():
    """Also with the step's own log-probs in the place of pi_old, and a token of probability 0 is one of e^-100."""
    objective = PolicyObjective(AlgorithmConfig(distillation={"form": "sampled"}))
    logp = [-1.123, 0.0, -2.234, -3.345]
    columns = replace(taught(logp), logp_old_T=None, logp_rollout_T=real(logp))
    assert evaluate(objective, logp, columns, NUMBERS)[1] == [0.0] * 4
    assert evaluate(objective, logp, taught(logp, weight=0.0), NUMBERS)[1] == [0.0] * 4
    columns = replace(taught([-math.inf] * 4), logp_old_T=None, logp_rollout_T=real(logp))
    assert evaluate(objective, logp, columns, NUMBERS)[1][0] == pytest.approx((100 - 1.123) / 3)


@pytest.mark.parametrize("outcome", [False, True])
def test_a_teacher_keeps_samples_whose_outcome_gives_no_gradient(outcome):
    """The groups are: equal rewards, different rewards, an abstention, no teacher and equal rewards, a cut answer."""
    cfg = AlgorithmConfig(distillation={"outcome": outcome}, adv_estimator={"kind": "grpo", "std": "none"})
    cfg = cfg.model_copy(update={"overlong_filter": True})
    batch = batch_without_tokens(
        lengths=np.full(8, 5),
        group_of=np.array([0, 0, 1, 1, 2, 2, 3, 3]),
        rewards=np.array([1, 1, 1, 0, np.nan, 1, 0, 0]),
        is_cut=np.array([0, 0, 0, 0, 0, 1, 0, 0], bool),
    )
    taught_batch = AnnotatedBatch.of(batch, teacher_weights=np.array([1, 1, 2, 2, 1, 1, 0, 0.0]))
    credit, metrics = estimate_advantages(taught_batch, cfg)
    assert credit.active.tolist() == [True] * 5 + [False] * 3
    assert credit.advantages.tolist() == ([0, 0, 0.5, -0.5, 0, 0, 0, 0] if outcome else [0.0] * 8)
    assert metrics["samples/active"] == 5


def categories(p: torch.Tensor, k: int) -> torch.Tensor:
    return torch.cat([p[:, :k], 1 - p[:, :k].sum(1, keepdim=True)], 1)


@pytest.mark.parametrize("form", DIVERGENCES)
def test_divergences_are_those_of_the_tokens_and_all_others(form):
    """Value and gradient by autograd in float64; never negative, and at most the one over the whole vocabulary."""
    generator = torch.Generator().manual_seed(0)
    logits, other = (torch.randn(50, 12, generator=generator, dtype=torch.float64) for _ in range(2))
    student_TK = logits.log_softmax(-1)[:, :4].clone().requires_grad_()
    found_T = divergence(student_TK, other.log_softmax(-1)[:, :4], form)
    (gradient_TK,) = torch.autograd.grad(found_T.sum(), student_TK)

    def kl(a, b):
        return (a * (a / b).log()).sum(1)

    def naive(s, t):
        return {"forward": kl(t, s), "reverse": kl(s, t)}.get(form, (kl(s, (s + t) / 2) + kl(t, (s + t) / 2)) / 2)

    again_TK = student_TK.detach().clone().requires_grad_()
    s = torch.cat([again_TK.exp(), 1 - again_TK.exp().sum(1, keepdim=True)], 1)
    expected_T = naive(s, categories(other.softmax(-1), 4))
    (expected_TK,) = torch.autograd.grad(expected_T.sum(), again_TK)
    assert found_T.tolist() == pytest.approx(expected_T.tolist(), rel=1e-9)
    assert gradient_TK.flatten().tolist() == pytest.approx(expected_TK.flatten().tolist(), rel=1e-9, abs=1e-12)
    assert (found_T >= 0).all() and (found_T <= naive(logits.softmax(-1), other.softmax(-1)) + 1e-12).all()


@pytest.mark.parametrize("form", DIVERGENCES)
def test_equal_distributions_have_a_gradient_of_exactly_zero(form):
    """Also if the tokens have all the probability, if some have none, and in float32."""
    logits = torch.tensor([[5.0, 1.0, -3.0], [200.0, 0.0, -math.inf], [0.1, 0.2, 0.3]])
    student_TK = logits.log_softmax(-1)[:, :3].requires_grad_()
    found_T = divergence(student_TK, student_TK.detach(), form)
    (gradient_TK,) = torch.autograd.grad(found_T.sum(), student_TK)
    assert not found_T.any() and not gradient_TK.any()
