"""Finds the tokens whose embeddings no training has moved, such as a padding token whose row was set to 0.

If such a token is sampled, the first norm divides by almost nothing, and its gradient may be of any size: a single one
of 8,000 sampled tokens has made the norm of a whole step 5,000 times as large.

Shape letters: V rows of this rank's part of the embedding, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALL = 0.01
"""A row counts as untrained if its norm is below this share of the median norm."""


def untrained_rows(weight_VH: Tensor, num_real: int) -> list[int]:
    """The rows of a part of the embedding that no training has moved, in ascending order.

    Args:
        num_real: the number of rows that are tokens; the others are padding.
    """
    norm_V = torch.linalg.vector_norm(weight_VH[:num_real].detach(), dim=1, dtype=torch.float32)
    found: list[int] = (norm_V < SMALL * norm_V.median()).nonzero().flatten().tolist() if num_real > 0 else []
    return found
