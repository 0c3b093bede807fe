"""Hugging Face folders: finds the file of each tensor, and names every damage."""

from __future__ import annotations

import json
import logging
import struct
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from test_models_config import DEEPSEEK, LLAMA, QWEN3, read

from megatron_rl.models import FAMILIES, check_model, read_shape, scan
from megatron_rl.models.hub import read_header
from megatron_rl.models.quantisation import Blocks
from megatron_rl.types import Mesh


def write_model(folder, change=None, config=QWEN3):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shape = read_shape(folder)
    tensors = {n: torch.zeros(e) for n, e in FAMILIES[shape.family].hf_tensors(shape).items()}
    if change:
        change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_whole_folder_reads(tmp_path):
    shape = read_shape(write_model(tmp_path / "m"))
    index = scan(tmp_path / "m", shape)
    assert index.files.keys() == FAMILIES["qwen3"].hf_tensors(shape).keys() and not index.ignored


@pytest.mark.parametrize("keep", [0, 5, 9, 200, -1])
def test_truncated_weights_are_named(tmp_path, keep):
    folder = write_model(tmp_path / "m")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="model.safetensors"):
        scan(folder, read_shape(folder))


def test_every_flipped_bit_of_a_header_is_refused_or_gives_entries_of_the_right_types(tmp_path):
    """What is still a header may describe other tensors, which the readers compare with config.json."""
    path = tmp_path / "two.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, path)
    whole = path.read_bytes()
    length = 8 + struct.unpack("<Q", whole[:8])[0]
    assert read_header(path) == {"a": ("F32", (2, 3), length), "b": ("BF16", (4,), length + 24)}
    for position in range(length):
        for bit in range(8):
            broken = bytearray(whole)
            broken[position] ^= 1 << bit
            path.write_bytes(broken)
            try:
                entries = read_header(path)
            except ValueError as error:
                assert str(path) in str(error)
                continue
            for dtype, extents, start in entries.values():
                assert type(dtype) is str and all(type(extent) is int and extent >= 0 for extent in extents)
                assert type(start) is int and start >= length


NORM = "model.norm.weight"
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), r"1 tensors are missing, the first is model.norm.weight \(qwen3's row decoder.final"),
        (lambda t: t.update({"model.extra": t[NORM].clone()}), "model.extra .* unknown .* no row"),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": t[NORM].clone()}),
            "layers.1.mlp.up_proj.* qwen3's row mlp.linear_fc1.weight: .* a model without it",
        ),
        (lambda t: t.update({NORM: t[NORM][:4].clone()}), r"\[4\], but config.json asks for \[8\]: .*\[hidden\]"),
        (
            lambda t: t.update({"model.x.weight_scale_inv": t[NORM].clone()}),
            "scales the fp8 tensor model.x.weight, but",
        ),
        (lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)}), "up_proj.weight .* F8_E4M3, .*a quantization_config"),
        (lambda t: t.update({NORM: t[NORM].to(torch.int32)}), "norm.weight .* is I32, which is no dtype"),
    ],
)
def test_wrong_tensors_are_named(tmp_path, change, message):
    folder = write_model(tmp_path / "m", change)
    with pytest.raises(ValueError, match=message):
        scan(folder, read_shape(folder))


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def quantise(tensors, name=UP, scales=(1, 1), dtype=torch.float32):
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.ones(scales, dtype=dtype)


@pytest.mark.parametrize("fmt", ["e4m3", "float8_e4m3fn"])
def test_a_folder_in_fp8_reads_and_says_where_the_scales_are(tmp_path, fmt):
    config = QWEN3 | {"quantization_config": FP8 | {"fmt": fmt, "modules_to_not_convert": ["lm_head"]}}
    folder = write_model(tmp_path / "m", quantise, config)
    index = scan(folder, read_shape(folder))
    assert (index.blocks, index.scales) == (Blocks(128, 128), {UP: folder / "model.safetensors"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)}),
            f"{UP} is fp8, but its scales {UP}_scale_inv are mis",
        ),
        (lambda t: quantise(t, scales=(1, 2)), rf"{UP}_scale_inv \[1, 2\] must be \[1, 1\]"),
        (lambda t: quantise(t, scales=(1,)), rf"{UP}_scale_inv \[1\] must be \[1, 1\]"),
        (lambda t: quantise(t, dtype=torch.float8_e8m0fnu), f"{UP}_scale_inv .* is F8_E8M0, but .* BF16, F16, F32"),
        (lambda t: t.update({f"{UP}_scale_inv": torch.ones(1, 1)}), f"{UP}_scale_inv .*, but this one is not fp8"),
        (lambda t: quantise(t, NORM), "norm.weight .* is F8_E4M3, but only a matrix can be"),
        (lambda t: t.update({UP: t[UP].to(torch.float8_e5m2)}), f"{UP} .* is F8_E5M2, which is no dtype"),
    ],
)
def test_what_is_wrong_with_scales_is_named(tmp_path, change, message):
    folder = write_model(tmp_path / "m", change, QWEN3 | {"quantization_config": FP8})
    with pytest.raises(ValueError, match=message):
        scan(folder, read_shape(folder))


def test_scales_in_two_files_are_named(tmp_path):
    folder = write_model(tmp_path / "m", quantise, QWEN3 | {"quantization_config": FP8})
    save_file({f"{UP}_scale_inv": torch.ones(1, 1)}, folder / "more.safetensors")
    with pytest.raises(ValueError, match=f"more.safetensors: tensor {UP}_scale_inv .* another file"):
        scan(folder, read_shape(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"quantization_config": {"quant_method": name}}, f"quantised with {name}") for name in ("gptq", "awq")),
        ({"quantization_config": {"load_in_8bit": True}}, "quantised with a method that it does not name"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "quantised with compressed-tensors"),
        ({"quantization_config": FP8 | {"weight_block_size": None}}, "fp8 without weight_block_size"),
        ({"quantization_config": FP8 | {"weight_block_size": [128]}}, r"weight_block_size is \[128\], but"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "fmt 'e5m2'"),
        ({"quantization_config": FP8 | {"activation_scheme": "static"}}, "activation_scheme 'static'"),
        ({"quantization_config": "fp8"}, "quantization_config is no table"),
    ],
)
def test_other_quantised_formats_are_refused_by_name(tmp_path, changes, message):
    """The tensors are not looked at: those of such formats have names and dtypes of their own."""
    folder = write_model(tmp_path / "m", lambda t: t.update({UP: torch.zeros(1, dtype=torch.int32)}), QWEN3 | changes)
    for check in (scan, lambda folder, shape: check_model(folder, shape, Mesh())):
        with pytest.raises(ValueError, match=f"config.json.*{message}"):
            check(folder, read_shape(folder))


def test_a_tensor_in_two_files_is_named(tmp_path):
    folder = write_model(tmp_path / "m")
    save_file({NORM: torch.zeros(8)}, folder / "more.safetensors")
    with pytest.raises(ValueError, match="more.safetensors.*model.norm.weight"):
        scan(folder, read_shape(folder))


def test_a_folder_with_an_index_has_the_files_that_the_index_names(tmp_path):
    """Some releases hold the same weights a second time, as one file."""
    folder = write_model(tmp_path / "m")
    shape = read_shape(folder)
    save_file({NORM: torch.zeros(8)}, folder / "consolidated.safetensors")
    index = {"weight_map": {name: "model.safetensors" for name in FAMILIES["qwen3"].hf_tensors(shape)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(scan(folder, shape).files.values()) == {folder / "model.safetensors"}
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(ValueError, match="index.json names model.safetensors.*1 of 1"):
        scan(folder, shape)


def test_a_tensor_twice_in_one_header_is_named(tmp_path):
    folder = write_model(tmp_path / "m")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = content[8 : 8 + length].rstrip()
    entry = json.dumps(json.loads(header)[NORM])
    twice = header[:-1] + f',"{NORM}":{entry}}}'.encode()
    path.write_bytes(struct.pack("<Q", len(twice)) + twice + content[8 + length :])
    with pytest.raises(ValueError, match="model.norm.weight twice"):
        scan(folder, read_shape(folder))


def test_tensors_that_a_model_does_not_need_are_counted_and_reported(tmp_path, caplog):
    config = LLAMA | {
        "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 8, "vocab_size": 16, "tie_word_embeddings": True,
    }  # fmt: skip

    def add(tensors):
        tensors["lm_head.weight"] = torch.zeros(16, 8)
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)

    folder = write_model(tmp_path / "m", add, config)
    shape = read_shape(folder)
    assert len(scan(folder, shape).ignored) == 3
    with caplog.at_level(logging.WARNING):
        check_model(folder, shape, Mesh())
    assert "2 tensors are ignored: rotary buffers follow from config.json" in caplog.text
    assert "1 tensors are ignored: the output layer is tied" in caplog.text


def test_the_layer_after_the_last_is_ignored_in_deepseek_alone(tmp_path):
    shape = read(tmp_path, DEEPSEEK)
    shape = replace(shape, layers=(*shape.layers, *shape.layers[-1:] * (61 - shape.num_layers)))
    prediction = FAMILIES["deepseek_v3"].multi_token
    assert prediction.matches("model.layers.61.mlp.experts.7.up_proj.weight", shape)
    assert not prediction.matches("model.layers.62.mlp.gate.weight", shape)
    assert not prediction.matches("model.layers.6.mlp.gate.weight", shape)
