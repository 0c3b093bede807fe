"""How a step's samples become micro-batches."""

from __future__ import annotations

from pydantic import PositiveInt

from megatron_rl.config.section import Section


class BalanceConfig(Section):
    max_tokens_per_microbatch: PositiveInt
    """Hard cap, alignment padding counted."""
