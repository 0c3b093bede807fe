"""The critic's loss."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveFloat

from megatron_rl.config.section import Method


class ValueLossConfig(Method):
    """PPO's clipped value loss (Schulman et al. 2017, arXiv:1707.06347; PPO2), or Huber's in place of the square."""

    formula: ClassVar[str] = "max(l(V - R), l(V_old + clip(V - V_old, -c, c) - R)), l(x) = x^2 / 2 or Huber's"
    source: ClassVar[str] = "PPO2 of OpenAI Baselines; Huber 1964, Ann. Math. Stat. 35"

    kind: Literal["squared", "huber"] = "squared"
    cliprange_value: PositiveFloat | None = 0.5
    """How far a step may move a value with effect; null is no clip."""
    huber_delta: PositiveFloat = 1.0
    """Where huber turns from the square to the line."""
