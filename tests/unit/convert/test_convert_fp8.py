"""Folders in fp8 with one scale for each block: every form that is made of them has the bits of a slow
reference, wherever tensors are cut. tests/ranks/test_actor_weights.py loads one."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import cover
import numpy as np
import pytest
import torch
from folders import assert_same, back, read, write, write_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.convert import Options, Verification, open_checkpoint, smallest_mesh, to_hub, to_open, to_ranks
from megatron_rl.convert.fp8 import quantised
from megatron_rl.convert.fp8 import rounded as rounded_to_fp8
from megatron_rl.convert.target import BLOCK_BYTES, blocks
from megatron_rl.convert.tensor_files import Maps, dequantised
from megatron_rl.convert.work import _identity
from megatron_rl.models import check_model, read_shape
from megatron_rl.models.quantisation import Blocks
from megatron_rl.types import Mesh

PLAIN = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "block_sparse_moe.gate.weight")
"""The matrices that the releases of DeepSeek-V3 and MiniMax-M2 leave in bf16."""
SIZES = {
    "blocks of the release": ((128, 128), dict(hidden_size=200, intermediate_size=300, num_hidden_layers=2)),
    "blocks that no cut respects": ((7, 5), dict(num_hidden_layers=2)),
    "MiniMax-M2": ((7, 5), dict(num_hidden_layers=2, model_type="minimax_m2")),
}


def fp8_value(byte: int) -> float:
    """float8_e4m3fn as its authors define it (Micikevicius et al., FP8 Formats for Deep Learning, 2022, table 1): one
    bit for the sign, four for the exponent with bias 7, three for the fraction; no infinities, one NaN of each sign."""
    sign, exponent, fraction = (-1) ** (byte >> 7), byte >> 3 & 15, byte & 7
    if (exponent, fraction) == (15, 7):
        return float("nan")
    return sign * (fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10))


VALUES = np.array([fp8_value(byte) for byte in range(256)])


def reference(stored: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> Tensor:
    """The product of an fp8 value and a float32 scale is exact in float64; float32 is rounded from there once.

    Args:
        stored: uint8, [rows, columns].
        scales: float32.
    """
    rows, columns = stored.shape
    spread = scales.astype(np.float64).repeat(block[0], 0).repeat(block[1], 1)[:rows, :columns]
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy((VALUES[stored] * spread).astype(np.float32))


def rounded(values: Tensor) -> Tensor:
    """float32 to bfloat16 by hand: the nearest of two neighbours, and of two equally near ones the even one."""
    bits = values.numpy().view(np.uint32).astype(np.int64)
    bits = np.where(values.isnan().numpy(), 0x7FC0, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    return torch.from_numpy(bits.astype(np.uint16)).view(torch.bfloat16)


def random_matrix(random: np.random.Generator, rows: int, columns: int, block: tuple[int, int]):
    """Every byte is as likely as any other; a few scales make values overflow or vanish."""
    grid = -(-rows // block[0]), -(-columns // block[1])
    scales = random.standard_normal(grid) * 2.0 ** random.integers(-12, 3, grid)
    scales[random.random(grid) < 0.05] = 3e38
    scales[random.random(grid) < 0.05] = 1e-38
    return random.integers(0, 256, (rows, columns), np.uint8), scales.astype(np.float32)


def write_fp8(folder: Path, block: tuple[int, int] = (7, 5), **changes) -> dict[str, Tensor]:
    """A folder as DeepSeek-V3 or MiniMax-M2 is published, with its scales in another file than the matrices. Returns
    what its tensors mean, float32."""
    family = changes.get("model_type", "deepseek_v3")
    fmt = "e4m3" if family == "deepseek_v3" else "float8_e4m3fn"
    config = {"quant_method": "fp8", "fmt": fmt, "activation_scheme": "dynamic", "weight_block_size": list(block)}
    write_folder(folder, family, torch.bfloat16, 1, torch_dtype="bfloat16", quantization_config=config, **changes)
    [path] = folder.glob("*.safetensors")
    random = np.random.default_rng(0)
    stored, scales, meaning = {}, {}, {}
    for name, tensor in read(folder).items():
        if name.endswith("e_score_correction_bias"):
            tensor = tensor.float()
        stored[name], meaning[name] = tensor, tensor.float()
        if tensor.ndim == 2 and not name.endswith(PLAIN):
            values, of_blocks = random_matrix(random, *tensor.shape, block)
            stored[name] = torch.from_numpy(values).view(torch.float8_e4m3fn)
            scales[f"{name}_scale_inv"] = torch.from_numpy(of_blocks)
            meaning[name] = reference(values, of_blocks, block)
    if family == "deepseek_v3":
        add_head(stored, scales, meaning, block, changes)
    save_file(stored, path)
    save_file(scales, folder / "model-00002-of-00002.safetensors")
    assert len(scales) > 5
    return meaning


def add_head(stored: dict, scales: dict, meaning: dict, block: tuple[int, int], changes: dict) -> None:
    """The layer for multi-token prediction is no part of the model, and kept as it is but for the quantisation."""
    random = np.random.default_rng(1)
    layer = f"model.layers.{changes.get('num_hidden_layers', 4)}.mlp.up_proj.weight"
    values, of_blocks = random_matrix(random, *block, block)
    stored[layer] = torch.from_numpy(values).view(torch.float8_e4m3fn)
    scales[f"{layer}_scale_inv"] = torch.from_numpy(of_blocks)
    meaning[layer] = reference(values, of_blocks, block)


def comparable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A NaN has many bit patterns; here it gets one."""
    return {name: torch.where(tensor.isnan(), torch.nan, tensor) for name, tensor in tensors.items()}


@pytest.fixture(scope="module", params=cover.essential(SIZES, "blocks that no cut respects"))
def published(request, tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("fp8") / "published"
    block, sizes = SIZES[request.param]
    return folder, write_fp8(folder, block, **sizes)


@pytest.mark.parametrize("dtype", cover.essential([None, "float32"], None))
def test_every_form_has_the_bits_of_the_reference(published, dtype, tmp_path):
    """Without --dtype the values get the dtype that config.json names. The cuts of 2 and 4 ranks, and the query groups
    and gates that Megatron fuses, lie inside blocks."""
    folder, meaning = published
    wanted = {
        name: tensor if dtype or name.endswith("e_score_correction_bias") else rounded(tensor)
        for name, tensor in comparable(meaning).items()
    }
    options = Options(dtype, max_file_bytes=40_000)
    write(to_hub(open_checkpoint(folder), options), tmp_path / "hub")
    assert_same(comparable(read(tmp_path / "hub")), comparable(wanted))
    write(to_open(open_checkpoint(folder), options), tmp_path / "open")
    for i, (tensor, expert, expert_tensor) in enumerate([(2, 2, 1), (4, 2, 2)]):
        mesh = smallest_mesh(tensor, expert, expert_tensor, pipeline=2)
        write(to_ranks(open_checkpoint(folder), mesh, bool(i), options), tmp_path / f"ranks{i}")
    for form in ("open", "ranks0", "ranks1"):
        assert Verification(tmp_path / form, tmp_path / "hub").run(1, lambda done_bytes: None).num_compared
    if dtype is None:
        assert Verification(tmp_path / "open", folder).run(1, lambda done_bytes: None).num_ignored == 0
        of_head = 2 if read_shape(folder).family == "deepseek_v3" else 0
        assert Verification(folder, tmp_path / "open").run(1, lambda done_bytes: None).num_ignored == of_head


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 40), st.integers(1, 40), st.tuples(st.integers(1, 12), st.integers(1, 12)))
def test_any_rectangle_is_that_of_the_whole(data, rows, columns, block):
    values, scales = random_matrix(np.random.default_rng(rows), rows, columns, block)
    box = tuple(
        tuple(sorted(data.draw(st.lists(st.integers(0, length), min_size=2, max_size=2, unique=True))))
        for length in (rows, columns)
    )
    stored = torch.from_numpy(values).view(torch.float8_e4m3fn)
    found = dequantised(stored, torch.from_numpy(scales), Blocks(*block), box)
    wanted = reference(values, scales, block)[tuple(slice(*side) for side in box)]
    assert_same(comparable({"": found}), comparable({"": wanted}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_two_bytes(tmp_path, dtype):
    """Some releases of Qwen3 have such scales."""
    write_fp8(tmp_path / "hub", num_hidden_layers=2)
    path = tmp_path / "hub" / "model-00002-of-00002.safetensors"
    values, scales = read(tmp_path / "hub"), {}
    for name, tensor in values.items():
        if name.endswith("_scale_inv"):
            scales[name] = tensor.to(dtype)
    save_file(scales, path)
    found = read(back(tmp_path / "hub", tmp_path / "back", Options("float32")))
    name = "model.layers.1.self_attn.o_proj.weight"
    wanted = reference(values[name].view(torch.uint8).numpy(), scales[f"{name}_scale_inv"].float().numpy(), (7, 5))
    assert_same(comparable({name: found[name]}), comparable({name: wanted}))


def test_the_written_folder_is_not_quantised_and_a_run_asks_for_it(tmp_path):
    write_fp8(tmp_path / "fp8", (7, 5), num_hidden_layers=2)
    shape = read_shape(tmp_path / "fp8")
    with pytest.raises(ValueError, match="7 x 5.*convert to-megatron .*fp8 TARGET"):
        check_model(tmp_path / "fp8", shape, Mesh())
    write(to_open(open_checkpoint(tmp_path / "fp8")), tmp_path / "open")
    for folder, config in (
        (tmp_path / "open", "hf/config.json"),
        (back(tmp_path / "open", tmp_path / "hub"), "config.json"),
    ):
        fields = json.loads((folder / config).read_text())
        assert "quantization_config" not in fields and fields["torch_dtype"] == "bfloat16"
    check_model(tmp_path / "hub", shape, Mesh())


def test_config_json_must_give_a_dtype(tmp_path):
    write_fp8(tmp_path / "fp8", num_hidden_layers=2)
    path = tmp_path / "fp8" / "config.json"
    path.write_text(path.read_text().replace("torch_dtype", "other"))
    with pytest.raises(ValueError, match="config.json gives no dtype"):
        open_checkpoint(tmp_path / "fp8")


def test_changed_scales_make_another_conversion(tmp_path):
    write_fp8(tmp_path / "fp8", num_hidden_layers=2)
    first = _identity(to_open(open_checkpoint(tmp_path / "fp8")))
    os.utime(tmp_path / "fp8" / "model-00002-of-00002.safetensors", (1, 1))
    assert _identity(to_open(open_checkpoint(tmp_path / "fp8"))) != first


@pytest.mark.deep
def test_a_matrix_takes_the_memory_of_a_few_blocks(tmp_path):
    """A matrix of 2**23 values needs less than 16 blocks of this process's private memory: a block of bf16, its values
    in float32 (two blocks), and what they are made with. The whole matrix in float32 would need 32."""
    write_fp8(tmp_path / "fp8", (128, 128), hidden_size=1024, intermediate_size=2**13, num_hidden_layers=1)
    conversion = to_hub(open_checkpoint(tmp_path / "fp8"))
    tensor = next(
        t for file in conversion.files for t, _ in file.tensors() if t.name.endswith("0.mlp.down_proj.weight")
    )
    assert tensor.num_bytes == 2**24

    def private_bytes() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

    before = private_bytes()
    assert max(private_bytes() for _ in blocks(tensor, Maps({}))) - before < 16 * BLOCK_BYTES


def nearest_byte(number: float) -> int:
    """The byte whose value is nearest; of two, the one whose last bit is 0."""
    finite = [byte for byte in range(256) if byte & 127 != 127]
    same_sign = [byte for byte in finite if (byte >> 7) == (math.copysign(1, number) < 0)]
    return min(same_sign, key=lambda byte: (abs(fp8_value(byte) - number), byte & 1))


@given(st.integers(1, 140), st.integers(1, 140), st.integers(0, 2**20), st.sampled_from([1e-6, 1.0, 300.0]))
@settings(max_examples=8)
def test_each_number_becomes_the_nearest_one_of_its_block(rows, columns, seed, size):
    weight = size * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) ** 3
    values, scales = quantised(weight)
    for row, column in {(0, 0), (rows // 2, columns - 1), (rows - 1, columns // 3), (rows - 1, columns - 1)}:
        block = weight[row // 128 * 128 :, column // 128 * 128 :][:128, :128]
        scale = float(block.abs().max() / 448)
        assert float(scales[row // 128, column // 128]) == scale
        expected = nearest_byte(float(weight[row, column] / torch.tensor(scale)))
        assert int(values[row, column].view(torch.uint8)) == expected
    once = rounded_to_fp8(weight)
    assert torch.equal(rounded_to_fp8(once), once)
    short = rounded_to_fp8(weight.bfloat16())
    assert torch.equal(rounded_to_fp8(short), short)


def test_the_worked_example_and_a_block_of_zeros():
    values, scales = quantised(torch.tensor([[0.896, 0.098, 0.0]]))
    assert [float(value) for value in values[0].float()] == [448, 48, 0]
    assert float(scales) == pytest.approx(0.002) and not rounded_to_fp8(torch.zeros(130, 3)).any()
