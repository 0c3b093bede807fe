"""Log-probs of the target tokens from logits that are split over the vocabulary, with their exact gradient.

The full distribution exists on no rank: three numbers a token are reduced (largest logit, sum of
exponentials, the target's logit). A plain all-reduce of the picked logit would multiply gradients by TP; this
function knows its own derivative instead. Invariant (tests/dist): value and gradient equal log_softmax on the
gathered logits.

Shape letters: T tokens, V columns of the vocabulary on this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def vocabulary_parallel_logprobs(
    logits_TV: Tensor, target_T: Tensor, *, temperature: float, vocab_size: int, group: dist.ProcessGroup
) -> Tensor:
    """log softmax(logits / temperature) at the targets, float32 [T], equal on all ranks of the group.

    Args:
        logits_TV: this rank's columns; rank r holds [r V, (r + 1) V) of the padded vocabulary.
        target_T: index into the whole vocabulary.
        vocab_size: columns from here on are padding and have no probability.
    """
    return _Logprobs.apply(logits_TV, target_T, temperature, vocab_size, group)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TV, target_T, temperature, vocab_size, group):
        first = group.rank() * logits_TV.shape[1]
        num_real = max(0, min(vocab_size - first, logits_TV.shape[1]))
        scaled_TV = logits_TV.to(torch.float32, copy=True).div_(temperature)
        scaled_TV[:, num_real:] = -torch.inf

        largest_T = scaled_TV.amax(1)
        dist.all_reduce(largest_T, op=dist.ReduceOp.MAX, group=group)
        scaled_TV -= largest_T.unsqueeze(1)
        here_T = (target_T >= first) & (target_T < first + num_real)
        column_T1 = torch.where(here_T, target_T - first, 0).unsqueeze(1)
        picked_T = torch.where(here_T, scaled_TV.gather(1, column_T1).squeeze(1), 0.0)
        softmax_TV = scaled_TV.exp_()
        totals_2T = torch.stack((softmax_TV.sum(1), picked_T))
        dist.all_reduce(totals_2T, group=group)
        normalizer_T, picked_T = totals_2T

        softmax_TV /= normalizer_T.unsqueeze(1)
        ctx.save_for_backward(softmax_TV, here_T, column_T1)
        ctx.temperature, ctx.dtype = temperature, logits_TV.dtype
        return picked_T - normalizer_T.log()

    @staticmethod
    def backward(ctx, grad_T):
        softmax_TV, here_T, column_T1 = ctx.saved_tensors
        grad_T = grad_T / ctx.temperature
        grad_TV = softmax_TV * -grad_T.unsqueeze(1)
        grad_TV.scatter_add_(1, column_T1, torch.where(here_T, grad_T, 0.0).unsqueeze(1))
        return grad_TV.to(ctx.dtype), None, None, None, None
