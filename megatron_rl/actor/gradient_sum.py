"""A tensor that all tensor-parallel ranks read, each for its own part of the computation.

Invariant (tests/ranks): its gradient is the sum of the ranks' gradients, also of ones that are not contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor


def copied_to_all_ranks(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The same tensor. In the backward pass its gradients are summed over the tensor-parallel ranks.

    Megatron-Core 0.16.1 sums a copy of a gradient that is not contiguous and returns the gradient as it was
    (Megatron-LM's pull request 5338).

    Args:
        group: None: the tensor-parallel group.
    """
    copied: Tensor = copy_to_tensor_model_parallel_region(x, group=group)
    contiguous: Tensor = _WithContiguousGradient.apply(copied)  # type: ignore[no-untyped-call]  # it has no types
    return contiguous


class _WithContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()
