"""Exchanges a part of a row's tokens with all heads for all tokens with a part of the heads, and back, over a context
group (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509).

Layers with a state use it: the state goes from each token to the next one, so a rank needs whole sequences. Every rank
has equally many tokens and takes equally many heads, so each exchange is one all-to-all of equal parts, and so is its
backward pass.

Invariant (tests/ranks): in every layout gradients equal the ones of one process.

Shape letters: T packed tokens of a row, t = T / C tokens of one of C ranks, K heads, k = K / C heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.actor import platform
from megatron_rl.actor.context import ContextRank, positions


@dataclass(frozen=True, slots=True)
class HeadExchange:
    context: ContextRank
    packed_T: Tensor
    """int64: the packed position of every token, in the order of the ranks that have them."""
    rank_T: Tensor
    """int64: the inverse: the place of every packed position in the order of the ranks."""

    def to_heads(self, x_tK: Tensor) -> Tensor:
        """[T, k, ...] in packed order from [t, K, ...]: this rank's heads are the ones with its number."""
        size = self.context.size
        parts = x_tK.unflatten(1, (size, -1)).movedim(1, 0)  # type: ignore[no-untyped-call]  # it has no types
        return _exchanged(parts, self.context.group).flatten(0, 1).index_select(0, self.rank_T)

    def to_tokens(self, x_Tk: Tensor) -> Tensor:
        """[t, K, ...] from [T, k, ...] in packed order."""
        parts = x_Tk.index_select(0, self.packed_T).unflatten(0, (self.context.size, -1))  # type: ignore[no-untyped-call]
        return _exchanged(parts, self.context.group).movedim(0, 1).flatten(1, 2)


def plan_exchange(lengths_S: Tensor, context: ContextRank) -> HeadExchange:
    """
    Args:
        lengths_S: the lengths of the sequences, on the CPU, multiples of 2 C.
    """
    packed_T = torch.cat([positions(lengths_S, context.size, rank) for rank in range(context.size)])
    device = platform.device()
    return HeadExchange(context, packed_T.to(device), packed_T.argsort().to(device))


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part r goes to rank r of the group, and the result's part r comes from it."""
    exchanged: Tensor = _AllToAll.apply(parts, group)  # type: ignore[no-untyped-call]  # it has no types
    return exchanged


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.group), None
