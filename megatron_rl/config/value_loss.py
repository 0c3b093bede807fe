"""The configuration of the critic's loss."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveFloat

from megatron_rl.config.section import Method


class ValueLossConfig(Method):
    """PPO's clipped value loss (Schulman et al. 2017, arXiv:1707.06347; PPO2), with the squared error or with Huber's
    loss."""

    formula: ClassVar[str] = "max(l(V - R), l(V_old + clip(V - V_old, -c, c) - R)), l(x) = x^2 / 2 or Huber's"
    source: ClassVar[str] = "PPO2 of OpenAI Baselines; Huber 1964, Ann. Math. Stat. 35"

    kind: Literal["squared", "huber"] = "squared"
    """The loss l of an error: half of its square, or Huber's."""
    cliprange_value: PositiveFloat | None = 0.5
    """The largest change of a value in one step that still lowers the loss; null means no clip."""
    huber_delta: PositiveFloat = 1.0
    """The error above which Huber's loss is linear; below it is quadratic. It has an effect only for `huber`."""
