"""The angles of rotary embeddings (Su et al. 2021, arXiv:2104.09864), with three ways of scaling them to longer
contexts: Llama 3.1's, YaRN and a factor. Invariant (tests/unit/actor): they equal transformers'.

Shape letters: T packed tokens, R rotated dims of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.types import LinearRope, Llama3Rope, Scaling, YarnRope


class AxialPositions(NamedTuple):
    """The positions of the tokens of a row with images."""

    position_3T: Tensor
    """int64: in time, height and width."""
    axes: tuple[int, ...]
    """See `Vision.axes`."""


def rotation(
    position_T: Tensor, rotary_dim: int, theta: float, scaling: Scaling | None = None, axes: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles, float32 [T, 1, R] each. Both halves have the same values.

    Args:
        position_T: or [3, T], the positions in time, height and width.
        axes: for each pair of dims, R / 2 of them, which of the three it turns with.

    If a part of each head is rotated, the frequencies belong to a head of this size, as in transformers
    (modeling_glm4_moe.py, Glm4MoeRotaryEmbedding).
    """
    frequency = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    factor = 1.0
    if isinstance(scaling, Llama3Rope):
        frequency = _llama3(frequency, scaling)
    elif isinstance(scaling, YarnRope):
        frequency, factor = _yarn(frequency, theta, scaling), _yarn_factor(scaling)
    elif isinstance(scaling, LinearRope):
        frequency /= scaling.factor
    position_TR = position_T[list(axes)].T if axes else position_T[:, None]
    angle_T = (position_TR.float() * frequency).repeat(1, 2).unsqueeze(1)
    return angle_T.cos() * factor, angle_T.sin() * factor


def _llama3(frequency: Tensor, scaling: Llama3Rope) -> Tensor:
    """Llama 3.1's scaling (arXiv:2407.21783). With n the original context length, the frequency is divided by the
    factor where the wavelength is above n / low_freq_factor, unchanged where it is below n / high_freq_factor, and
    interpolated between the two."""
    turns = scaling.original_max_positions * frequency / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequency / scaling.factor, frequency, kept.clamp(0, 1))


def _yarn(frequency: Tensor, theta: float, scaling: YarnRope) -> Tensor:
    """YaRN's scaling (arXiv:2309.00071, section 3.2). The interpolation is linear in the frequency's index. It begins
    where `beta_fast` turns fit into the original context and ends where `beta_slow` turns do. With `truncate` both
    indices are rounded outwards."""
    rotary_dim = 2 * len(frequency)

    def index(turns: float) -> float:
        return rotary_dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (torch.arange(len(frequency), dtype=torch.float32) - low) / (high - low or 1e-3)
    return torch.lerp(frequency, frequency / scaling.factor, ramp.clamp(0, 1))


def _yarn_factor(scaling: YarnRope) -> float:
    """YaRN's factor of cosine and sine, which acts as a temperature of the attention."""

    def growth(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return growth(scaling.mscale) / growth(scaling.mscale_all_dim)
    return growth(1.0)
