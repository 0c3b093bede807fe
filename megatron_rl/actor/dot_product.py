"""torch's attention of padded sequences, without the backend that holds all scores.

Invariant (tests/unit/actor): tensors that only this backend takes are refused with what to do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

WITHOUT_SCORES = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""The backends that never hold all scores, in their order. `math` holds them: a row of 17,408 tokens took 39 GB on an
H100."""


def dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask_LK: Tensor | None, scale: float | None = None
) -> Tensor:
    """torch's `scaled_dot_product_attention` without its backend `math`.

    Args:
        query, key, value: [B, N, L, D], [B, G, K, D], [B, G, K, D].
        mask_LK: True where a query sees a key; None: queries and keys have the same positions, and a query sees the
            keys up to itself.
        scale: the factor of the scores; None means 1 / sqrt(D).

    Returns:
        [B, N, L, D].

    Raises:
        ValueError: no other backend takes these tensors.
    """
    if query.is_cuda and query.dtype == torch.float32:  # its one backend for fp32 wants a key for each query head
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    try:
        with sdpa_kernel(WITHOUT_SCORES, set_priority=True):
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask_LK,
                is_causal=mask_LK is None,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
    except RuntimeError as error:
        if not any(words in str(error) for words in ("No available kernel", "No viable backend")):
            raise
        raise ValueError(
            f"no attention of torch that fits into memory takes {query.dtype} queries of {[*query.shape]} and keys of "
            f"{[*key.shape]} on {query.device.type}; set model.dtype to bfloat16, or take Transformer Engine's layers "
            "(model.layers), or a GPU that cuDNN or FlashAttention supports"
        ) from error
