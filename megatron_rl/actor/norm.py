"""RMSNorm for the layers that run without Transformer Engine, and the layer that has its norms after attention and MLP.

Some families store a norm's weight minus 1 (zero-centred); Megatron's `layernorm_zero_centered_gamma` says so.

On a CPU torch's own norm is a chain of six operations, whose backward pass takes three times as long as the one below.
Invariants (tests/unit/actor, tests/ranks): value and gradients equal torch.nn.functional.rms_norm, whether the
normalised dim is on one rank or split over TP; bf16 inputs are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_rl.actor import platform

Add = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]
"""(output and its bias, residual, dropout) -> the sum."""
GetAdd = Callable[[bool, bool], Add]
"""(training, fused) -> the function that adds."""


class Norm(torch.nn.Module):
    """RMSNorm. An attribute of its weight tells Megatron to sum the gradients over sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **unused: object) -> None:
        super().__init__()
        self.eps, self.zero_centred = eps, config.layernorm_zero_centered_gamma
        self.weight = _ones(hidden_size, config)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # it is Megatron's

    def forward(self, x: Tensor) -> Tensor:
        # In bf16 the sum would lose most digits of a small weight.
        return rms_norm(x, self.weight.float() + 1 if self.zero_centred else self.weight, self.eps)


class WideNorm(torch.nn.Module):
    """RMSNorm of q or k over all heads together. The heads are split over TP, and each rank holds the weights of its
    own heads. Every rank sees all tokens of the row, so the weights' gradients need no sum over ranks. Megatron's
    `config.qk_layernorm` must therefore be off: it sums the gradients of q and k norms."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, num_heads: int) -> None:
        """
        Args:
            hidden_size: the size of one head.
            num_heads: the number of heads on all ranks together.
        """
        super().__init__()
        assert not config.qk_layernorm
        self.eps = eps
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.weight = _ones(num_heads * hidden_size // self.group.size(), config)
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """
        Args:
            x: [..., heads, head size].
        """
        group = self.group if self.group.size() > 1 else None
        return rms_norm(x.flatten(-2), self.weight, self.eps, group).view(x.shape)


class PostNormLayer(TransformerLayer):
    """Megatron's layer with norms of the outputs of attention and MLP, before these are added to the residual. It has
    no norms of their inputs (OLMo 2, arXiv:2501.00656)."""

    self_attn_bda: GetAdd
    mlp_bda: GetAdd

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_self_attn_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        # Megatron calls these to get the function that adds the output of attention or MLP to the residual.
        self.self_attn_bda = partial(_norm_and_add, self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda = partial(_norm_and_add, self.post_mlp_layernorm, self.mlp_bda)


def _norm_and_add(norm: Norm, get_add: GetAdd, training: bool, fused: bool) -> Add:
    add = get_add(training, fused)

    def add_normed(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_with_bias
        assert bias is None
        return add((norm(output), None), residual, dropout)

    return add_normed


def _ones(length: int, config: TransformerConfig) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(length, dtype=config.params_dtype, device=platform.device()))


def rms_norm(x: Tensor, weight: Tensor, eps: float, group: dist.ProcessGroup | None = None) -> Tensor:
    """The norm over the last dim, in the dtype of x; see `_RmsNorm`."""
    normed: Tensor = _RmsNorm.apply(x, weight, eps, group)  # type: ignore[no-untyped-call]  # it has no types
    return normed


class _RmsNorm(torch.autograd.Function):
    """y = x r w with r = 1 / sqrt(mean(x^2) + eps) over the last dim (Zhang and Sennrich 2019, arXiv:1910.07467). With
    a group the last dim is split evenly over its ranks, and the two means over it (of x^2 in the forward pass, of g w n
    in the backward pass) are taken over all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, group: dist.ProcessGroup | None) -> Tensor:
        x32 = x.float()
        r: Tensor = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_()
        ctx.group, ctx.width = group, x.shape[-1]
        if group is not None:
            dist.all_reduce(r, group=group)
            ctx.width *= group.size()
        r.div_(ctx.width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x32 * r).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, r = ctx.saved_tensors
        grad32, weight32 = grad.float(), weight.float()
        normal = x.float() * r
        product = grad32 * normal
        # d x = r (g w - n mean(g w n)), with n = x r
        mean = product @ weight32
        if ctx.group is not None:
            dist.all_reduce(mean, group=ctx.group)
        mean = mean.div_(-ctx.width).unsqueeze(-1)
        grad_x = torch.addcmul(grad32 * weight32, normal, mean).mul_(r)
        return grad_x.to(x.dtype), product.flatten(0, -2).sum(0).to(weight.dtype), None, None
