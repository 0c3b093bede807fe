"""Log-probs and entropies of tokens from hidden states, without the logits of all tokens in memory at once.

The output layer is applied to one chunk of tokens after another. Only a few numbers of each token are kept (the largest
logit, the sum of exponentials, the target's logit). The backward pass computes the logits of a chunk again, forms their
gradient in the same memory and multiplies it into the gradients of hidden states and weights. This costs a third more
arithmetic and saves the memory of T x V numbers. The vocabulary may be split over ranks. They then exchange numbers of
all tokens twice in a call, however many chunks there are, and nothing in the backward pass.

Invariants (tests/unit/algorithms): values and gradients equal log_softmax's; apart from rounding, they depend neither
on the chunks nor on the split of the vocabulary; padding and forbidden tokens have no probability and no gradient; no
tensor has T x V elements.

Shape letters: T packed tokens, N tokens with a target, C tokens of one chunk, V this rank's columns of the
vocabulary, R of these columns without padding, F of these that are forbidden, H hidden size, K rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl.algorithms.columns import FirstPass

Extra = Literal["entropy", "energy"]
"""What is computed together with log-probs."""
CHUNK_BYTES = 256 * 2**20
"""The size of one chunk's logits in fp32. A chunk has hundreds of rows at a vocabulary of 150,000, which is enough for
matrix products at full speed. The entropy needs a second chunk of this size."""


def _one_rank(numbers: Tensor) -> Tensor:
    return numbers


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to the weight of the output layer: scale B A (arXiv:2106.09685)."""

    a_KH: Tensor
    b_VK: Tensor
    """This rank's rows of B."""
    scale: float


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This rank's columns of the vocabulary. Each column belongs to one row of the weight of its output layer."""

    num_real: int
    """The number of columns that belong to tokens; the columns after them are padding."""
    first: int = 0
    """The token of the first column."""
    forbidden_F: Tensor | None = None
    """int64, on the device of the weights: the columns whose tokens are never sampled. Their logits are -inf, so that
    they have no probability and no gradient, like padding. None: there are none."""
    low_rank: LowRank | None = None
    """An adapter of the output layer, in the dtype of its weight. It adds scale (hidden A') B' to the logits."""
    num_ranks: int = 1
    """The number of ranks that share the vocabulary."""
    rank: int = 0
    max_over_ranks: Callable[[Tensor], Tensor] = _one_rank
    """The elementwise maximum over the ranks that share the vocabulary. It may overwrite its argument."""
    sum_over_ranks: Callable[[Tensor], Tensor] = _one_rank
    """The elementwise sum over the ranks that share the vocabulary. It may overwrite its argument."""


def token_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    vocabulary: VocabularyShard,
    *,
    temperature: float,
    mask_T: Tensor | None = None,
    also: Collection[Extra] = (),
) -> FirstPass:
    """The log-probs of the targets, and what is asked for besides, under p = softmax(hidden weight' / temperature).

    Hidden states and weights enter the matrix products in the dtype that they share, the logits are fp32, and so is the
    rest (fp64 if that is fp64). The gradient of the logits is rounded to the shared dtype for the products of the
    backward pass.

    Args:
        hidden_TH: the hidden states of all these tokens, equal on all ranks.
        weight_VH: this rank's rows of the output layer.
        target_T: the targets, as tokens of the whole vocabulary.
        temperature: a positive number by which the logits are divided.
        mask_T: bool, equal on all ranks. Where it is False nothing is computed, and the results are 0.
        also: `entropy` is -sum p log p; `energy` is `FirstPass.energy_T`, which has no gradient.

    Returns:
        float32 (float64 for float64), equal on all ranks; None for what was not asked for. The gradient of the weight
        is complete, and summed over chunks in fp32. The gradient of hidden_TH comes from this
        rank's columns only, so the caller must sum it over the ranks, as Megatron's
        copy_to_tensor_model_parallel_region and gather_from_sequence_parallel_region do; so does the gradient of A.
    """
    return _masked(hidden_TH, weight_VH, target_T, vocabulary, temperature, mask_T, also)[0]


def draft_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    vocabulary: VocabularyShard,
    *,
    temperature: float,
    mask_T: Tensor,
) -> tuple[Tensor, Tensor]:
    """The log-probs of the targets as in `token_logprobs`, and whether each target has the largest logit, bool [T]: an
    engine that drafts the likeliest token would have drafted it."""
    found, is_largest_T = _masked(hidden_TH, weight_VH, target_T, vocabulary, temperature, mask_T)
    return found.logp_T, is_largest_T


def _masked(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    vocabulary: VocabularyShard,
    temperature: float,
    mask_T: Tensor | None,
    also: Collection[Extra] = (),
) -> tuple[FirstPass, Tensor]:
    assert hidden_TH.dtype == weight_VH.dtype and 0 <= vocabulary.num_real <= len(weight_VH) and temperature > 0
    if mask_T is None:
        return _apply(hidden_TH, weight_VH, target_T, vocabulary, temperature, also)
    rows_N = mask_T.nonzero().squeeze(1)
    hidden_NH = hidden_TH.index_select(0, rows_N)
    found, is_largest_N = _apply(hidden_NH, weight_VH, target_T[rows_N], vocabulary, temperature, also)

    def spread(x_N: Tensor) -> Tensor:
        return x_N.new_zeros(len(mask_T)).index_copy(0, rows_N, x_N)

    return found.each(spread), spread(is_largest_N)


def _apply(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    vocabulary: VocabularyShard,
    temperature: float,
    also: Collection[Extra],
) -> tuple[FirstPass, Tensor]:
    low = middle_of(hidden_NH, vocabulary)
    *numbers, is_largest_N = _Logprobs.apply(  # type: ignore[no-untyped-call]  # it has no types
        hidden_NH, weight_VH, target_N, vocabulary, temperature, also, *low
    )
    return FirstPass(*numbers), is_largest_N


class _Logprobs(torch.autograd.Function):
    """The log-prob of the target y and the entropy H, with z = logits / temperature and p = softmax(z):

    log p_y = z_y - M - log S,  H = log S - sum p (z - M),  with M = max z and S = sum exp(z - M);
    d log p_y / d z_v = [v = y] - p_v,  d H / d z_v = -p_v (log p_v + H).

    The logits are hidden weight' + middle B', if `low` is an adapter's middle_NK = scale hidden A' and b_VK.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_N: Tensor,
        vocabulary: VocabularyShard,
        temperature: float,
        also: Collection[Extra],
        *low: Tensor,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        ctx.vocabulary, ctx.temperature = vocabulary, temperature
        ctx.set_materialize_grads(False)
        entropy, energy = "entropy" in also, "energy" in also
        here_N1, column_N1 = own_columns(target_N[:, None], vocabulary)
        # These five belong to this rank's columns: max z, the target's z, sum exp(z - max z),
        # sum exp(z - max z) (z - max z), and sum exp(z - max z)^2 without the target. On a rank that has only padding,
        # max z is the lowest finite number: it adds 0 below, where -inf would add NaN.
        largest_N = bounded(hidden_NH.new_full((len(hidden_NH),), -torch.inf, dtype=precise(hidden_NH.dtype)))
        picked_N, total_N, product_N, square_N = (torch.zeros_like(largest_N) for _ in range(4))
        for rows, logits_CR in chunks(hidden_NH, weight_VH[: vocabulary.num_real], temperature, low):
            if vocabulary.forbidden_F is not None:
                logits_CR.index_fill_(1, vocabulary.forbidden_F, -torch.inf)
            largest_C = bounded(logits_CR.amax(1))
            largest_N[rows] = largest_C
            picked_N[rows] = logits_CR.gather(1, column_N1[rows]).squeeze(1)
            logits_CR.sub_(largest_C.unsqueeze(1))
            if entropy:
                exp_CR = logits_CR.exp()
                product_N[rows] = _row_products(exp_CR, bounded(logits_CR))
            else:
                exp_CR = logits_CR.exp_()
            total_N[rows] = exp_CR.sum(1)
            if energy:  # without the target, whose p^2 would hide the others' if it is near 1
                exp_CR.scatter_add_(1, column_N1[rows], -exp_CR.gather(1, column_N1[rows]) * here_N1[rows])
                square_N[rows] = _row_products(exp_CR, exp_CR)

        # From here on the numbers belong to the columns of all ranks, and are relative to the M of all columns.
        own_largest_N, largest_N = largest_N, vocabulary.max_over_ranks(largest_N.clone())
        below_N = own_largest_N - largest_N
        numbers = [torch.where(here_N1.squeeze(1), picked_N - largest_N, 0.0), total_N * below_N.exp()]
        if entropy:
            numbers.append((product_N + total_N * below_N) * below_N.exp())
        if energy:
            numbers.append(square_N * (2 * below_N).exp())
        picked_N, total_N, *sums = vocabulary.sum_over_ranks(torch.stack(numbers))
        log_total_N = total_N.log()
        entropy_N = log_total_N - sums[0] / total_N if entropy else None
        energy_N = (picked_N - log_total_N).expm1().square() + sums[-1] / total_N.square() if energy else None
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, largest_N, log_total_N, entropy_N, *low)
        is_largest_N = picked_N == 0
        ctx.mark_non_differentiable(is_largest_N, *([] if energy_N is None else [energy_N]))
        return picked_N - log_total_N, entropy_N, energy_N, is_largest_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logp_N: Tensor | None, grad_entropy_N: Tensor | None, *of_others: None
    ) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, target_N, largest_N, log_total_N, entropy_N, *low = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        weight_RH = weight_VH[: ctx.vocabulary.num_real]
        here_N1, column_N1 = own_columns(target_N[:, None], ctx.vocabulary)
        log_scale_N1 = (largest_N + log_total_N).unsqueeze(1)
        slope_logp_N = torch.zeros_like(log_total_N) if grad_logp_N is None else grad_logp_N / ctx.temperature
        slope_entropy_N = None if grad_entropy_N is None else grad_entropy_N / ctx.temperature
        here_N1 = here_N1.to(log_total_N.dtype)
        grad_hidden_NH = torch.zeros_like(hidden_NH) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=log_total_N.dtype) if needs_weight else None
        grad_low = [torch.zeros_like(one, dtype=log_total_N.dtype) for one in low]
        for rows, logits_CR in chunks(hidden_NH, weight_RH, ctx.temperature, low):
            grad_CR = _gradient_of_logits(
                logits_CR.sub_(log_scale_N1[rows]),
                column_N1[rows],
                here_N1[rows],
                slope_logp_N[rows, None],
                None if slope_entropy_N is None else (slope_entropy_N[rows, None], entropy_N[rows, None]),
                ctx.vocabulary.forbidden_F,
                weight_VH.dtype,
            )
            if grad_hidden_NH is not None:
                torch.mm(grad_CR, weight_RH, out=grad_hidden_NH[rows])
            if grad_weight_VH is not None:
                add_product(grad_weight_VH[: len(weight_RH)], grad_CR.t(), hidden_NH[rows])
            if low:
                (middle_NK, b_VK), (grad_middle_NK, grad_b_VK) = low, grad_low
                add_product(grad_middle_NK[rows], grad_CR, b_VK[: len(weight_RH)])
                add_product(grad_b_VK[: len(weight_RH)], grad_CR.t(), middle_NK[rows])
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_NH, grad_weight_VH, *[None] * 4, *(grad.to(weight_VH.dtype) for grad in grad_low)


def _gradient_of_logits(
    log_p_CR: Tensor,
    column_C1: Tensor,
    here_C1: Tensor,
    slope_C1: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    forbidden_F: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """slope ([v = y] - p_v) - slope_entropy p_v (log p_v + H), rounded to `dtype`. It overwrites log_p_CR.

    Args:
        here_C1: 1 if column_C1 is the target y, 0 if the target is another rank's.
        entropy: slope_entropy and H, if the entropy has a gradient.
    """
    p_CR = log_p_CR.exp_() if entropy is None else log_p_CR.exp()
    if forbidden_F is not None:
        p_CR.index_fill_(1, forbidden_F, 0.0)
    of_entropy_CR = None
    if entropy is not None:
        slope_entropy_C1, entropy_C1 = entropy
        of_entropy_CR = bounded(log_p_CR).add_(entropy_C1).mul_(slope_entropy_C1).mul_(p_CR)
    p_CR.scatter_add_(1, column_C1, -here_C1)
    grad_CR = p_CR if p_CR.dtype == dtype else torch.empty_like(p_CR, dtype=dtype)
    if of_entropy_CR is None:
        return torch.mul(p_CR, -slope_C1, out=grad_CR)
    return torch.sub(p_CR.mul_(-slope_C1), of_entropy_CR, out=grad_CR)


def precise(dtype: torch.dtype) -> torch.dtype:
    """The dtype of all computations but the matrix products."""
    return torch.promote_types(dtype, torch.float32)


def bounded(x: Tensor) -> Tensor:
    """Replace -inf by the lowest finite number, in place. Its product with a probability of 0 is 0 and not NaN."""
    return x.clamp_(min=torch.finfo(x.dtype).min)


def own_columns(token: Tensor, vocabulary: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Whether each token is one of this rank's columns, and the index of the column; 0 for the others."""
    here = (token >= vocabulary.first) & (token < vocabulary.first + vocabulary.num_real)
    return here, torch.where(here, token - vocabulary.first, 0)


def middle_of(hidden_NH: Tensor, vocabulary: VocabularyShard) -> tuple[Tensor, ...]:
    """An adapter's middle_NK = scale hidden A' and b_VK; nothing without an adapter."""
    if (adapter := vocabulary.low_rank) is None:
        return ()
    return adapter.scale * (hidden_NH @ adapter.a_KH.t()), adapter.b_VK


def chunks(
    hidden_NH: Tensor, weight_RH: Tensor, temperature: float, low: Sequence[Tensor]
) -> Iterator[tuple[slice, Tensor]]:
    """Yields (rows, logits_CR / temperature) of each chunk. All chunks share one memory, which the caller may
    overwrite.

    Args:
        low: nothing, or an adapter's (middle_NK, b_VK), whose product is added to the logits.
    """
    num_rows, num_columns = len(hidden_NH), len(weight_RH)
    if not num_rows or not num_columns:
        return
    dtype = precise(hidden_NH.dtype)
    # There is a product of bf16 matrices with a result in fp32 for GPUs, and none for CPUs.
    is_mixed = dtype != hidden_NH.dtype and hidden_NH.is_cuda
    weight_HR = (weight_RH if is_mixed else weight_RH.to(dtype)).t()
    low = [one.to(dtype) for one in low]
    chunk = min(num_rows, max(1, CHUNK_BYTES // (num_columns * dtype.itemsize)))
    memory_CR = hidden_NH.new_empty((chunk, num_columns), dtype=dtype)
    for start in range(0, num_rows, chunk):
        rows = slice(start, min(start + chunk, num_rows))
        logits_CR = memory_CR[: rows.stop - start]
        if is_mixed:
            torch.mm(hidden_NH[rows], weight_HR, out_dtype=dtype, out=logits_CR)
        else:
            torch.mm(hidden_NH[rows].to(dtype), weight_HR, out=logits_CR)
        if low:
            middle_NK, b_VK = low
            logits_CR.addmm_(middle_NK[rows], b_VK[:num_columns].t())
        yield rows, logits_CR if temperature == 1 else logits_CR.div_(temperature)


def _row_products(a_CR: Tensor, b_CR: Tensor) -> Tensor:
    """sum(a * b, 1), without the memory of a third chunk."""
    return torch.bmm(a_CR.unsqueeze(1), b_CR.unsqueeze(2)).flatten()


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b. If total is more precise than a and b, the product is rounded to their dtype before it is added."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)
