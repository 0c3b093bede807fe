"""Quantises matrices to float8 values with one scale for each block, as DeepSeek-V3 is published (arXiv:2412.19437,
3.3).

Invariant (tests/unit/convert): a matrix that has been quantised and dequantised stays as it is when this is repeated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.convert.tensor_files import dequantised
from megatron_rl.models.quantisation import FROZEN_BLOCKS as BLOCKS

LARGEST = 448.0
"""The largest number of float8_e4m3fn."""


def quantised(weight_OH: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as float8 values and scales: W is about values x scales. The largest number of a block becomes 448, so
    an error is at most 1/16 of its number or, of small numbers, 1/1024 of the block's scale.

    Worked example: in a block whose largest number is 0.896 the scale is 0.002. 0.098 is 49 scales, and the nearest
    numbers that float8 has are 48 and 52, so 0.098 becomes 0.096.

    Shape letters: O outputs, H inputs, o and h blocks of 128 of them; the last blocks may be smaller.

    Args:
        weight_OH: of any dtype of floating-point numbers.

    Returns:
        The values, float8_e4m3fn [O, H], and the scales, float32 [o, h].
    """
    num_rows, num_columns = weight_OH.shape
    rows, columns = BLOCKS.scales_of((num_rows, num_columns))
    padding = columns * BLOCKS.columns - num_columns, rows * BLOCKS.rows - num_rows
    padded = F.pad(weight_OH.float(), (0, padding[0], 0, padding[1]))
    blocks = padded.view(rows, BLOCKS.rows, columns, BLOCKS.columns)
    scales_oh = blocks.abs().amax((1, 3)) / LARGEST
    scales_oh[scales_oh == 0] = 1.0
    values = (blocks / scales_oh[:, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values.view(padded.shape)[:num_rows, :num_columns].contiguous(), scales_oh


def rounded(weight_OH: Tensor) -> Tensor:
    """A matrix on a CPU, quantised and dequantised, in its dtype."""
    whole = tuple((0, length) for length in weight_OH.shape)
    return dequantised(*quantised(weight_OH), BLOCKS, whole).to(weight_OH.dtype)
