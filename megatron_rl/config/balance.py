"""How a step's samples become micro-batches."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from megatron_rl.config.section import Section


class FlopsCost(Section):
    """FLOPs of the training step, counted from the model's shape."""

    kind: Literal["flops"] = "flops"


class TokensCost(Section):
    """The number of tokens: right where attention is cheap beside the matrices."""

    kind: Literal["tokens"] = "tokens"


class MeasuredCost(Section):
    """Seconds, from a fit to micro-batches that a run timed (`balance.fit_cost`)."""

    kind: Literal["measured"] = "measured"
    seconds_per_token: NonNegativeFloat
    seconds_per_squared_token: NonNegativeFloat
    """Times the square of each sample's length: attention."""

    @model_validator(mode="after")
    def _something_costs(self) -> Self:
        if not self.seconds_per_token and not self.seconds_per_squared_token:
            raise ValueError("balance.cost: seconds_per_token and seconds_per_squared_token are both 0; give one")
        return self


CostConfig = Annotated[FlopsCost | TokensCost | MeasuredCost, Field(discriminator="kind")]


class BalanceConfig(Section):
    max_tokens_per_microbatch: PositiveInt
    """Hard cap, alignment padding counted."""
    cost: CostConfig = FlopsCost()
    """What is evened out over ranks and micro-batches."""
    oversize: Literal["refuse", "alone"] = "refuse"
    """A sample longer than the cap: an error that names it, or a micro-batch of its own above the cap."""
    groups: Literal["split", "together"] = "split"
    """together: all samples of a group on one data-parallel rank, which then fetches no other group's tokens. It costs
    balance, and micro-batches."""
