"""Which sample goes to which rank and micro-batch: plans are pure values, numpy at most."""

from __future__ import annotations

from megatron_rl.balance.flops import training_flops
from megatron_rl.balance.plan import plan_microbatches

__all__ = ["plan_microbatches", "training_flops"]
