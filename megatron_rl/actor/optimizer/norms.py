"""The norms of gradient, parameters and update, added in float64.

Invariant (tests/ranks): in every layout a norm equals the whole model's norm, to the rounding of float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor
from torch.nn import Parameter

from megatron_rl.actor import platform
from megatron_rl.actor.optimizer.intervals import Interval, intervals

BLOCK_ELEMENTS = 2**18
"""How many elements a CPU converts to float64 at a time: into 2 MiB, which its cache holds."""

LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)
"""The largest norm of a gradient that is applied, 1.8e19. The squares of a larger gradient may be infinite in Adam's
second moment, and would stay so for ever."""


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
    blocks = [block for tensor in tensors for block in torch.split(tensor.detach().view(-1), BLOCK_ELEMENTS)]
    if not blocks:
        return torch.zeros((), dtype=torch.float64, device=platform.device())
    return torch.stack(torch._foreach_norm(blocks, dtype=torch.float64)).square_().sum()


def gradient_square(inner: MegatronOptimizer, of_head: bool = False) -> Tensor:
    """float64, a scalar: the square of the global L2 norm of the gradients that one of Megatron's optimizers has.
    Collective: every rank must call it.

    Args:
        of_head: see `Norms`.
    """
    norms = Norms(inner, of_head)
    counted = (interval.main.grad for interval in intervals(inner) if norms.counts(interval))
    square = sum_of_squares(gradient for gradient in counted if gradient is not None)
    dist.all_reduce(square, group=inner.get_grad_stats_parallel_group())
    return square


def belongs_to_head(parameter: Parameter) -> bool:
    """Whether a parameter belongs to the multi-token head (multi_token.py). Its gradient has a norm of its own."""
    return getattr(parameter, "is_of_head", False)


class Norms:
    """The L2 norms of the parameters and of the last update of one of Megatron's optimizers, and the number of weights
    in bfloat16 or float16 whose bits the update has changed. Each rank adds up the parameters whose state it has."""

    def __init__(self, inner: MegatronOptimizer, of_head: bool = False) -> None:
        """
        Args:
            of_head: whether the norms are of the multi-token head's parameters, and not of the model's without it.
        """
        self._inner, self._of_head = inner, of_head
        self._sums = torch.zeros(4, dtype=torch.float64, device=platform.device())

    def counts(self, interval: Interval) -> bool:
        """Whether this rank adds up the interval: tied embeddings, and what the tensor-parallel ranks all hold, count
        once."""
        if belongs_to_head(interval.parameter) != self._of_head:
            return False
        group = getattr(self._inner, "tp_group", None)
        return bool(param_is_not_shared(interval.main) and param_is_not_tensor_parallel_duplicate(interval.main, group))

    def add(self, value: Tensor, step: Tensor) -> None:
        """
        Args:
            value: float32: an interval that counts after the update, or a part of it.
            step: float32, as many: what the update has subtracted from it.
        """
        for i, tensor in enumerate((value, step)):
            self._sums[i] += sum_of_squares([tensor])

    def count(self, before: Tensor, after: Tensor) -> None:
        """Count the weights of an interval that counts, or of a part of it, by their bits before and after the
        update."""
        self._sums[2] += len(before)
        self._sums[3] += (before != after).sum()

    def sums(self) -> Tensor:
        """float64 [4]: the squares of both norms, the number of weights in bfloat16 or float16, and the number of
        changed ones, over all ranks. Collective: every rank must call it."""
        dist.all_reduce(self._sums, group=self._inner.get_grad_stats_parallel_group())
        return self._sums
