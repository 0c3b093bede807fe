"""The angles of rotary embeddings (Su et al. 2021, arXiv:2104.09864) and the two ways of stretching them to longer
contexts. Invariant (tests/unit/actor): equal to transformers'.

Shape letters: T packed tokens, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl.types import Llama3Rope, YarnRope


def rotation(
    position_T: Tensor, head_dim: int, theta: float, scaling: Llama3Rope | YarnRope | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [T, 1, D] float32 each, the same for both halves of a head."""
    frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    factor = 1.0
    if isinstance(scaling, Llama3Rope):
        frequency = _llama3(frequency, scaling)
    elif isinstance(scaling, YarnRope):
        frequency, factor = _yarn(frequency, theta, scaling), _yarn_factor(scaling)
    angle_T = torch.outer(position_T.float(), frequency).repeat(1, 2).unsqueeze(1)
    return angle_T.cos() * factor, angle_T.sin() * factor


def _llama3(frequency: Tensor, scaling: Llama3Rope) -> Tensor:
    """Wavelengths above original / low are divided by the factor, below original / high they stay, and between the
    two the frequency is interpolated (arXiv:2407.21783)."""
    turns = scaling.original_max_positions * frequency / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequency / scaling.factor, frequency, kept.clamp(0, 1))


def _yarn(frequency: Tensor, theta: float, scaling: YarnRope) -> Tensor:
    """The same with a ramp over the index of the frequency, whose ends lie where `beta_fast` and `beta_slow` turns fit
    into the original context, rounded outwards (arXiv:2309.00071, section 3.2)."""
    head_dim = 2 * len(frequency)

    def index(turns: float) -> float:
        return head_dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(index(scaling.beta_fast)), 0)
    high = min(math.ceil(index(scaling.beta_slow)), head_dim - 1)
    ramp = (torch.arange(len(frequency), dtype=torch.float32) - low) / (high - low or 1e-3)
    return torch.lerp(frequency, frequency / scaling.factor, ramp.clamp(0, 1))


def _yarn_factor(scaling: YarnRope) -> float:
    """Of cosine and sine: the attention's temperature."""

    def growth(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return growth(scaling.mscale) / growth(scaling.mscale_all_dim)
    return growth(1.0)
