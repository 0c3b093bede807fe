"""An example of a loss in a user's own code: `algorithm.loss={kind: function, path: ...}`."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.losses.terms import Terms

BETA = 0.5


def penalised(terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
    """-A r + beta / 2 (log r)^2: the policy gradient with a penalty for the distance to pi_old in place of a clip.

    Returns:
        The loss of each token, and columns whose means over the action tokens become metrics.
    """
    penalty_T = BETA / 2 * terms.log_ratio_T.square()
    return -terms.advantage_T * terms.ratio_T + penalty_T, {"penalty": penalty_T}
