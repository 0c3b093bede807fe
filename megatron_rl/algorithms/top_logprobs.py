"""Log-probs of several tokens at each position, from hidden states and in chunks, as logprobs.py has them for one.

Invariants (tests/ranks): values and gradients equal log_softmax's over the whole logits, for every split of the
vocabulary; no tensor has T x V elements.

Shape letters: T packed tokens, N tokens with a target, C tokens of one chunk, K tokens at each position, W ranks, V
this rank's columns of the vocabulary, R of these columns without padding, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl.algorithms.logprobs import (
    VocabularyShard,
    add_product,
    bounded,
    chunks,
    middle_of,
    own_columns,
    precise,
)


@torch.no_grad()
def top_tokens(
    hidden_TH: Tensor, weight_VH: Tensor, vocabulary: VocabularyShard, *, temperature: float, mask_T: Tensor, k: int
) -> Tensor:
    """int64 [T, K]: the most probable tokens of the whole vocabulary; 0 where the mask is False. All arguments are as
    in `logprobs.token_logprobs`. The vocabulary has at least K tokens that are not forbidden."""
    rows_N = mask_T.nonzero().squeeze(1)
    hidden_NH = hidden_TH.index_select(0, rows_N)
    own = min(k, vocabulary.num_real)
    value_NK = hidden_NH.new_full((len(rows_N), k), -torch.inf, dtype=precise(hidden_NH.dtype))
    token_NK = torch.zeros_like(value_NK, dtype=torch.int64)
    low = middle_of(hidden_NH, vocabulary)
    for rows, logits_CR in chunks(hidden_NH, weight_VH[: vocabulary.num_real], temperature, low):
        if vocabulary.forbidden_F is not None:
            logits_CR.index_fill_(1, vocabulary.forbidden_F, -torch.inf)
        value_NK[rows, :own], column_CK = logits_CR.topk(own)
        token_NK[rows, :own] = column_CK + vocabulary.first
    value_NJ, token_NJ = _of_all_ranks(value_NK, vocabulary), _of_all_ranks(token_NK, vocabulary)
    chosen_NK = token_NJ.gather(1, value_NJ.topk(k).indices)
    return chosen_NK.new_zeros(len(mask_T), k).index_copy(0, rows_N, chosen_NK)


def logprobs_at(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    token_TK: Tensor,
    vocabulary: VocabularyShard,
    *,
    temperature: float,
    mask_T: Tensor,
) -> Tensor:
    """[T, K]: the log-probs of these tokens; 0 where the mask is False. As to gradients see `logprobs.token_logprobs`.
    The rank that owns a token gives its logit, and the ranks exchange K + 2 numbers for each position."""
    rows_N = mask_T.nonzero().squeeze(1)
    hidden_NH = hidden_TH.index_select(0, rows_N)
    low = middle_of(hidden_NH, vocabulary)
    logp_NK: Tensor = _LogprobsAt.apply(  # type: ignore[no-untyped-call]  # it has no types
        hidden_NH, weight_VH, token_TK[rows_N], vocabulary, temperature, *low
    )
    return logp_NK.new_zeros(len(mask_T), token_TK.shape[1]).index_copy(0, rows_N, logp_NK)


def _of_all_ranks(x_NK: Tensor, vocabulary: VocabularyShard) -> Tensor:
    """[N, W K]: the numbers of all ranks that share the vocabulary."""
    joined_NWK = x_NK.new_zeros(len(x_NK), vocabulary.num_ranks, x_NK.shape[1])
    joined_NWK[:, vocabulary.rank] = x_NK
    return vocabulary.sum_over_ranks(joined_NWK).flatten(1)


class _LogprobsAt(torch.autograd.Function):
    """log p_k = z_k - M - log S, with z = logits / temperature, M = max z and S = sum exp(z - M);
    d log p_k / d z_v = [v = k] - p_v."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        token_NK: Tensor,
        vocabulary: VocabularyShard,
        temperature: float,
        *low: Tensor,
    ) -> Tensor:
        ctx.vocabulary, ctx.temperature = vocabulary, temperature
        here_NK, column_NK = own_columns(token_NK, vocabulary)
        largest_N = bounded(hidden_NH.new_full((len(hidden_NH),), -torch.inf, dtype=precise(hidden_NH.dtype)))
        total_N, picked_NK = torch.zeros_like(largest_N), largest_N.new_zeros(token_NK.shape)
        for rows, logits_CR in chunks(hidden_NH, weight_VH[: vocabulary.num_real], temperature, low):
            if vocabulary.forbidden_F is not None:
                logits_CR.index_fill_(1, vocabulary.forbidden_F, -torch.inf)
            largest_N[rows] = bounded(logits_CR.amax(1))
            picked_NK[rows] = logits_CR.gather(1, column_NK[rows])
            total_N[rows] = logits_CR.sub_(largest_N[rows, None]).exp_().sum(1)
        own_largest_N, largest_N = largest_N, vocabulary.max_over_ranks(largest_N.clone())
        picked_NK = torch.where(here_NK, picked_NK - largest_N[:, None], 0.0)
        own_total_N = total_N * (own_largest_N - largest_N).exp()
        numbers = vocabulary.sum_over_ranks(torch.cat([picked_NK, own_total_N[:, None]], 1))
        log_total_N = numbers[:, -1].log()
        ctx.save_for_backward(hidden_NH, weight_VH, token_NK, largest_N + log_total_N, *low)
        return numbers[:, :-1] - log_total_N[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_NK: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, token_NK, log_scale_N, *low = ctx.saved_tensors
        here_NK, column_NK = own_columns(token_NK, ctx.vocabulary)
        slope_NK = slope_NK / ctx.temperature
        weight_RH = weight_VH[: ctx.vocabulary.num_real]
        grad_hidden_NH = torch.zeros_like(hidden_NH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=log_scale_N.dtype)
        grad_low = [torch.zeros_like(one, dtype=log_scale_N.dtype) for one in low]
        for rows, logits_CR in chunks(hidden_NH, weight_RH, ctx.temperature, low):
            p_CR = logits_CR.sub_(log_scale_N[rows, None]).exp_()
            if ctx.vocabulary.forbidden_F is not None:
                p_CR.index_fill_(1, ctx.vocabulary.forbidden_F, 0.0)
            grad_CR = p_CR.mul_(-slope_NK[rows].sum(1, keepdim=True))
            grad_CR.scatter_add_(1, column_NK[rows], slope_NK[rows] * here_NK[rows])
            grad_CR = grad_CR.to(weight_VH.dtype)
            torch.mm(grad_CR, weight_RH, out=grad_hidden_NH[rows])
            add_product(grad_weight_VH[: len(weight_RH)], grad_CR.t(), hidden_NH[rows])
            if low:
                (middle_NK, b_VK), (grad_middle_NK, grad_b_VK) = low, grad_low
                add_product(grad_middle_NK[rows], grad_CR, b_VK[: len(weight_RH)])
                add_product(grad_b_VK[: len(weight_RH)], grad_CR.t(), middle_NK[rows])
        return (
            grad_hidden_NH if ctx.needs_input_grad[0] else None,
            grad_weight_VH.to(weight_VH.dtype) if ctx.needs_input_grad[1] else None,
            None,
            None,
            None,
            *(grad.to(weight_VH.dtype) for grad in grad_low),
        )
