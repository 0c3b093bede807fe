"""Attention of a whole packed row in one call of FlashAttention's variable-length kernel, for bf16 on GPUs.

The sequences need neither padding nor masks, with a sliding window, sinks and shared prompts, too, and no kernel is
built for each shape. `torch.nn.attention.varlen.varlen_attn` is the same kernel without sinks: it has no gradient for
the log-sum-exp. Sinks need none; sinks.py says why.

Invariants (tests/unit/actor): with the kernel's documented semantics in float64 in its place, output and gradients
equal plain attention, sequence by sequence. The kernel itself has not been run.

Shape letters: T packed tokens, U keys of all sequences, S sequences, N query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.actor import platform
from megatron_rl.actor.packing import SharedPrompts
from megatron_rl.actor.sinks import sink_gradient


@dataclass(frozen=True, slots=True)
class VarlenRow:
    """What the variable-length kernel must know of a packed row."""

    query_starts_S1: Tensor
    """int32: where each sequence's queries begin among the T packed tokens, and T."""
    key_starts_S1: Tensor
    """int32: the same of its keys, and U."""
    longest: tuple[int, int]
    """The most queries, and keys, of a sequence."""
    key_U: Tensor | None = None
    """int64: the packed position of each key, if sequences share prompts. None: the keys are the row."""
    window: int | None = None
    """The number of tokens that a query sees, itself included; None means all up to itself."""


def plan_varlen(lengths_S: Tensor, window: int | None = None, shared: SharedPrompts | None = None) -> VarlenRow:
    """
    Args:
        lengths_S: the lengths of the sequences, on the CPU.
        window: see `VarlenRow`.
        shared: the prompts that sequences share, whose tokens are keys of each of these sequences.
    """
    device, starts_S1 = platform.device(), F.pad(lengths_S.cumsum(0), (1, 0))
    keys_S, keys_S1, key_U = lengths_S, starts_S1, None
    if shared is not None:
        keys_S = lengths_S + shared.length_S
        keys_S1 = F.pad(keys_S.cumsum(0), (1, 0))
        within_U = torch.arange(int(keys_S1[-1])) - keys_S1[:-1].repeat_interleave(keys_S)
        of_U = [x.repeat_interleave(keys_S) for x in (shared.start_S, starts_S1[:-1], shared.length_S)]
        key_U = torch.where(within_U < of_U[2], of_U[0] + within_U, of_U[1] + within_U - of_U[2]).to(device)
    of_queries, of_keys = (x.to(device, torch.int32) for x in (starts_S1, keys_S1))
    return VarlenRow(of_queries, of_keys, (int(lengths_S.max()), int(keys_S.max())), key_U, window)


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, row: VarlenRow, scale: float | None = None, sink_N: Tensor | None = None
) -> Tensor:
    """Attention of a whole packed row in one call.

    Args:
        query, key, value: [T, N, D], [T, G, D], [T, G, D].
        scale: the factor of the scores; None means 1 / sqrt(D).
        sink_N: the sinks of the heads (sinks.py), if there are any.

    Returns:
        [T, N, D].
    """
    if query.shape[-1] % 8 or query.shape[-1] > 256:
        raise ValueError(
            f"FlashAttention takes heads of at most 256 dims in multiples of 8, and this model's have {query.shape[-1]}"
            "; set model.dtype to float32, or take Transformer Engine's layers (model.layers)"
        )
    if row.key_U is not None:
        key, value = (x.index_select(0, row.key_U) for x in (key, value))
    out: Tensor = _VarlenAttention.apply(query, key, value, sink_N, row, scale)  # type: ignore[no-untyped-call]
    return out


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink_N: Tensor | None, row: VarlenRow, scale: float | None
    ) -> Tensor:
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *_of_row(row), return_debug_mask=False, **_options(row, scale)
        )
        if sink_N is not None:
            whole = torch.logaddexp(lse, sink_N.to(lse.dtype)[:, None])
            out = (out * (lse - whole).exp().t()[..., None]).to(query.dtype)
            lse = whole
        ctx.save_for_backward(query, key, value, sink_N, out, lse, state, unused)
        ctx.row, ctx.scale = row, scale
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        query, key, value, sink_N, out, lse, state, unused = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
            gradient,
            query,
            key,
            value,
            out,
            lse,
            *_of_row(ctx.row),
            rng_state=state,
            unused=unused,
            **_options(ctx.row, ctx.scale),
        )
        of_sink = None
        if sink_N is not None:
            of_sink = sink_gradient(sink_N, lse.t(), (gradient.to(lse.dtype) * out).sum(-1))
        return of_query, of_key, of_value, of_sink, None, None


def _of_row(row: VarlenRow) -> tuple[Any, ...]:
    """The kernel's arguments from the starts of the queries on: no dropout, and whether all earlier keys are seen."""
    return row.query_starts_S1, row.key_starts_S1, *row.longest, 0.0, row.window is None


def _options(row: VarlenRow, scale: float | None) -> dict[str, Any]:
    if row.window is None:
        return {"scale": scale}
    return {"scale": scale, "window_size_left": row.window - 1, "window_size_right": 0}
