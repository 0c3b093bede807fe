"""A checksum of bytes that is quick on a CPU and on a GPU: two sums of 64-bit words, modulo 2^64.

The first sum changes if any single word changes. The second sum multiplies each word by its position, so it changes if
two words change places (the idea is Fletcher's, 1982). Integer sums are exact in any order, so every device gets the
same result.
"""

from __future__ import annotations

import torch
from torch import Tensor

COLUMNS = 1024
"""The number of words in a row."""
CHUNK_BYTES = {"cpu": 2**23, "cuda": 2**26}
"""The bytes that are summed at once, by the kind of device: on a CPU they fit into its cache, and a GPU should have few
kernels to start. Whole rows; the sums do not depend on it."""


def checksum(data: Tensor) -> tuple[int, int]:
    """Both sums of `word_sums` as signed numbers of 64 bits. It waits for the device."""
    first, second = word_sums(data).tolist()
    return first, second


def word_sums(data: Tensor) -> Tensor:
    """The words are summed as a matrix, by rows and by columns: a word's position is COLUMNS * row + column + 1. So
    nothing of the data's size is allocated.

    Args:
        data: uint8, contiguous. Zeros fill the last word if the data ends inside it.

    Returns:
        Both sums, modulo 2^64: int64 [2] on the data's device.
    """
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    start, row_bytes = 0, 8 * COLUMNS
    while left := data.numel() - start:
        size = min(CHUNK_BYTES[data.device.type], left // row_bytes * row_bytes) or left  # at last a part of a row
        chunk = data[start : start + size]
        if size % 8:
            chunk = torch.nn.functional.pad(chunk, (0, -size % 8))
        elif chunk.data_ptr() % 8:  # a view of 64-bit words must begin at a multiple of 8 bytes
            chunk = chunk.clone()
        words = chunk.view(torch.int64)
        words = words.view(-1, min(COLUMNS, len(words)))
        rows, columns = words.sum(1), words.sum(0)
        total = rows.sum()
        sums[0] += total
        sums[1] += COLUMNS * (_by_position(rows) - total) + _by_position(columns) + start // 8 * total
        start += size
    return sums


def _by_position(numbers: Tensor) -> Tensor:
    return (numbers * torch.arange(1, len(numbers) + 1, device=numbers.device)).sum()
