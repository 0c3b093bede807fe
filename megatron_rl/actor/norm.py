"""RMSNorm for the layers that run without Transformer Engine.

torch's own is written as six operations whose backward takes three times as long on a CPU as the one below.
Invariants (tests/unit/actor): value and gradients equal torch.nn.functional.rms_norm; bf16 is computed in
fp32.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.actor import platform


class Norm(torch.nn.Module):
    """Its weight tells Megatron to sum gradients over sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **unused):
        super().__init__()
        self.eps = eps
        ones = torch.ones(hidden_size, dtype=config.params_dtype, device=platform.device())
        self.weight = torch.nn.Parameter(ones)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return _RmsNorm.apply(x, self.weight, self.eps)


class _RmsNorm(torch.autograd.Function):
    """y = x r w with r = 1 / sqrt(mean(x^2) + eps) over the last dim (Zhang and Sennrich 2019,
    arXiv:1910.07467)."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x32 * r).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        grad32, weight32 = grad.float(), weight.float()
        normal = x.float() * r
        product = grad32 * normal
        # d x = r (g w - n mean(g w n)), with n = x r
        mean = (product @ weight32).div_(-x.shape[-1]).unsqueeze(-1)
        grad_x = torch.addcmul(grad32 * weight32, normal, mean).mul_(r)
        return grad_x.to(x.dtype), product.flatten(0, -2).sum(0).to(weight.dtype), None
