"""Assigns samples to ranks and micro-batches. Plans are pure values; planning needs only numpy."""

from __future__ import annotations

from megatron_rl.balance.assign import AssignmentLimits, assign
from megatron_rl.balance.cost import fit_cost, sample_costs
from megatron_rl.balance.flops import flops_by_layer, forward_flops, training_flops
from megatron_rl.balance.plan import plan_microbatches

__all__ = [
    "AssignmentLimits",
    "assign",
    "fit_cost",
    "flops_by_layer",
    "forward_flops",
    "plan_microbatches",
    "sample_costs",
    "training_flops",
]
