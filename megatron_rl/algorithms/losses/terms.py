"""The inputs of a policy loss, and its results.

Shape letters: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.columns import mean_by, sum_by

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before they are exponentiated. exp(20) = 5e8 is finite in fp32 and far outside every
clip range, so the clamp changes only gradients that a clip removes, or that are below 2e-9 |A|. The log-ratios
themselves are not clamped, because a token with -90 must count with -90 in the mean of its sample."""

LOWEST_LOGP = -100.0
"""The lowest log-prob that is taken from an engine; it replaces -inf. No token with the probability e^-100 is ever
sampled in fp32, and its ratio is beyond every bound."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The inputs of a policy loss, all of shape [T]. Advantages and log-probs are 0 at tokens that are no action, so
    ratio_T is 1 there."""

    mask_T: Tensor
    """bool: whether the token is an action."""
    sample_T: Tensor
    """int64: the index of the token's sample."""
    advantage_T: Tensor
    logp_T: Tensor
    """Log-probs under the current policy; they carry the gradient."""
    anchor_T: Tensor
    """Log-probs under the policy in the denominator of the ratio (`algorithm.anchor`)."""
    logp_rollout_T: Tensor
    """Log-probs of the engine when it sampled the tokens."""
    lag_T: Tensor
    """int: the number of versions between the weights that sampled the token and the weights at the step's start."""
    selected_T: Tensor | None
    """bool: the tokens that Clip-Cov or KL-Cov has chosen; None for other losses."""
    logp_ref_T: Tensor | None = None
    """Log-probs under the reference policy; None unless the loss needs them."""

    @property
    def log_ratio_T(self) -> Tensor:
        return self.logp_T - self.anchor_T

    @property
    def ratio_T(self) -> Tensor:
        return bounded_exp(self.log_ratio_T)

    def sample_sum(self, x_T: Tensor) -> Tensor:
        """The sum of x over the actions of the token's sample, for every token."""
        return sum_by(self.sample_T, torch.where(self.mask_T, x_T, 0.0))

    def sample_mean(self, x_T: Tensor) -> Tensor:
        """The mean of x over the actions of the token's sample, for every token."""
        return mean_by(self.sample_T, self.mask_T, x_T)


TokenLoss = Callable[[Terms], tuple[Tensor, dict[str, Tensor]]]
"""A function from the terms to loss_T and to named columns [T] whose means over the action tokens are metrics."""


def bounded_exp(x_T: Tensor) -> Tensor:
    """exp(x) within exp(+-20); the gradient is 0 outside."""
    return x_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
