"""Megatron's Adam: which part of which parameter a rank updates, the state of these parts, and all norms of an update.

With the distributed optimizer a rank has a flat interval of each parameter, otherwise the whole. Invariants
(tests/dist): the intervals of a parameter's data-parallel ranks follow each other without gap or overlap; a norm is
that of the whole model in every layout, to the rounding of float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor
from torch.nn import Parameter

from megatron_rl.actor import platform

COPY, MOMENTS = "fp32_param", ("exp_avg", "exp_avg_sq")
"""The names of the parts of the state: the fp32 copy of a bfloat16 parameter, and Adam's two moments."""

BLOCK_ELEMENTS = 2**18
"""How many elements a CPU converts to float64 at a time: into 2 MiB, which its cache holds."""

LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)
"""The largest norm of a gradient that is applied, 1.8e19. The squares of a larger gradient may be infinite in Adam's
second moment, and would stay so for ever."""


@dataclass(frozen=True, slots=True)
class AdamState:
    """The state of the flat interval [start, stop) of a parameter. Writing to its tensors changes the optimizer."""

    name: str
    """The parameter's local name."""
    start: int
    stop: int
    tensors: dict[str, Tensor]
    """[stop - start]: MOMENTS, and COPY if the parameter is bfloat16."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The flat interval [start, stop) of a parameter that one of Megatron's optimizers updates."""

    parameter: Parameter
    main: Tensor
    """float32, stop - start elements: what Megatron gives the gradient of the interval to. It is the parameter itself
    or a view of it, or the fp32 copy of a bfloat16 one; with a streamed optimizer a placeholder of this copy."""
    start: int
    stop: int
    group: int
    """The index of its settings in `param_groups`."""

    @property
    def has_copy(self) -> bool:
        return self.parameter.dtype != torch.float32


def intervals(inner: MegatronOptimizer) -> Iterator[Interval]:
    """Yield the interval of each parameter that one of Megatron's optimizers, not a chain of them, has a part of."""
    if isinstance(inner, DistributedOptimizer):
        for parameter, (group, order) in inner.model_param_group_index_map.items():
            found = inner._get_model_param_range_map(parameter)["param"]
            main = inner.optimizer.param_groups[group]["params"][order]
            yield Interval(parameter, main, found.start, found.end, group)
        return
    if isinstance(inner, FP32Optimizer):
        pairs = [[(p, p) for p in group["params"]] for group in inner.optimizer.param_groups]
    else:
        groups = zip(inner.float16_groups, inner.fp32_from_float16_groups, inner.fp32_from_fp32_groups, strict=True)
        pairs = [[*zip(halves, mains, strict=True), *((p, p) for p in wholes)] for halves, mains, wholes in groups]
    for group, members in enumerate(pairs):
        for parameter, main in members:
            yield Interval(parameter, main, 0, parameter.numel(), group)


def set_step(optimizer: torch.optim.Optimizer, state: dict[str, Any], group: dict[str, Any], num_updates: int) -> None:
    """Set the number of updates that Adam corrects its moments by. torch's AdamW has it for each parameter, the fused
    ones of Apex and Transformer Engine for each group."""
    if isinstance(optimizer, torch.optim.AdamW):
        state["step"] = torch.tensor(float(num_updates))  # as torch itself begins
    else:
        group["step"] = num_updates


def sum_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of the squares of all elements, added in float64.

    torch's norm on a CPU has a few running sums in float32. In a long tensor they become so large that the next squares
    are rounded away: the norm of 28 million normal numbers is 1.6e-3 too small. The GPU's kernel that is called here
    converts each element while it reads it, so it needs no memory for float64. It has been read, not run.

    Args:
        tensors: float32, contiguous, on the rank's device.

    Returns:
        float64, a scalar on the rank's device. It is infinite or NaN if and only if an element is.
    """
    blocks = [block for tensor in tensors for block in tensor.detach().view(-1).split(BLOCK_ELEMENTS)]
    if not blocks:
        return torch.zeros((), dtype=torch.float64, device=platform.device())
    return torch.stack(torch._foreach_norm(blocks, dtype=torch.float64)).square_().sum()


def gradient_square(inner: MegatronOptimizer) -> Tensor:
    """float64, a scalar: the square of the global L2 norm of the gradients that one of Megatron's optimizers has. It is
    a collective."""
    square = sum_of_squares(inner.get_main_grads_for_grad_norm())  # what several ranks hold counts once
    dist.all_reduce(square, group=inner.get_grad_stats_parallel_group())
    return square


class Norms:
    """The L2 norms of the parameters and of the last update of one of Megatron's optimizers.

    No copy of the weights is needed, because Adam's moments m and v give the update again. The n-th update with the
    learning rate a and the decay w changed the parameters p into q (Loshchilov and Hutter 2019, arXiv:1711.05101):

        q = p - a w p - s  with  s = a / (1 - b1^n) m / (sqrt(v / (1 - b2^n)) + eps),

    so that p = (q + s) / (1 - a w). Each rank adds up the parameters whose state it has.
    """

    def __init__(self, inner: MegatronOptimizer, num_updates: int) -> None:
        self._inner, self._number = inner, num_updates
        self._sums = torch.zeros(2, dtype=torch.float64, device=platform.device())

    def add(self, interval: Interval, value: Tensor, state: Mapping[str, Tensor]) -> None:
        """
        Args:
            value: float32: an interval after the update, or a part of it.
            state: float32: its moments.
        """
        # Tied embeddings, and what the tensor-parallel ranks all hold, count once.
        if not param_is_not_shared(interval.main) or not param_is_not_tensor_parallel_duplicate(
            interval.main, getattr(self._inner, "tp_group", None)
        ):
            return
        group = self._inner.optimizer.param_groups[interval.group]
        rate, (beta1, beta2) = group["lr"], group["betas"]
        deviation = (state["exp_avg_sq"] / (1 - beta2**self._number)).sqrt_().add_(group["eps"])
        step = (state["exp_avg"] / deviation).mul_(rate / (1 - beta1**self._number))
        decay = rate * group["weight_decay"]
        if decay:
            step.add_((value + step).mul_(decay / (1 - decay)))
        for i, tensor in enumerate((value, step)):
            self._sums[i] += sum_of_squares([tensor])

    def squares(self) -> Tensor:
        """float64 [2]: the squares of both norms over all ranks. It is a collective."""
        dist.all_reduce(self._sums, group=self._inner.get_grad_stats_parallel_group())
        return self._sums
