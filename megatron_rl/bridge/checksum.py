"""A checksum of bytes that is quick on a CPU and on a GPU: two sums of 64-bit words, modulo 2^64.

The first sum changes with any single changed word; the second, of words times their position, with words that changed
places (the idea is Fletcher's, 1982). Integer sums are exact in any order: every device gets the same.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

CHUNK_WORDS = 2**17
"""Words at once: bounds the products' memory to 1 MiB."""


def checksum(data: Tensor) -> tuple[int, int]:
    """
    Args:
        data: uint8, contiguous. A last word that it does not fill counts as if zeros followed.
    """
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), 8 * CHUNK_WORDS):
        chunk = data[start : start + 8 * CHUNK_WORDS]
        if chunk.numel() % 8:
            chunk = torch.nn.functional.pad(chunk, (0, -chunk.numel() % 8))
        elif chunk.data_ptr() % 8:  # words begin at multiples of 8
            chunk = chunk.clone()
        words = chunk.view(torch.int64)
        total = words.sum()
        sums[0] += total
        sums[1] += (words * _positions(data.device)[: len(words)]).sum() + start // 8 * total
    return tuple(sums.tolist())


@lru_cache(maxsize=4)
def _positions(device: torch.device) -> Tensor:
    return torch.arange(1, CHUNK_WORDS + 1, device=device)
