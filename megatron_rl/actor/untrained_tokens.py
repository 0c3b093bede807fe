"""Finds the tokens whose embeddings no training has moved, such as a padding token whose row was set to 0.

If such a token is sampled, the first norm divides by almost nothing, and its gradient may be of any size: a single one
of 8,000 sampled tokens has made the norm of a whole step 5,000 times as large.

Shape letters: V rows of the embedding, H hidden size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SMALL = 0.01
"""A row counts as untrained if its norm is below this share of the median norm."""


def row_norms(weight_VH: Tensor) -> np.ndarray:
    """float32 [V]: the norm of each row."""
    norms: np.ndarray = torch.linalg.vector_norm(weight_VH.detach(), dim=1, dtype=torch.float32).cpu().numpy()
    return norms


def untrained_rows(norm_V: np.ndarray) -> list[int]:
    """The rows that no training has moved, in ascending order, by the norms of all rows of the embedding. A part of
    the rows has another median."""
    found: list[int] = (norm_V < SMALL * np.median(norm_V)).nonzero()[0].tolist()
    return found
