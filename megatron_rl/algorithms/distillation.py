"""What a teacher's log-probs do in the objective.

`sampled`: on the policy's own tokens the gradient of E[w (log t - log s) log pi] is that of -KL(s || t), with s as the
policy that the ratio is around. So the term is an advantage: the ratio, its clip and the importance weight apply to it.

Invariants (tests/unit/algorithms): where the teacher's log-probs are the policy's to the bit, the advantage is 0
exactly, and so is every gradient; a token without a teacher's log-prob has no term.

Shape letters: T packed tokens of one micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.columns import PackedColumns
from megatron_rl.algorithms.losses.terms import LOWEST_LOGP
from megatron_rl.types import Metrics


def teacher_advantage(columns: PackedColumns, logp_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The advantages by the teacher, 0 where it gave nothing, and the columns of the metrics `teacher/kl` and
    `teacher/scored`.

    Args:
        logp_T: the log-probs of the policy that the loss's ratio is around; 0 where the target is no action.
    """
    given_T, weight_T = columns.logp_teacher_T, columns.teacher_weight_T
    if given_T is None or weight_T is None:
        given_T, weight_T = torch.full_like(logp_T, torch.nan), torch.zeros_like(logp_T)
    scored_T = columns.action_mask_T & (weight_T > 0) & ~given_T.isnan()
    ahead_T = torch.where(scored_T, given_T.clamp(min=LOWEST_LOGP) - logp_T.detach(), 0.0)
    return weight_T * ahead_T, {"teacher/kl": -ahead_T, "teacher/scored": scored_T}


def over_scored(metrics: Metrics) -> Metrics:
    """The metrics with `teacher/kl` as the mean over the scored tokens."""
    if not (scored := metrics.get("teacher/scored")):
        return {name: x for name, x in metrics.items() if name != "teacher/kl"}
    return metrics | {"teacher/kl": metrics["teacher/kl"] / scored}
