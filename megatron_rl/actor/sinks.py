"""Attention with sinks: the softmax of every head has one more logit, which is learnt and has no value (Xiao et al.
2023, arXiv:2309.17453; OpenAI 2025, arXiv:2508.10925).

A sink is a key that every query sees, whose value is zero. With Z the log-sum-exp of a query's scores and s the sink,
the output is the plain one times exp(Z - Z'), where Z' = log(exp(Z) + exp(s)). The backward pass of plain attention
takes Z' and this output in the place of its own, because they are all that it needs of the softmax: the scores' share
of the softmax is exp(score - Z'), and its mean gradient (the sink adds nothing) is gradient * output. The
gradient of the sink is -exp(s - Z') gradient * output, added over the queries. varlen.py does the same, and context.py
in its ring.

Invariants (tests/unit/actor): output and gradients equal a softmax with one more column, on both ways below.

Shape letters: B blocks of one kernel call, L queries and K keys of each of them, N query heads, G key-value heads, D
head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.actor.dot_product import dot_product_attention

WIDENING = 8
"""The dims that `attend_to_key` adds to a head: GPUs' kernels want a multiple of 8."""


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sink_N: Tensor, mask_LK: Tensor | None, scale: float | None = None
) -> Tensor:
    """Attention with a sink for each head. The other arguments and the result are as in `dot_product_attention`.

    Args:
        sink_N: the score of a key without a value, which every query of a head sees.
    """
    if query.device.type != "cpu":
        return attend_to_key(query, key, value, sink_N, mask_LK, scale)
    out: Tensor = _SinkAttention.apply(query, key, value, sink_N, mask_LK, scale)  # type: ignore[no-untyped-call]
    return out


def attend_to_key(
    query: Tensor, key: Tensor, value: Tensor, sink_N: Tensor, mask_LK: Tensor | None, scale: float | None = None
) -> Tensor:
    """The same on any device, by torch's own attention: it gets the sink as a first key of zeros, with one more dim,
    which is 1 there and 0 in the other keys; in a query it is the sink. GPUs take it for fp32 (bf16: varlen.py).

    The arguments and the result are as in `attend_with_sinks`.
    """
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    if mask_LK is None:
        mask_LK = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    mask = F.pad(mask_LK, (1, 0), value=True)
    of_query = (sink_N.to(query.dtype) / scale)[:, None, None].expand(*query.shape[:-1], 1)
    query = torch.cat((query, F.pad(of_query, (0, WIDENING - 1))), -1)
    key, value = (F.pad(x, (0, WIDENING, 1, 0)) for x in (key, value))
    is_sink = torch.zeros(key.shape[-2:], dtype=key.dtype, device=key.device)
    is_sink[0, head_dim] = 1.0
    return dot_product_attention(query, key + is_sink, value, mask, scale)[..., :head_dim]


def sink_gradient(sink_N: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """[N]: the gradient of the sinks.

    Args:
        lse: [..., N]: the log-sum-exp of a query's scores and its sink.
        delta: [..., N]: the sum over the head's dims of the output times its gradient.
    """
    of_each: Tensor = -(sink_N.to(lse.dtype) - lse).exp() * delta
    return of_each.flatten(0, -2).sum(0).to(sink_N.dtype)


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink_N: Tensor, mask_LK: Tensor | None, scale: float | None
    ) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        bias = _bias(mask_LK, query.dtype)
        out, lse = attend(query, key, value, 0.0, mask_LK is None, attn_mask=bias, scale=scale)
        whole = torch.logaddexp(lse, sink_N.to(lse.dtype)[:, None])
        result: Tensor = (out * (lse - whole).exp()[..., None]).to(query.dtype)
        ctx.save_for_backward(query, key, value, sink_N, result, whole)
        ctx.mask_LK, ctx.scale = mask_LK, scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None, None]:
        query, key, value, sink_N, out, whole = ctx.saved_tensors
        attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        of_query, of_key, of_value = attend_backward(
            gradient,
            query,
            key,
            value,
            out,
            whole,
            0.0,
            ctx.mask_LK is None,
            attn_mask=_bias(ctx.mask_LK, query.dtype),
            scale=ctx.scale,
        )
        delta = (gradient.to(whole.dtype) * out).sum(-1)
        of_sink = sink_gradient(sink_N, whole.transpose(1, 2), delta.transpose(1, 2))
        return of_query, of_key, of_value, of_sink, None, None


def _bias(mask_LK: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask_LK is None:
        return None
    return torch.zeros(mask_LK.shape, dtype=dtype, device=mask_LK.device).masked_fill_(~mask_LK, -torch.inf)
