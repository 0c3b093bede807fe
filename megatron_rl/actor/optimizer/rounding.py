"""How the fp32 copies of weights in two bytes become the weights again after an update.

An update of reinforcement learning is small: with a learning rate of 2e-5 Adam moves a weight of 0.05 by a twelfth of
the distance between two numbers of bfloat16. Rounded to the nearest one, most weights keep their bits for many updates,
and the policy that answers stands still. With a dither, the point between two numbers above which a weight is rounded
up differs from element to element, so the same update moves a twelfth of the weights, and the mean of the weights
follows the copies. (Stochastic rounding draws it again in each update, which also changes weights whose copies stand
still; Gupta et al. 2015, arXiv:1502.02551.)

The draw of an element is a hash of its place in its Hugging Face tensor. So every layout rounds alike, and nothing is
stored. Invariant (tests/unit/actor): each element of a model has the same draw on all ranks of all meshes.

Shape letters: R rows of a parameter, N elements of a flat interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

from megatron_rl.algorithms.selection import hash_key
from megatron_rl.models import Shard

BLOCK_ELEMENTS = 2**20
"""The number of elements whose draws are made at a time."""
SMALLEST_NORMAL = torch.finfo(torch.float16).smallest_normal
COLUMN, FIRST, SECOND = -0x61C88647, -0x7A143595, -0x3D4D51CB
"""Odd constants as int32: 2^32 / golden ratio, and the two factors of murmur3's finaliser."""


def round_up_above(copy_N: Tensor, draws_N: Tensor, dtype: torch.dtype) -> Tensor:
    """[N]: of the two numbers of `dtype` next to each copy the one with the smaller magnitude, or the other one where
    the part of the way to it is above 1 - draw / 2^16. Numbers of `dtype` stay.

    Args:
        copy_N: float32, finite.
        draws_N: int32 in [0, 2^16).
        dtype: bfloat16 or float16.

    Example:
        1 + 2^-9 is a quarter of the way from 1 to the next number of bfloat16, 1 + 2^-7. The draws 0, 20,000, 49,152
        and 60,000 give 1, 1, 1 + 2^-7 and 1 + 2^-7.
    """
    if dtype == torch.bfloat16:
        # A number of bfloat16 is the upper half of the same number's bits in float32.
        bits_N = copy_N.contiguous().view(torch.int32) + draws_N
        return (bits_N & -0x10000).view(torch.float32).bfloat16()
    # A number of float16 lacks the lowest 13 bits. Below SMALLEST_NORMAL its numbers are as far apart as just above.
    shift_N = torch.where(
        copy_N.abs() < SMALLEST_NORMAL, torch.full_like(copy_N, SMALLEST_NORMAL).copysign(copy_N), 0.0
    )
    bits_N = (copy_N + shift_N).view(torch.int32) + (draws_N >> 3)
    return ((bits_N & -0x2000).view(torch.float32) - shift_N).half()


class Dither:
    """The draws of a rank's weights.

    Args:
        shards: of all parameters of the rank.
        live: the extents of its trained parameters, by local name; a vocabulary may have more rows than its shards.
        dtype: of the weights, bfloat16 or float16.
        device: where the weights are.
    """

    def __init__(
        self,
        shards: Iterable[Shard],
        live: Mapping[str, tuple[int, ...]],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._dtype = dtype
        self._widths = {name: prod(extents[1:]) for name, extents in live.items()}
        rows = {name: torch.zeros(extents[0], dtype=torch.int64) for name, extents in live.items()}
        for shard in (shard for shard in shards if shard.local_name in rows):  # there are buffers, too
            (first, last), *others = shard.local_box
            (hf_row, _), *inner = shard.hf_box
            assert not others or others[0][0] == 0, f"{shard.local_name}: tensors stand side by side in its rows"
            key = int.from_bytes(blake2b(shard.hf_name.encode(), digest_size=8).digest(), "little", signed=True)
            hash_R = hash_key(torch.arange(hf_row, hf_row + last - first) ^ key)
            rows[shard.local_name][first:last] = hash_R + (inner[0][0] * COLUMN if inner else 0)
        self._rows = {name: hash_R.to(torch.int32).to(device) for name, hash_R in rows.items()}

    def draws(self, name: str, start: int, size: int) -> Tensor:
        """int32 [size] in [0, 2^16): the draws of the flat interval [start, start + size) of a parameter."""
        width = self._widths[name]
        row, offset = divmod(start, width)
        hash_R = self._rows[name][row : -(-(start + size) // width)]
        column_C = torch.arange(width, dtype=torch.int32, device=hash_R.device) * COLUMN
        x_N = (hash_R[:, None] + column_C).view(-1)[offset : offset + size]
        x_N = (x_N ^ (x_N >> 16 & 0xFFFF)) * FIRST
        x_N = (x_N ^ (x_N >> 13 & 0x7FFFF)) * SECOND
        return x_N >> 16 & 0xFFFF

    def rounded(self, copy_N: Tensor, name: str, start: int) -> Tensor:
        """[N]: the weights of the flat interval of a parameter that begins at `start` (`round_up_above`)."""
        blocks, place = [], start
        for block_B in torch.split(copy_N, BLOCK_ELEMENTS):
            blocks.append(round_up_above(block_B, self.draws(name, place, len(block_B)), self._dtype))
            place += len(block_B)
        return torch.cat(blocks) if blocks else copy_N.to(self._dtype)
