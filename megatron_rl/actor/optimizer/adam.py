"""Adam with decoupled weight decay: Megatron's own.

Invariant (tests/ranks): an update equals torch.optim.AdamW on the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_rl.actor.optimizer.base import Optimizer
from megatron_rl.actor.optimizer.intervals import Interval, intervals
from megatron_rl.actor.optimizer.norms import Norms
from megatron_rl.config.optimizer import ADAM_MOMENTS


class AdamOptimizer(Optimizer):
    """Adam, whose state is on the rank's device, in fp32."""

    def _apply(self, norms: Mapping[int, Norms]) -> None:
        succeeded = self.megatron.step_with_ready_grads()
        assert succeeded, "Megatron skips a step only because of its own loss scale, which is not used"
        for inner in self.megatron.chained_optimizers:
            for interval in intervals(inner):
                state = inner.optimizer.state[interval.main]
                if ADAM_MOMENTS[0] in state and norms[id(inner)].counts(interval):
                    group = inner.optimizer.param_groups[interval.group]
                    norms[id(inner)].add(interval.main, last_step(interval.main, state, group, self.num_updates))

    def _moments(self, inner: MegatronOptimizer, interval: Interval) -> dict[str, Tensor]:
        adam = inner.optimizer
        state = adam.state[interval.main]
        if ADAM_MOMENTS[0] not in state:
            state |= {kind: torch.zeros_like(interval.main) for kind in ADAM_MOMENTS}
            set_step(adam, state, adam.param_groups[interval.group], 0)
        return {kind: state[kind].view(-1) for kind in ADAM_MOMENTS}

    def _resume_at(self, inner: MegatronOptimizer, interval: Interval, num_updates: int) -> None:
        adam = inner.optimizer
        set_step(adam, adam.state[interval.main], adam.param_groups[interval.group], num_updates)


def set_step(optimizer: torch.optim.Optimizer, state: dict[str, Any], group: dict[str, Any], num_updates: int) -> None:
    """Set the number of updates that Adam corrects its moments by. torch's AdamW has it for each parameter, the fused
    ones of Apex and Transformer Engine for each group."""
    if isinstance(optimizer, torch.optim.AdamW):
        state["step"] = torch.tensor(float(num_updates))  # as torch itself begins
    else:
        group["step"] = num_updates


def last_step(value: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], num_updates: int) -> Tensor:
    """What the last update has subtracted from parameters.

    No copy of the weights is needed, because Adam's moments m and v give the update again. The n-th update with the
    learning rate a and the decay w changed the parameters p into q (Loshchilov and Hutter 2019, arXiv:1711.05101):

        q = p - a w p - s  with  s = a / (1 - b1^n) m / (sqrt(v / (1 - b2^n)) + eps),

    so that p = (q + s) / (1 - a w).

    Args:
        value: float32: an interval after the update, or a part of it.
        state: float32: its moments.
        group: its settings.
        num_updates: n.
    """
    rate, (beta1, beta2) = group["lr"], group["betas"]
    deviation = (state["exp_avg_sq"] / (1 - beta2**num_updates)).sqrt_().add_(group["eps"])
    step: Tensor = (state["exp_avg"] / deviation).mul_(rate / (1 - beta1**num_updates))
    decay = rate * group["weight_decay"]
    if decay:
        step.add_((value + step).mul_(decay / (1 - decay)))
    return step
