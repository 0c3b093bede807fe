"""The images of a packed row (packing.py).

Shape letters: T packed tokens, M image tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_rl.models.vision import positions
from megatron_rl.types import Picture, Tokens, Vision


@dataclass(frozen=True, slots=True)
class RowImages:
    """The images of a row, M tokens together."""

    pictures: tuple[Picture, ...]
    """The images in the order of their tokens. An image that several sequences hold is there several times."""
    index_M: Tensor
    """int64, on the CPU: the packed positions of their tokens."""
    position_3T: Tensor
    """int64, on the CPU: the positions of all tokens of the row in time, height and width."""


def row_images(
    names: Sequence[str],
    tokens: Sequence[Tokens],
    padded: Sequence[int],
    skipped: Sequence[int],
    vision: Vision | None,
) -> RowImages | None:
    """The images of a row of samples; None if it has none.

    Args:
        names: of the samples.
        padded: the numbers of tokens of the samples in the row, padding included.
        skipped: how many of its first tokens each sample leaves out, because another one holds them.

    Raises:
        ValueError: a sample's tokens are not the ones of its images; the error names the sample.
    """
    if vision is None or not any(mine.pictures for mine in tokens):
        return None
    position_3T, start = np.zeros((3, sum(padded)), np.int64), 0
    pictures: list[Picture] = []
    held = [np.empty(0, np.int64)]
    for name, mine, room, left_out in zip(names, tokens, padded, skipped, strict=True):
        try:
            own = positions(mine.ids, mine.pictures, vision)[:, left_out:]
        except ValueError as error:
            raise ValueError(f"sample {name}: {error}") from None
        position_3T[:, start : start + own.shape[1]] = own
        if not left_out:
            pictures += mine.pictures
            held.append(start + np.flatnonzero(mine.ids == vision.image_token))
        start += room
    return RowImages(tuple(pictures), torch.from_numpy(np.concatenate(held)), torch.from_numpy(position_3T))
