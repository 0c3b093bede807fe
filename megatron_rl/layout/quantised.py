"""The quantised checkpoints that can be read: fp8 with one scale for each block of a matrix, as DeepSeek-V3 is
published. All others are refused by name.

A matrix W is stored as float8_e4m3fn values and, under its name with `_scale_inv` at the end, one scale for each block
of `quantization_config.weight_block_size` rows and columns; the last blocks may be smaller. W = values x scales, in
float32, as in DeepSeek's own inference/fp8_cast_bf16.py, transformers (integrations/finegrained_fp8.py, Fp8Dequantize)
and vLLM (quant_utils.py, scaled_dequantize).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FP8 = "F8_E4M3"
"""The dtype of the values, by its name in a safetensors header."""
SCALE_DTYPES = {"F32", "BF16", "F16"}
SCALES = "_scale_inv"
"""The end of the name of the scales."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The number of rows and columns that share a scale."""

    rows: int
    columns: int

    def scales_of(self, extents: tuple[int, ...]) -> tuple[int, int]:
        """The extents of the scales of a matrix."""
        rows, columns = extents
        return -(-rows // self.rows), -(-columns // self.columns)


def read_blocks(folder: Path) -> Blocks | None:
    """How the weights of a Hugging Face folder are quantised, by its config.json; None if they are not.

    Raises:
        ValueError: they are quantised in a way that is not supported; the error names it.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text())
    # Older releases of compressed-tensors write the second key.
    found: Any = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: quantization_config is no table of settings; copy the file again")
    method, sizes = found.get("quant_method"), found.get("weight_block_size")
    instead = (
        "take the release of the model in bf16, or dequantise the weights with the library that has quantised them"
    )
    if method != "fp8":
        raise ValueError(
            f"{path}: the weights are quantised with {method or 'a method that it does not name'}, which cannot be "
            f"read; of quantised weights only fp8 in blocks can. Please {instead}"
        )
    if not sizes:
        raise ValueError(
            f"{path}: the weights are fp8 without weight_block_size, that is with one scale for each tensor or row, "
            f"which cannot be read; only fp8 in blocks can. Please {instead}"
        )
    if found.get("fmt", "e4m3") != "e4m3" or found.get("activation_scheme", "dynamic") != "dynamic":
        raise ValueError(
            f"{path}: the weights are fp8 with fmt {found.get('fmt')!r} and activation_scheme "
            f"{found.get('activation_scheme')!r}, which cannot be read; only 'e4m3' and 'dynamic' can. Please {instead}"
        )
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ValueError(f"{path}: weight_block_size is {sizes!r}, but it must be two positive numbers")
    return Blocks(*sizes)


def check_unquantised(folder: Path) -> None:
    """Check that a run can begin with a Hugging Face folder. It cannot with a quantised one, because vLLM would build
    quantised layers from its config.json, which the trainer's weights do not fit.

    Raises:
        ValueError: the weights are quantised; the error says what to do.
    """
    if blocks := read_blocks(folder):
        raise ValueError(
            f"model.path: {folder} holds fp8 weights in blocks of {blocks.rows} x {blocks.columns}, with which no run "
            f"can begin. Please dequantise them once with `megatron-rl convert to-megatron {folder} TARGET`, and then "
            f"set model.weights=TARGET and model.path=TARGET/hf"
        )
