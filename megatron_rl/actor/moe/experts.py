"""What gpt-oss's experts have that Megatron's local ones lack: a bias that is added once, and their gated unit.

An expert that is split over TP gives a part of its output on each rank, and Megatron adds the bias to every part. Here
the first rank alone adds it. All ranks hold it, see the same tokens and the same gradient of the output, so each
computes the bias's whole gradient.

Invariant (tests/ranks): logits and gradients equal transformers' in every layout.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor


def sigmoid_unit(gate: Tensor) -> Tensor:
    """g sigmoid(1.702 g), an approximation of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415). Megatron's own is
    compiled when it is first called."""
    return gate * torch.sigmoid(1.702 * gate)


class ExpertOutput(RowParallelLinear):  # type: ignore[misc]  # it has no types
    """The last layer of an expert. It returns its bias; Megatron multiplies it by the router's weight and adds it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_first = self.tp_group.rank() == 0
        # The outputs are added up behind the layer, or there is one rank: Megatron could not add a bias to what its
        # function for that sum returns.
        self.explicit_expert_comm = True
        # Megatron would add up the gradients of the tensor-parallel ranks, which have different experts or the whole
        # gradient each. It counts a parameter in norms if it has the second attribute, or is on the group's first rank.
        bias: Any = self.bias
        bias.sequence_parallel, bias.tensor_model_parallel = False, self.is_first

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor]:
        output, bias = super().forward(input_)
        added: Tensor = _AddedOnce.apply(bias, self.is_first)  # type: ignore[no-untyped-call]  # it has no types
        return output, added


class _AddedOnce(torch.autograd.Function):
    """The bias on the first rank, and zeros on the others. Every rank takes the whole gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, is_first: bool) -> Tensor:
        return bias.view_as(bias) if is_first else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
