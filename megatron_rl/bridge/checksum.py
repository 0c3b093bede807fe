"""A checksum of bytes that is quick on a CPU and on a GPU: two sums of 64-bit words, modulo 2^64.

The first sum changes if any single word changes. The second sum multiplies each word by its position, so it changes if
two words change places (the idea is Fletcher's, 1982). Integer sums are exact in any order, so every device gets the
same result.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

CHUNK_WORDS = 2**17
"""The number of words that are multiplied at once: the products take at most 1 MiB."""


def checksum(data: Tensor) -> tuple[int, int]:
    """
    Args:
        data: uint8, contiguous. Zeros fill the last word if the data ends inside it.

    Returns:
        Both sums, modulo 2^64, as signed numbers of 64 bits.
    """
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), 8 * CHUNK_WORDS):
        chunk = data[start : start + 8 * CHUNK_WORDS]
        if chunk.numel() % 8:
            chunk = torch.nn.functional.pad(chunk, (0, -chunk.numel() % 8))
        elif chunk.data_ptr() % 8:  # a view of 64-bit words must begin at a multiple of 8 bytes
            chunk = chunk.clone()
        words = chunk.view(torch.int64)
        total = words.sum()
        sums[0] += total
        sums[1] += (words * _positions(data.device)[: len(words)]).sum() + start // 8 * total
    return tuple(sums.tolist())


@lru_cache(maxsize=4)
def _positions(device: torch.device) -> Tensor:
    return torch.arange(1, CHUNK_WORDS + 1, device=device)
