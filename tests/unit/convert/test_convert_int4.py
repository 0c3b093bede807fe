"""Folders in int4, as Kimi-K2-Thinking is published: every form made of them has the bits of compressed-tensors'
dequantisation, wherever tensors are cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from folders import assert_same, back, read, write, write_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.convert import Options, open_checkpoint, to_open, to_ranks
from megatron_rl.convert.tensor_files import unpacked_words
from megatron_rl.models import check_model, read_shape
from megatron_rl.types import Mesh

GROUP = 16
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head", "re:.*self_attn.*"],
}
SIZES = dict(hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2, vocab_size=70, torch_dtype="bfloat16")


def quantised(generator: torch.Generator, extents: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Words, scales, and what they mean, by compressed-tensors."""
    rows, columns = extents
    values = torch.randint(-8, 8, extents, generator=generator, dtype=torch.int8)
    scales = torch.randn(rows, columns // GROUP, generator=generator).bfloat16()
    meaning = dequantize(values, scales, args=QuantizationArgs(**WEIGHTS), dtype=torch.bfloat16)
    return pack_to_int32(values, 4), scales, meaning


def write_int4(folder: Path, **changes) -> dict[str, Tensor]:
    """A folder as Kimi-K2-Thinking is published: only routed experts are quantised. Returns what its tensors mean."""
    write_folder(folder, "kimi_k2", torch.bfloat16, 1, quantization_config=INT4, **SIZES | changes)
    [path] = folder.glob("*.safetensors")
    generator = torch.Generator().manual_seed(0)
    stored, meaning = {}, {}
    for name, tensor in read(folder).items():
        stored[name] = meaning[name] = tensor
        if ".experts." in name:
            del stored[name]
            stored[f"{name}_packed"], stored[f"{name}_scale"], meaning[name] = quantised(generator, tensor.shape)
            stored[f"{name}_shape"] = torch.tensor(tensor.shape)
    save_file(stored, path)
    return meaning


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("int4") / "published"
    return folder, write_int4(folder)


def test_every_form_has_the_bits_of_compressed_tensors(published, tmp_path):
    folder, meaning = published
    source = open_checkpoint(folder)
    assert set(source.ignored.values()) == {"the extents of a packed matrix follow from config.json"}
    assert_same(read(back(folder, tmp_path / "hub")), meaning)
    write(to_open(source, Options()), tmp_path / "open")
    assert_same(read(back(tmp_path / "open", tmp_path / "from_open")), meaning)
    write(to_ranks(source, Mesh(tensor=2, expert=2, expert_tensor=1), False, Options()), tmp_path / "ranks")
    assert_same(read(back(tmp_path / "ranks", tmp_path / "from_ranks")), meaning)
    assert "quantization_config" not in json.loads((tmp_path / "hub" / "config.json").read_text())


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_rectangle_is_the_whole_ones(data):
    words, scales, meaning = quantised(torch.Generator().manual_seed(1), (5, 48))
    box = tuple(tuple(sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2)))) for n in (5, 48))
    if any(start == stop for start, stop in box):
        return
    (first, last), (left, right) = box
    found = unpacked_words(words, scales, GROUP, box)
    assert found.dtype == torch.float32 and torch.equal(found.bfloat16(), meaning[first:last, left:right])


def test_a_run_is_told_to_convert_it(published):
    folder, _ = published
    with pytest.raises(ValueError, match="int4 weights in groups of 16"):
        check_model(folder, read_shape(folder), Mesh())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bits": 8}, "num_bits 8 cannot be read; only 4 can"),
        ({"symmetric": False}, "symmetric False cannot be read; only True can"),
        ({"strategy": "channel"}, "strategy 'channel' cannot be read; only 'group' can"),
        ({"actorder": "group"}, "actorder 'group' cannot be read"),
        ({"group_size": 12}, r"must name one group_size, a multiple of 8, but it names \[12\]"),
    ],
)
def test_other_words_are_refused_by_name(tmp_path, changes, message):
    groups = {"group_0": {"targets": ["Linear"], "weights": WEIGHTS | changes}}
    write_folder(tmp_path / "model", "kimi_k2", quantization_config=INT4 | {"config_groups": groups})
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path / "model")


def test_missing_scales_and_words_of_other_extents_are_named(published, tmp_path):
    folder, _ = published
    name = "model.layers.1.mlp.experts.0.down_proj.weight"

    def spoilt(**changes: Tensor | None) -> str:
        target = tmp_path / "spoilt"
        target.mkdir(exist_ok=True)
        for path in folder.iterdir():
            (target / path.name).write_bytes(path.read_bytes())
        tensors = read(folder)
        for end, tensor in changes.items():
            tensors.pop(f"{name}{end}")
            tensors |= {} if tensor is None else {f"{name}{end}": tensor}
        save_file(tensors, next(target.glob("*.safetensors")))
        with pytest.raises(ValueError) as caught:
            open_checkpoint(target)
        return str(caught.value)

    assert f"{name} is int4, but its scales {name}_scale are missing" in spoilt(_scale=None)
    assert "_scale [32, 2] must be [32, 1]" in spoilt(_scale=torch.ones(32, 2).bfloat16())
    assert f"as int4 {name} [32, 2] of I32 is needed" in spoilt(_packed=torch.zeros(32, 3, dtype=torch.int32))
