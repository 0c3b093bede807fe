"""How a step's samples become micro-batches."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from megatron_rl.config.section import Section


class FlopsCost(Section):
    """A sample costs the FLOPs of its training step, which are computed from the model's sizes."""

    kind: Literal["flops"] = "flops"


class TokensCost(Section):
    """A sample costs its number of tokens. This is right where attention is cheap compared with the linear layers."""

    kind: Literal["tokens"] = "tokens"


class MeasuredCost(Section):
    """A sample costs seconds, by coefficients that `balance.fit_cost` fits to the micro-batches that a run timed."""

    kind: Literal["measured"] = "measured"
    seconds_per_token: NonNegativeFloat
    """The seconds for each token: the linear layers."""
    seconds_per_squared_token: NonNegativeFloat
    """The factor, in seconds, of the square of a sample's length in tokens: attention."""

    @model_validator(mode="after")
    def _something_costs(self) -> Self:
        if not self.seconds_per_token and not self.seconds_per_squared_token:
            raise ValueError(
                "balance.cost: seconds_per_token and seconds_per_squared_token are both 0; one of them must be positive"
            )
        return self


CostConfig = Annotated[FlopsCost | TokensCost | MeasuredCost, Field(discriminator="kind")]


class BalanceConfig(Section):
    max_tokens_per_microbatch: PositiveInt = 16_384
    """The largest number of tokens in a micro-batch, of all context-parallel ranks together, alignment padding
    included. Only `oversize: alone` exceeds it."""
    cost: CostConfig = FlopsCost()
    """The cost of a sample, which is balanced over ranks and micro-batches."""
    oversize: Literal["refuse", "alone"] = "refuse"
    """What happens to a sample that is longer than max_tokens_per_microbatch. `refuse` stops with an error that names
    the sample; `alone` gives it a micro-batch of its own, which exceeds the cap."""
    groups: Literal["split", "together"] = "split"
    """`split` may distribute the samples of a group over data-parallel ranks. `together` puts all of them on one rank,
    so that no rank fetches tokens that it does not train on; ranks are then balanced less well, and there may be more
    micro-batches."""
