"""Folders in mxfp4, as gpt-oss is published: every form that is made of them has the bits of transformers' own
dequantisation, wherever tensors are cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from folders import assert_same, back, read, write, write_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_rl.convert import Options, Verification, open_checkpoint, smallest_mesh, to_hub, to_open, to_ranks
from megatron_rl.convert.tensor_files import unpacked
from megatron_rl.models import check_model, read_shape
from megatron_rl.models.view import InFile
from megatron_rl.types import Mesh

SIZES = dict(hidden_size=64, intermediate_size=32, num_hidden_layers=2, vocab_size=70)
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def random_blocks(generator: torch.Generator, extents: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Every byte is as likely as any other, and every scale, too: some values overflow, and some are subnormal."""
    values = torch.randint(0, 256, extents, generator=generator, dtype=torch.uint8)
    return values, torch.randint(0, 256, extents[:-1], generator=generator, dtype=torch.uint8)


def write_mxfp4(folder: Path, **changes) -> dict[str, Tensor]:
    """A folder as gpt-oss is published, with its scales in another file than the values. Returns what its tensors mean,
    bfloat16."""
    write_folder(folder, "gpt_oss", torch.bfloat16, 1, quantization_config=MXFP4, **SIZES | changes)
    [path] = folder.glob("*.safetensors")
    generator = torch.Generator().manual_seed(0)
    stored, scales, meaning = {}, {}, {}
    for name, tensor in read(folder).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = meaning[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        values, of_values = random_blocks(generator, (experts, rows, columns // 32, 16))
        stored[f"{name}_blocks"], scales[f"{name}_scales"] = values, of_values
        meaning[name] = convert_moe_packed_tensors(values, of_values)
        assert meaning[name].dtype == torch.bfloat16 and meaning[name].shape == tensor.shape
    save_file(stored, path)
    save_file(scales, folder / "model-00002-of-00002.safetensors")
    assert len(scales) == 4
    return meaning


def comparable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A NaN has many bit patterns; here it gets one."""
    return {name: torch.where(tensor.isnan(), torch.nan, tensor) for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("mxfp4") / "published"
    return folder, write_mxfp4(folder)


def test_every_form_has_the_bits_of_transformers(published, tmp_path):
    folder, meaning = published
    assert sum(int(tensor.isinf().sum()) for tensor in meaning.values()) > 100
    options = Options(max_file_bytes=40_000)
    write(to_hub(open_checkpoint(folder), options), tmp_path / "hub")
    assert_same(comparable(read(tmp_path / "hub")), comparable(meaning))
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    write(to_open(open_checkpoint(folder), options), tmp_path / "open")
    for i, (tensor, expert, expert_tensor) in enumerate([(2, 2, 1), (4, 2, 2)]):
        mesh = smallest_mesh(tensor, expert, expert_tensor, pipeline=2)
        write(to_ranks(open_checkpoint(folder), mesh, bool(i), options), tmp_path / f"ranks{i}")
    for form in ("open", "ranks0", "ranks1"):
        assert Verification(tmp_path / form, tmp_path / "hub").run(1, lambda done_bytes: None).num_compared
    assert Verification(tmp_path / "open", folder).run(1, lambda done_bytes: None).num_ignored == 0


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 9), st.integers(1, 3), st.booleans())
def test_any_rectangle_is_that_of_the_whole(data, num_experts, rows, groups, has_two_parts):
    """Also of gate and up, whose rows are by turns."""
    num_parts = 2 if has_two_parts else 1
    expert, part = data.draw(st.integers(0, num_experts - 1)), data.draw(st.integers(0, num_parts - 1))
    values, scales = random_blocks(torch.Generator().manual_seed(rows), (num_experts, num_parts * rows, groups, 16))
    held = InFile("both", part, num_parts, interleaved=True, transposed=True)
    view = held.view((rows, 32 * groups), "", expert, num_experts).swapped()
    box = tuple(
        tuple(sorted(data.draw(st.lists(st.integers(0, length), min_size=2, max_size=2, unique=True))))
        for length in (rows, 32 * groups)
    )
    whole = convert_moe_packed_tensors(values, scales, dtype=torch.float32)[expert].T[part::num_parts]
    found = unpacked(values, scales, view, box)
    torch.testing.assert_close(found, whole[tuple(slice(*side) for side in box)], rtol=0, atol=0, equal_nan=True)


def test_golden_values():
    """By hand: the lower four bits come first, and a scale of 127 is 1."""
    view = InFile("down", transposed=True).view((1, 32), "", 0, 1).swapped()
    values, scales = torch.zeros(1, 1, 1, 16, dtype=torch.uint8), torch.full((1, 1, 1), 128, dtype=torch.uint8)
    values[0, 0, 0, :3] = torch.tensor([0x21, 0x9F, 0x07], dtype=torch.uint8)
    found = unpacked(values, scales, view, ((0, 1), (0, 6)))
    assert found.tolist() == [[1.0, 2.0, -12.0, -1.0, 12.0, 0.0]]


def test_a_run_does_not_begin_with_it(published):
    folder, _ = published
    with pytest.raises(ValueError, match="mxfp4 weights.*convert to-megatron"):
        check_model(folder, read_shape(folder), Mesh())


def change(folder: Path, target: Path, **changes) -> Path:
    """The folder with some of its tensors changed; None removes one."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    held = {name: tensor for name, tensor in (read(folder) | changes).items() if tensor is not None}
    save_file(held, target / "model.safetensors")
    return target


DOWN = "model.layers.1.mlp.experts.down_proj"
DAMAGES = {
    "no scales": ({f"{DOWN}_scales": None}, f"{DOWN} is mxfp4, but its scales {DOWN}_scales are missing"),
    "no values": ({f"{DOWN}_blocks": None}, f"1 tensors are missing, the first is {DOWN} .*is a shard file absent"),
    "scales of nothing": (
        {f"{DOWN}_blocks": None, DOWN: torch.zeros(4, 32, 64)},
        f"scales the mxfp4 tensor {DOWN}, but this one is not mxfp4 or not there",
    ),
    "few scales": (
        {f"{DOWN}_scales": torch.zeros(4, 64, 2, dtype=torch.uint8)},
        r"_scales \[4, 64, 2\] must be \[4, 64, 1\], because .* stored as \[4, 64, 1, 16\].* mxfp4 weights",
    ),
    "scales of another dtype": (
        {f"{DOWN}_scales": torch.zeros(4, 64, 1)},
        "is F32, but scales that can be read are U8",
    ),
    "other values": (
        {f"{DOWN}_blocks": torch.zeros(4, 64, 16, dtype=torch.uint8)},
        r"_blocks \[4, 64, 16\] is U8, but as mxfp4 .* \[4, 64, 1, 16\] of U8 is needed",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused(published, tmp_path, name):
    changes, message = DAMAGES[name]
    with pytest.raises(ValueError, match=message):
        back(change(published[0], tmp_path / "damaged", **changes), tmp_path / "target")
