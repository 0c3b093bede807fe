"""Rotary embeddings (Su et al. 2021, arXiv:2104.09864), and how they are scaled to longer contexts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's scaling of the rotary frequencies (arXiv:2407.21783): long wavelengths are stretched, and short ones
    are kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN's scaling of the rotary frequencies (arXiv:2309.00071)."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """The factor of cos and sin. None means that it follows from mscale and mscale_all_dim, or is 0.1 ln(factor) + 1
    where these are 0."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    """If it is not 0, the scale of the softmax is also multiplied by (0.1 mscale_all_dim ln(factor) + 1)^2, as in
    DeepSeek's models."""
    truncate: bool = True
    """Whether the ends of the interpolation are rounded outwards to indices of frequencies."""


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Position interpolation (arXiv:2306.15595): all frequencies are divided by the factor."""

    factor: float


Scaling = Llama3Rope | YarnRope | LinearRope


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of an attention block."""

    theta: float
    scaling: Scaling | None = None
    share: float = 1.0
    """The share of each head's dims that are rotated, which are its first ones (0.5 in GLM-4.5)."""
