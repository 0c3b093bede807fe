"""What a trainer is built from. Apart from actor.py, so that a driver can write it without loading Megatron-Core."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms.objective import Objective
from megatron_rl.config.schema import ModelConfig, PolicyConfig
from megatron_rl.types import ModelShape


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """What every trainer rank is built from; equal on all of them."""

    shape: ModelShape
    model: ModelConfig
    policy: PolicyConfig
    objective: Objective
    temperature: float
    """Of sampling; the logits are divided by it."""
    total_steps: int
    """Optimizer steps of the run, for the learning rate's schedule."""
    seed: int
