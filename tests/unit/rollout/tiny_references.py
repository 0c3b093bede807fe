"""The log-probs of the tiny models as transformers computes them; the engine must give the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tiny_trainers import NUM_TOKENS
from transformers import DynamicCache


@torch.no_grad()
def reference_logp(
    model, ids: np.ndarray, temperature: float, forbidden: Sequence[int] = (), num_tokens: int = NUM_TOKENS
) -> np.ndarray:
    """The log-prob of each token, [L], among the tokens that the tokenizer has. The first entry is 0.

    Args:
        forbidden: tokens of the tokenizer that are never sampled.
        num_tokens: the number of the tokenizer's tokens.
    """
    return _picked(
        model(_rows(ids)).logits, ids, temperature, [*forbidden, *range(num_tokens, model.config.vocab_size)]
    )


@torch.no_grad()
def reference_logp_across(old, new, ids: np.ndarray, num_old: int, temperature: float) -> np.ndarray:
    """The same if `old` computes the keys and values of the first `num_old` tokens and `new` continues from these."""
    cache = DynamicCache()
    rows = _rows(ids)
    before = old(rows[:, :num_old], past_key_values=cache, use_cache=True).logits
    after = new(rows[:, num_old:], past_key_values=cache, use_cache=True).logits
    return _picked(torch.cat([before, after], 1), ids, temperature)


def _rows(ids: np.ndarray) -> torch.Tensor:
    return torch.tensor(ids[None].astype(np.int64))


def _picked(
    logits: torch.Tensor, ids: np.ndarray, temperature: float, forbidden: Sequence[int] | None = None
) -> np.ndarray:
    logits = logits.clone()
    logits[..., [*range(NUM_TOKENS, logits.shape[-1])] if forbidden is None else forbidden] = -torch.inf
    logp = (logits[0, :-1] / temperature).log_softmax(-1)
    picked = logp.gather(-1, _rows(ids)[0, 1:, None])[:, 0].numpy()
    return np.concatenate([np.zeros(1, np.float32), picked])
