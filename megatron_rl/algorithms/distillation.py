"""What a teacher's log-probs do in the objective.

`sampled`: on the policy's own tokens the gradient of E[w (log t - log s) log pi] is that of -w KL(s || t), with s as
the policy that the ratio is around. So the term is an advantage: the ratio, its clip and the importance weight apply.

The other forms compare both distributions at each state, over K tokens and all others together as one more. With
u_k = s_k / t_k and index 0 for the others, D = sum_k t_k f(u_k) + t_0 f(u_0), so that D is at least 0, is 0 for equal
distributions, and is at most the divergence over the whole vocabulary; d D / d log s_k = s_k (f'(u_k) - f'(u_0)),
because s_0 = 1 - sum_k s_k.

Invariants (tests/unit/algorithms): where the teacher's log-probs are the policy's to the bit, every gradient is exactly
0; a token without a teacher has no term.

Shape letters: T packed tokens of one micro-batch, K tokens of a support.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.algorithms.columns import PackedColumns, TaughtColumns
from megatron_rl.algorithms.losses.terms import LOWEST_LOGP
from megatron_rl.config.teachers import DistillationConfig
from megatron_rl.types import Metrics

LEAST_REST = 1e-6
"""The least probability of all tokens outside a support. The difference of 1 and a sum of float32 probabilities has an
error of about 1e-7, so that the quotient of two smaller ones means nothing."""


class Divergence(NamedTuple):
    """An f-divergence: f(u) with u = s / t, and its derivative."""

    f: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


DIVERGENCES = {
    "forward": Divergence(lambda u: -u.log(), lambda u: -1 / u),
    "reverse": Divergence(lambda u: u * u.log(), lambda u: u.log() + 1),
    "jensen_shannon": Divergence(
        lambda u: (u * u.log() - (1 + u) * ((1 + u) / 2).log()) / 2, lambda u: (2 * u / (1 + u)).log() / 2
    ),
}
"""The divergence of each `algorithm.distillation.form` over several tokens."""


def teacher_term(cfg: DistillationConfig, columns: PackedColumns, logp_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The teacher's weighted term of each token, an advantage or a loss (`cfg.in_loss`), 0 where the teacher gave
    nothing; and the columns of the metrics `teacher/kl` and `teacher/scored`.

    Args:
        logp_T: the log-probs of the policy that the loss's ratio is around; 0 where the target is no action.
    """
    assert isinstance(columns, TaughtColumns), "`pack` makes them of shares with teachers"
    given, weight_T = columns.logp_teacher_T, columns.teacher_weight_T
    assert given is not None and weight_T is not None, "`pack` and the passes give them"
    scored_T = columns.action_mask_T & (weight_T > 0)
    if cfg.in_loss:
        assert columns.logp_support_T is not None, "the schedule gives it"
        kl_T = divergence(columns.logp_support_T, given, cfg.form).to(columns.logp_support_T.dtype)
    else:
        scored_T = scored_T & ~given.isnan()
        kl_T = logp_T.detach() - given.clamp(min=LOWEST_LOGP)
    kl_T = torch.where(scored_T, kl_T, 0.0)
    return weight_T * (kl_T if cfg.in_loss else -kl_T), {"teacher/kl": kl_T, "teacher/scored": scored_T}


def divergence(student_TK: Tensor, teacher_TK: Tensor, form: str) -> Tensor:
    """D of each token, float64. Its gradient to `student_TK` is the formula's above, so that it is exactly 0 where the
    log-probs are equal; rounding would leave the gradients of D's own terms."""
    of = DIVERGENCES[form]
    s_TK, t_TK = (x_TK.detach().double().clamp(min=LOWEST_LOGP).exp() for x_TK in (student_TK, teacher_TK))
    rest_s_T1, rest_t_T1 = ((1 - p_TK.sum(1, keepdim=True)).clamp(min=LEAST_REST) for p_TK in (s_TK, t_TK))
    u_TK, rest_u_T1 = s_TK / t_TK, rest_s_T1 / rest_t_T1
    value_T = (t_TK * of.f(u_TK)).sum(1) + (rest_t_T1 * of.f(rest_u_T1)).squeeze(1)
    slope_TK = s_TK * (of.slope(u_TK) - of.slope(rest_u_T1))
    linear_T = (slope_TK * torch.where(slope_TK != 0, student_TK, 0.0)).sum(1)
    return value_T + (linear_T - linear_T.detach())


def over_scored(metrics: Metrics) -> Metrics:
    """The metrics with `teacher/kl` as the mean over the scored tokens."""
    if not (scored := metrics.get("teacher/scored")):
        return {name: x for name, x in metrics.items() if name != "teacher/kl"}
    return metrics | {"teacher/kl": metrics["teacher/kl"] / scored}
