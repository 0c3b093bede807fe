"""The quantised checkpoints that can be read: fp8 with one scale for each block of a matrix, as DeepSeek-V3 is
published, mxfp4, as gpt-oss is, and int4, as Kimi-K2-Thinking is. All others are refused by name.

In fp8 a matrix W is stored as float8_e4m3fn values and, under its name with `_scale_inv` at the end, one scale for each
block of `quantization_config.weight_block_size` rows and columns; the last blocks may be smaller. W = values x scales,
in float32, as in DeepSeek's own inference/fp8_cast_bf16.py, transformers (integrations/finegrained_fp8.py,
Fp8Dequantize) and vLLM (quant_utils.py, scaled_dequantize).

In mxfp4 (OCP Microscaling Formats 1.0) the matrices of a layer's experts are stacked and stored under their name with
`_blocks` and `_scales` at the end. They are not transposed, as they are in unquantised files of gpt-oss: [experts,
rows, columns / 32, 16] bytes, each with two values, the lower four bits first, and one byte s for each 32 values. A
value is its entry of `FP4_VALUES` times 2^(s - 127), as in transformers (integrations/mxfp4.py,
_convert_moe_packed_tensors).

In int4 (pack-quantized of compressed-tensors, symmetric) a matrix is stored under its name with `_packed`, `_scale` and
`_shape` at the end: [rows, columns / 8] words of 32 bits, each with eight values of four bits, the lowest first, and
one scale for each `group_size` values of a row. A value is (bits - 8) times its scale, as in compressed_tensors
(compressors/pack_quantized).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megatron_rl.models.composite import read_config

FP8 = "F8_E4M3"
"""The dtype of the values, by its name in a safetensors header."""
_E4M3 = ("e4m3", "float8_e4m3fn")
"""Its names in config.json. The second is MiniMax-M2's."""
WORDS = "I32"
"""The dtype of int4's eight values, by its name in a safetensors header."""
BYTES = "U8"
"""The dtype of mxfp4's pairs of values and of its scales, by its name in a safetensors header."""
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each of the 16 patterns of four bits: a sign, two bits of exponent, one of the fraction."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """fp8. The number of rows and columns that share a scale."""

    rows: int
    columns: int
    kind: ClassVar[str] = "fp8"
    scales: ClassVar[str] = "_scale_inv"
    """The end of the name of the scales."""
    scale_dtypes: ClassVar[tuple[str, ...]] = ("BF16", "F16", "F32")

    def __str__(self) -> str:
        return f"fp8 weights in blocks of {self.rows} x {self.columns}"

    def scales_of(self, extents: tuple[int, ...]) -> tuple[int, ...]:
        """The extents of the scales of a matrix."""
        rows, columns = extents
        return -(-rows // self.rows), -(-columns // self.columns)

    def most_columns(self, width: int) -> int:
        """The number of blocks of columns that `width` adjacent columns of a matrix can have parts of, wherever they
        begin."""
        return -(-width // self.columns) + 1


FROZEN_BLOCKS = Blocks(128, 128)
"""The blocks of weights that a trainer freezes in fp8 (`policy.lora.base`), as DeepSeek-V3 is published."""


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """mxfp4. It has no settings."""

    kind: ClassVar[str] = "mxfp4"
    group: ClassVar[int] = 32
    """The number of values of a row that share a scale."""
    values: ClassVar[str] = "_blocks"
    """The end of the name of the values."""
    value_dtype: ClassVar[str] = BYTES
    scales: ClassVar[str] = "_scales"
    scale_dtypes: ClassVar[tuple[str, ...]] = (BYTES,)

    def __str__(self) -> str:
        return "mxfp4 weights"

    def scales_of(self, extents: tuple[int, ...]) -> tuple[int, ...]:
        """The extents of the scales of stacked matrices; `extents`: of the values as they are stored."""
        return extents[:-1]

    def stored(self, extents: tuple[int, ...]) -> tuple[int, ...] | None:
        """The extents of the values of stacked transposed matrices, [experts, columns, rows]; None if they cannot be
        stored so."""
        if len(extents) != 3 or extents[1] % self.group:
            return None
        return extents[0], extents[2], extents[1] // self.group, self.group // 2


@dataclass(frozen=True, slots=True)
class Int4:
    """int4."""

    group: int
    """The number of values of a row that share a scale."""
    kind: ClassVar[str] = "int4"
    values: ClassVar[str] = "_packed"
    value_dtype: ClassVar[str] = WORDS
    scales: ClassVar[str] = "_scale"
    shapes: ClassVar[str] = "_shape"
    """The end of the name of a tensor that repeats the matrix's extents."""
    scale_dtypes: ClassVar[tuple[str, ...]] = ("BF16", "F16", "F32")

    def __str__(self) -> str:
        return f"int4 weights in groups of {self.group}"

    def scales_of(self, extents: tuple[int, ...]) -> tuple[int, ...]:
        """The extents of the scales of a matrix, from its words' extents."""
        rows, words = extents
        return rows, -(-8 * words // self.group)

    def stored(self, extents: tuple[int, ...]) -> tuple[int, ...] | None:
        """The extents of the words of a matrix; None if it cannot be stored so."""
        if len(extents) != 2 or extents[1] % 8:
            return None
        return extents[0], extents[1] // 8


Form = Blocks | Mxfp4 | Int4
Packed = Mxfp4 | Int4
"""The forms whose values have a name of their own."""


def read_blocks(folder: Path) -> Form | None:
    """How the weights of a Hugging Face folder are quantised, by its config.json; None if they are not.

    Raises:
        ValueError: they are quantised in a way that is not supported; the error names it.
    """
    path = folder / "config.json"
    config = read_config(folder)
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
    if method == "mxfp4":
        return Mxfp4()
    if method == "compressed-tensors" and found.get("format") == "pack-quantized":
        return _read_int4(path, found)
    if method != "fp8":
        raise ValueError(
            f"{path}: the weights are quantised with {method or 'a method that it does not name'}, which cannot be "
            f"read; of quantised weights only fp8 in blocks, mxfp4 and int4 can. Please {instead}"
        )
    if not sizes:
        raise ValueError(
            f"{path}: the weights are fp8 without weight_block_size, that is with one scale for each tensor or row, "
            f"which cannot be read; only fp8 in blocks can. Please {instead}"
        )
    if found.get("fmt", "e4m3") not in _E4M3 or found.get("activation_scheme", "dynamic") != "dynamic":
        raise ValueError(
            f"{path}: the weights are fp8 with fmt {found.get('fmt')!r} and activation_scheme "
            f"{found.get('activation_scheme')!r}, which cannot be read; only 'e4m3' and 'dynamic' can. Please {instead}"
        )
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ValueError(f"{path}: weight_block_size is {sizes!r}, but it must be two positive numbers")
    return Blocks(*sizes)


def _read_int4(path: Path, found: dict[str, Any]) -> Int4:
    """
    Raises:
        ValueError: the words hold something else than symmetric int4 in groups.
    """
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "actorder": None}
    groups = [one.get("weights") or {} for one in (found.get("config_groups") or {}).values()]
    for group in groups:
        for key, value in wanted.items():
            if (group.get(key) or None) != (value or None):
                raise ValueError(
                    f"{path}: weights in pack-quantized with {key} {group.get(key)!r} cannot be read; only {value!r} "
                    f"can. Please take the release of the model in bf16"
                )
    sizes = {group["group_size"] for group in groups if isinstance(group.get("group_size"), int)}
    if len(sizes) != 1 or min(sizes) < 8 or min(sizes) % 8:
        raise ValueError(
            f"{path}: config_groups of quantization_config must name one group_size, a multiple of 8, but it names "
            f"{sorted(sizes) or 'none'}; copy the file again"
        )
    return Int4(sizes.pop())


def check_unquantised(folder: Path) -> None:
    """Check that a run can begin with a Hugging Face folder. It cannot with a quantised one, because vLLM would build
    quantised layers from its config.json, which the trainer's weights do not fit.

    Raises:
        ValueError: the weights are quantised; the error says what to do.
    """
    if blocks := read_blocks(folder):
        raise ValueError(
            f"model.path: {folder} holds {blocks}, with which no run can begin. Please dequantise them once with "
            f"`megatron-rl convert to-megatron {folder} TARGET`, and then set model.weights=TARGET and "
            f"model.path=TARGET/hf"
        )
