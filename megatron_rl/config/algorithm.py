"""Losses, aggregation, importance correction, KL and entropy: unions by `kind`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from megatron_rl.config.advantages import GrpoAdvantage
from megatron_rl.config.section import Section


class DualClipLoss(Section):
    """PPO's clipped objective with a bound for A < 0 (Ye et al. 2020, arXiv:1912.09729)."""

    kind: Literal["dual_clip"] = "dual_clip"
    clip_ratio_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_ratio_high: Annotated[float, Field(gt=0)] = 0.2
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    """For A < 0 no token costs more than c |A|."""


class TruncatedCorrection(Section):
    """Weights each token by min(pi_old / pi_rollout, cap): truncated importance sampling."""

    kind: Literal["truncate"] = "truncate"
    cap: Annotated[float, Field(gt=0)] = 2.0


class AlgorithmConfig(Section):
    adv_estimator: GrpoAdvantage = GrpoAdvantage()
    loss: DualClipLoss = DualClipLoss()
    loss_agg_mode: Literal["token-mean"] = "token-mean"
    """token-mean: the sum over action tokens over their number in the whole mini-batch."""
    correction: TruncatedCorrection | None = TruncatedCorrection()
    """Importance correction between engine and trainer; null for none."""
    drop_zero_signal: bool = True
    """Groups whose rewards are all equal leave the step (counted): their advantages are 0."""
    updates_per_step: PositiveInt = 1
    """Mini-batches, one optimizer step each, that a step's samples are split into."""
    max_mismatch: Annotated[float, Field(gt=0)] = 1e-2
    """The run stops when mean |logp_old - logp_rollout| exceeds it: the engine does not hold the
    trainer's weights. Seen with tiny models: 2e-7 in fp32, 8e-3 in bf16 (one run): a bf16 run may need more."""
