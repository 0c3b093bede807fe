"""Log-probs and entropies of tokens from hidden states: the logits of all tokens are never held at once.

The output layer is applied to one chunk of tokens after another. Of each chunk a few numbers a token stay (largest
logit, sum of exponentials, the target's logit), and backward computes the chunk's logits once more, forms their
gradient in the same memory and multiplies it into the gradients of hidden states and weights. So a third more
arithmetic saves all of T x V. The vocabulary may be split over ranks: they exchange the numbers of all tokens
twice a call, whatever the chunks, and nothing in backward.

Invariants (tests/unit/algorithms): values and gradients are those of log_softmax; they depend neither on the chunks
nor on the vocabulary's split beyond rounding; padding has no probability and no gradient; no tensor has T x V
elements.

Shape letters: T packed tokens, N of them with a target, C tokens of one chunk, V this rank's columns of the
vocabulary, R those of them that are real, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 256 * 2**20
"""The size of one chunk's logits in fp32: hundreds of rows at a vocabulary of 150,000, enough for the matrix products
to run at full speed. The entropy needs a second chunk of this size."""


def _alone(numbers: Tensor) -> Tensor:
    return numbers


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This rank's columns of the vocabulary: one row each of its output layer's weight."""

    num_real: int
    """Columns from here on are padding: no token."""
    first: int = 0
    """The token of the first column."""
    max_over_ranks: Callable[[Tensor], Tensor] = _alone
    sum_over_ranks: Callable[[Tensor], Tensor] = _alone
    """Collectives over the ranks that share the vocabulary, element by element. They may overwrite their argument."""


def token_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    vocabulary: VocabularyShard,
    *,
    temperature: float,
    mask_T: Tensor | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log p of the targets and the entropy of p, with p = softmax(hidden weight' / temperature).

    The matrix products run in the dtype of hidden and weight, which is one; the rest in fp32 (fp64 for fp64).

    Args:
        hidden_TH: of all these tokens, equal on all ranks.
        weight_VH: this rank's rows of the output layer.
        target_T: tokens of the whole vocabulary.
        temperature: positive; the logits are divided by it.
        mask_T: bool; where it is False nothing is computed and the results are 0. Equal on all ranks.
        entropy: compute -sum p log p too.

    Returns:
        logp_T and entropy_T (None unless asked for), float32 (float64 for float64), equal on all ranks. The gradient
        to weight is whole, and summed over chunks in fp32. The gradient to hidden is the part of this rank's columns:
        the caller sums it over ranks, as Megatron's copy_to_tensor_model_parallel_region and
        gather_from_sequence_parallel_region do.
    """
    assert hidden_TH.dtype == weight_VH.dtype and 0 <= vocabulary.num_real <= len(weight_VH) and temperature > 0
    if mask_T is None:
        return _apply(hidden_TH, weight_VH, target_T, vocabulary, temperature, entropy)
    rows_N = mask_T.nonzero().squeeze(1)
    hidden_NH = hidden_TH.index_select(0, rows_N)
    logp_N, entropy_N = _apply(hidden_NH, weight_VH, target_T[rows_N], vocabulary, temperature, entropy)

    def spread(x_N: Tensor) -> Tensor:
        return x_N.new_zeros(len(mask_T)).index_copy(0, rows_N, x_N)

    return spread(logp_N), None if entropy_N is None else spread(entropy_N)


def _apply(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    vocabulary: VocabularyShard,
    temperature: float,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    result: tuple[Tensor, Tensor | None] = _Logprobs.apply(  # type: ignore[no-untyped-call]  # torch gives it no types
        hidden_NH, weight_VH, target_N, vocabulary, temperature, entropy
    )
    return result


class _Logprobs(torch.autograd.Function):
    """With z = logits / temperature, p = softmax(z) and H the entropy, for the target y:

    log p_y = z_y - M - log S,  H = log S - sum p (z - M),  with M = max z and S = sum exp(z - M);
    d log p_y / d z_v = [v = y] - p_v,  d H / d z_v = -p_v (log p_v + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_N: Tensor,
        vocabulary: VocabularyShard,
        temperature: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.vocabulary, ctx.temperature = vocabulary, temperature
        ctx.set_materialize_grads(False)
        here_N, column_N1 = _own_columns(target_N, vocabulary)
        # Of this rank's columns: max z, the target's z, sum exp(z - max z), sum exp(z - max z) (z - max z). A rank of
        # nothing but padding says the lowest number, which adds 0 below where -inf would add NaN.
        largest_N = _bounded(hidden_NH.new_full((len(hidden_NH),), -torch.inf, dtype=_precise(hidden_NH.dtype)))
        picked_N, total_N, product_N = (torch.zeros_like(largest_N) for _ in range(3))
        for rows, logits_CR in _chunks(hidden_NH, weight_VH[: vocabulary.num_real], temperature):
            largest_C = _bounded(logits_CR.amax(1))
            largest_N[rows] = largest_C
            picked_N[rows] = logits_CR.gather(1, column_N1[rows]).squeeze(1)
            logits_CR.sub_(largest_C.unsqueeze(1))
            if entropy:
                exp_CR = logits_CR.exp()
                product_N[rows] = _row_products(exp_CR, _bounded(logits_CR))
            else:
                exp_CR = logits_CR.exp_()
            total_N[rows] = exp_CR.sum(1)

        # Of all columns, relative to the M of all.
        own_largest_N, largest_N = largest_N, vocabulary.max_over_ranks(largest_N.clone())
        below_N = own_largest_N - largest_N
        numbers = [torch.where(here_N, picked_N - largest_N, 0.0), total_N * below_N.exp()]
        if entropy:
            numbers.append((product_N + total_N * below_N) * below_N.exp())
        picked_N, total_N, *product = vocabulary.sum_over_ranks(torch.stack(numbers))
        log_total_N = total_N.log()
        entropy_N = log_total_N - product[0] / total_N if entropy else None
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, largest_N, log_total_N, entropy_N)
        return picked_N - log_total_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logp_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden_NH, weight_VH, target_N, largest_N, log_total_N, entropy_N = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        weight_RH = weight_VH[: ctx.vocabulary.num_real]
        here_N, column_N1 = _own_columns(target_N, ctx.vocabulary)
        # By the logits, the gradient is slope_logp ([v = y] - p_v) - slope_entropy p_v (log p_v + H).
        slope_logp_N = torch.zeros_like(log_total_N) if grad_logp_N is None else grad_logp_N / ctx.temperature
        slope_entropy_N = None if grad_entropy_N is None else grad_entropy_N / ctx.temperature
        slope_here_N1 = torch.where(here_N, slope_logp_N, 0.0).unsqueeze(1)
        grad_hidden_NH = torch.zeros_like(hidden_NH) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=log_total_N.dtype) if needs_weight else None
        for rows, logits_CR in _chunks(hidden_NH, weight_RH, ctx.temperature):
            log_p_CR = logits_CR.sub_(largest_N[rows, None]).sub_(log_total_N[rows, None])
            if slope_entropy_N is None:
                grad_CR = log_p_CR.exp_().mul_(-slope_logp_N[rows, None])
            else:
                p_CR = log_p_CR.exp()
                grad_CR = _bounded(log_p_CR).add_(entropy_N[rows, None]).mul_(slope_entropy_N[rows, None])
                grad_CR.add_(slope_logp_N[rows, None]).mul_(p_CR.neg_())
            grad_CR.scatter_add_(1, column_N1[rows], slope_here_N1[rows])
            grad_CR = grad_CR.to(weight_VH.dtype)
            if grad_hidden_NH is not None:
                torch.mm(grad_CR, weight_RH, out=grad_hidden_NH[rows])
            if grad_weight_VH is not None:
                _add_product(grad_weight_VH[: len(weight_RH)], grad_CR.t(), hidden_NH[rows])
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_NH, grad_weight_VH, None, None, None, None


def _precise(dtype: torch.dtype) -> torch.dtype:
    """The dtype of everything but the matrix products."""
    return torch.promote_types(dtype, torch.float32)


def _bounded(x: Tensor) -> Tensor:
    """-inf becomes the lowest finite number, in place: times a probability of 0 it is 0, and not NaN."""
    return x.clamp_(min=torch.finfo(x.dtype).min)


def _own_columns(target_N: Tensor, vocabulary: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Whether a target is one of this rank's columns, and which one; 0 for the others."""
    here_N = (target_N >= vocabulary.first) & (target_N < vocabulary.first + vocabulary.num_real)
    return here_N, torch.where(here_N, target_N - vocabulary.first, 0).unsqueeze(1)


def _chunks(hidden_NH: Tensor, weight_RH: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """(rows, logits_CR / temperature), chunk by chunk. All share one memory, which the caller may overwrite."""
    num_rows, num_columns = len(hidden_NH), len(weight_RH)
    if not num_rows or not num_columns:
        return
    dtype = _precise(hidden_NH.dtype)
    chunk = min(num_rows, max(1, CHUNK_BYTES // (num_columns * dtype.itemsize)))
    memory_CR = hidden_NH.new_empty((chunk, num_columns), dtype=dtype)
    for start in range(0, num_rows, chunk):
        rows = slice(start, min(start + chunk, num_rows))
        logits_CR = memory_CR[: rows.stop - start]
        if dtype == hidden_NH.dtype:
            torch.mm(hidden_NH[rows], weight_RH.t(), out=logits_CR)
        else:
            logits_CR.copy_(hidden_NH[rows] @ weight_RH.t())
        yield rows, logits_CR.div_(temperature)


def _row_products(a_CR: Tensor, b_CR: Tensor) -> Tensor:
    """sum(a * b, 1) without a third chunk."""
    return torch.bmm(a_CR.unsqueeze(1), b_CR.unsqueeze(2)).flatten()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b; where total is the more precise, each product is rounded once to their dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)
