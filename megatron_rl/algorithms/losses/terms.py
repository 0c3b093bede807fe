"""What a policy loss is made of, and what it gives back.

Shape letters: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_rl.algorithms.columns import mean_by

MAX_LOG_RATIO = 20.0
"""What is exponentiated is clamped to +-20: exp(20) = 5e8 is finite in fp32 and far outside every clip range, so the
clamp changes no gradient that a clip would not have removed, except those below 2e-9 |A|. Log-ratios themselves are
not clamped: one token of -90 must count in its sample's mean with -90."""


@dataclass(frozen=True, slots=True)
class Terms:
    """All [T]; tokens that are no action hold zeros, and ones in ratio_T."""

    mask_T: Tensor
    sample_T: Tensor
    advantage_T: Tensor
    logp_T: Tensor
    """Carries the gradient."""
    anchor_T: Tensor
    """Log-prob under the policy that the ratio is taken to: pi_old, or the engine's."""
    logp_rollout_T: Tensor
    lag_T: Tensor
    selected_T: Tensor | None

    @property
    def log_ratio_T(self) -> Tensor:
        return self.logp_T - self.anchor_T

    @property
    def ratio_T(self) -> Tensor:
        return bounded_exp(self.log_ratio_T)

    def sample_mean(self, x_T: Tensor) -> Tensor:
        """For every token the mean of x over its sample's actions."""
        return mean_by(self.sample_T, self.mask_T, x_T)


TokenLoss = Callable[[Terms], tuple[Tensor, dict[str, Tensor]]]
"""terms -> (loss_T, indicators [T] whose share of the action tokens is a metric)."""


def bounded_exp(x_T: Tensor) -> Tensor:
    """exp(x) within exp(+-20); the gradient is 0 outside."""
    return x_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
