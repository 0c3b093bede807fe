"""Context parallelism: every rank of a context group has a part of each sequence of a packed row.

A sequence is cut into 2 C chunks of equal length, and rank r has chunks r and 2 C - 1 - r, as in Megatron-Core and
Transformer Engine. So all ranks have equally many tokens, and equally many pairs of a query and a key that it sees.

For the layers that run without Transformer Engine, keys and values travel round the ring of ranks (Ring Attention, Liu
et al. 2023, arXiv:2310.01889): in each of C turns a rank attends to what it holds, while this is on its way to the next
rank. Softmax over all turns follows from the log-sum-exp of each. In the backward pass keys and values travel a second
time, together with their gradients. A rank never holds the keys of more than two ranks.

Invariants (tests/unit/actor, tests/ranks): the parts of all ranks are the row; output and gradients equal plain
attention over whole sequences, with and without a sliding window and sinks.

Shape letters: T packed tokens of a row, t tokens of a rank, S sequences, B chunks of one kernel call, L queries and K
keys of each of them, N query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.actor import platform
from megatron_rl.actor.sinks import sink_gradient
from megatron_rl.types import Mesh


@dataclass(frozen=True, slots=True)
class ContextRank:
    """The place of a trainer rank in its context group."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, mesh: Mesh, rank: int) -> ContextRank | None:
        """None without context parallelism."""
        if mesh.context == 1:
            return None
        return cls(parallel_state.get_context_parallel_group(), mesh.context_rank(rank), mesh.context)

    def part(self, lengths_S: Tensor) -> Tensor:
        """int64 [t]: the packed positions of this rank's tokens, in their order.

        Args:
            lengths_S: the lengths of the sequences, multiples of 2 C.
        """
        return positions(lengths_S, self.size, self.rank)

    def whole(self, x_t: Tensor, lengths_S: Tensor) -> Tensor:
        """The values of all tokens of the row, [T] or [T, K], from this rank's. Every rank computes the same from them,
        so in the backward pass each takes the gradients of its own tokens."""
        whole: Tensor = _Whole.apply(x_t, self, lengths_S)  # type: ignore[no-untyped-call]  # it has no types
        return whole


def positions(lengths_S: Tensor, size: int, rank: int) -> Tensor:
    """See `ContextRank.part`."""
    chunk_S = lengths_S // (2 * size)
    starts_S = lengths_S.cumsum(0) - lengths_S
    firsts = torch.stack((starts_S + rank * chunk_S, starts_S + (2 * size - 1 - rank) * chunk_S), 1).flatten()
    counts = chunk_S.repeat_interleave(2)
    within = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return firsts.repeat_interleave(counts) + within


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_t: Tensor, context: ContextRank, lengths_S: Tensor) -> Tensor:
        parts = [torch.empty_like(x_t) for _ in range(context.size)]
        dist.all_gather(parts, x_t.contiguous(), group=context.group)
        whole_T = x_t.new_empty(int(lengths_S.sum()), *x_t.shape[1:])
        for rank, part in enumerate(parts):
            whole_T[positions(lengths_S, context.size, rank).to(x_t.device)] = part
        ctx.mine = context.part(lengths_S).to(x_t.device)
        return whole_T

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor, None, None]:
        return gradient_T[ctx.mine], None, None


@dataclass(frozen=True, slots=True)
class ChunkPair:
    """Chunks of this rank that attend to chunks which it holds: one kernel call."""

    query_BL: Tensor
    """int64: the index of every query among the tokens of this rank."""
    key_BK: Tensor
    """int64: the index of every key among the tokens of the rank that they come from."""
    is_causal: bool
    """Whether queries and keys are the same chunks, so that a query sees the keys up to itself. Otherwise it sees all
    keys, or the keys of the mask."""
    mask_LK: Tensor | None = None
    """True where a query sees a key."""


@dataclass(frozen=True, slots=True)
class RingPlan:
    turns: tuple[tuple[ChunkPair, ...], ...]
    """The pairs of chunks whose attention the rank computes in each turn of the ring."""
    context: ContextRank


def plan_ring(lengths_S: Tensor, context: ContextRank, window: int | None = None) -> RingPlan:
    """
    Args:
        lengths_S: the lengths of the sequences, on the CPU.
        window: the number of tokens that a token sees, itself included; None means all before it.
    """
    device, last = platform.device(), 2 * context.size - 1
    chunk_S = lengths_S // (2 * context.size)
    starts_S = 2 * (chunk_S.cumsum(0) - chunk_S)
    turns = []
    for turn in range(context.size):
        source = (context.rank - turn) % context.size
        pairs = []
        for length in chunk_S.unique().tolist():  # type: ignore[no-untyped-call]  # it has no types
            first_B1 = starts_S[chunk_S == length, None]
            for i, mine in enumerate((context.rank, last - context.rank)):
                for j, theirs in enumerate((source, last - source)):
                    for queries, keys, is_causal, mask_LK in _visible((mine - theirs) * length, length, window):
                        query_BL = first_B1 + i * length + torch.arange(queries.start, queries.stop)
                        key_BK = first_B1 + j * length + torch.arange(keys.start, keys.stop)
                        mask = None if mask_LK is None else mask_LK.to(device)
                        pairs.append(ChunkPair(query_BL.to(device), key_BK.to(device), is_causal, mask))
        turns.append(tuple(pairs))
    return RingPlan(tuple(turns), context)


def _visible(ahead: int, length: int, window: int | None) -> list[tuple[range, range, bool, Tensor | None]]:
    """The blocks of a chunk's queries that see keys of a chunk that begins `ahead` tokens before it. Each entry gives
    the queries, the keys, whether the block is causal, and its mask."""
    if ahead < 0:
        return []
    if window is None or window >= ahead + length:
        return [(range(length), range(length), ahead == 0, None)]
    blocks: list[tuple[range, range, bool, Tensor | None]] = []
    for first in range(0, length, window):
        queries = range(first, min(first + window, length))
        keys = range(max(0, ahead + first - window + 1), min(length, ahead + queries.stop))
        if len(keys):
            back = ahead + torch.arange(queries.start, queries.stop)[:, None] - torch.arange(keys.start, keys.stop)
            blocks.append((queries, keys, False, (back >= 0) & (back < window)))
    return blocks


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: RingPlan, scale: float | None = None, sink_N: Tensor | None = None
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        query, key, value: [t, N, D], [t, G, D], [t, G, D], rotated.
        scale: the factor of the scores; None means 1 / sqrt(D).
        sink_N: the sinks of the heads (sinks.py), if there are any.

    Returns:
        [t, N * D].
    """
    kv = torch.cat((key, value), 1)
    out: Tensor = _RingAttention.apply(query, kv, plan, scale, sink_N)  # type: ignore[no-untyped-call]  # it has no types
    return out.flatten(1)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, kv: Tensor, plan: RingPlan, scale: float | None, sink_N: Tensor | None
    ) -> Tensor:
        out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        lse = torch.full(query.shape[:2], -torch.inf, device=query.device)
        if sink_N is not None:  # every query sees the sink before the first turn
            lse[:] = sink_N
        held = kv
        for turn, pairs in enumerate(plan.turns):
            is_last = turn + 1 == len(plan.turns)
            coming = None if is_last else _PassedOn(held, plan.context)
            for pair in pairs:
                part_out, part_lse = _attend(*_operands(query, held, pair), pair, scale)
                rows = pair.query_BL.flatten()
                before = lse[rows]
                # A query that has seen no key yet keeps a finite value, because -inf - -inf is no number.
                after = torch.logaddexp(before, part_lse).clamp_min(torch.finfo(torch.float32).min)
                kept, added = ((x - after).exp()[..., None] for x in (before, part_lse))
                out[rows] = kept * out[rows] + added * part_out
                lse[rows] = after
            if coming is not None:
                held = coming.wait()
        result = out.to(query.dtype)
        ctx.save_for_backward(query, kv, result, lse, sink_N)
        ctx.plan, ctx.scale = plan, scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, Tensor | None]:
        query, kv, out, lse, sink_N = ctx.saved_tensors
        plan: RingPlan = ctx.plan
        query_gradient = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        held, held_gradient = kv, torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        for turn, pairs in enumerate(plan.turns):
            is_last = turn + 1 == len(plan.turns)
            coming = None if is_last else _PassedOn(held, plan.context)
            for pair in pairs:
                rows, keys = pair.query_BL.flatten(), pair.key_BK.flatten()
                saved = (_gather(out, pair.query_BL), lse[rows].view(*pair.query_BL.shape, -1).transpose(1, 2))
                operands = (_gather(gradient, pair.query_BL), *_operands(query, held, pair))
                parts = _attend_backward(*operands, *saved, pair, ctx.scale)
                of_query, of_key, of_value = (part.transpose(1, 2).flatten(0, 1).float() for part in parts)
                query_gradient.index_add_(0, rows, of_query)
                held_gradient.index_add_(0, keys, torch.cat((of_key, of_value), 1))
            held_gradient = _PassedOn(held_gradient, plan.context).wait()  # at last to the rank that it belongs to
            if coming is not None:
                held = coming.wait()
        of_sink = None
        if sink_N is not None:
            of_sink = sink_gradient(sink_N, lse, (gradient.to(lse.dtype) * out).sum(-1))
        return query_gradient.to(query.dtype), held_gradient.to(kv.dtype), None, None, of_sink


class _PassedOn:
    """A tensor on its way to the next rank of the ring, and the one that comes from the rank before."""

    def __init__(self, held: Tensor, context: ContextRank) -> None:
        held, self._coming = held.contiguous(), torch.empty_like(held, memory_format=torch.contiguous_format)
        ranks = dist.get_process_group_ranks(context.group)
        to, source = ranks[(context.rank + 1) % context.size], ranks[(context.rank - 1) % context.size]
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, held, to, context.group),
                dist.P2POp(dist.irecv, self._coming, source, context.group),
            ]
        )

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._coming


def _operands(query: Tensor, held: Tensor, pair: ChunkPair) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, [B, heads, length, D]."""
    key, value = _gather(held, pair.key_BK).chunk(2, 1)
    return _gather(query, pair.query_BL), key, value


def _gather(x_t: Tensor, index_BL: Tensor) -> Tensor:
    """Returns [B, heads, L, D]."""
    return x_t.index_select(0, index_BL.flatten()).view(*index_BL.shape, *x_t.shape[1:]).transpose(1, 2)


def _bias(pair: ChunkPair, dtype: torch.dtype) -> Tensor | None:
    if pair.mask_LK is None:
        return None
    bias = torch.zeros(pair.mask_LK.shape, dtype=dtype, device=pair.mask_LK.device)
    return bias.masked_fill_(~pair.mask_LK, -torch.inf)


def _attend(query: Tensor, key: Tensor, value: Tensor, pair: ChunkPair, scale: float | None) -> tuple[Tensor, Tensor]:
    """Returns the output, [B * L, N, D], and the log-sum-exp of the scores, [B * L, N], float32 both."""
    bias = _bias(pair, query.dtype)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(query, key, value, 0.0, pair.is_causal, attn_mask=bias, scale=scale)
    if pair.mask_LK is not None:  # the kernel gives 0 for a query that sees no key
        lse = lse.masked_fill(~pair.mask_LK.any(1), -torch.inf)
    return out.transpose(1, 2).flatten(0, 1).float(), lse.transpose(1, 2).flatten(0, 1)


def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    pair: ChunkPair,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value.

    Args:
        out, lse: the results of the whole attention, so that the scores of this pair get their share of the softmax.
    """
    bias = _bias(pair, query.dtype)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients: tuple[Tensor, Tensor, Tensor] = backward(
        gradient, query, key, value, out, lse, 0.0, pair.is_causal, attn_mask=bias, scale=scale
    )
    return gradients
