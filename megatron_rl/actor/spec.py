"""What a trainer is built from. Apart from actor.py, so that a driver can write it without loading Megatron-Core."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.algorithms.objective import Objective
from megatron_rl.config.schema import ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.layout import FAMILIES
from megatron_rl.types import ModelShape


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """What every trainer rank is built from; equal on all of them.

    Raises:
        ValueError: a model that the actor cannot train, or not split in this way.
    """

    shape: ModelShape
    model: ModelConfig
    policy: PolicyConfig
    objective: Objective
    temperature: float
    """Of sampling; the logits are divided by it."""
    total_steps: int
    """Optimizer steps of the run, for the learning rate's schedule."""
    seed: int

    def __post_init__(self) -> None:
        if not FAMILIES[self.shape.family].forward:
            trained = ", ".join(name for name, family in FAMILIES.items() if family.forward)
            raise ValueError(
                f"model.path: the actor does not train the family {self.shape.family}, whose layout alone is known; it "
                f"trains {trained}"
            )
        if self.shape.experts:
            _check_experts(self.policy.parallel)


def _check_experts(parallel: ParallelConfig) -> None:
    """Where Megatron would stop late or, worse, sum the experts' gradients over the wrong ranks."""
    mesh = parallel.mesh
    if mesh.tensor > 1 and not parallel.sequence:
        raise ValueError(
            f"policy.parallel.sequence must be true for a model with experts and tensor={mesh.tensor}: Megatron's "
            f"experts take the ranks of tensor parallelism to hold different tokens"
        )
    if mesh.expert == 1 and mesh.expert_ways != mesh.tensor:
        raise ValueError(
            f"policy.parallel.expert_tensor is {mesh.expert_ways} and tensor {mesh.tensor}, which needs expert > 1: "
            f"without it Megatron sums the experts' gradients over the wrong ranks; leave expert_tensor out"
        )
