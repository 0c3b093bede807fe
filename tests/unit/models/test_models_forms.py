"""Files that hold experts in other forms than the table's: where each element lies, and what of it a plan sees."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from file_forms import FORMS, in_files, known, write_form
from numbered import SHAPES, carry_out, cut, numbered
from numpy.lib.stride_tricks import as_strided
from safetensors.torch import load_file, save_file

from megatron_rl.layout import Engines, plan_weights
from megatron_rl.models import check_model, megatron_shards, read_shape, scan, vllm_shards
from megatron_rl.models.shards import Box, slices
from megatron_rl.models.view import InFile, View
from megatron_rl.types import Mesh

PLAIN = SHAPES["qwen3_moe"]


@pytest.fixture(scope="module", autouse=True)
def _known():
    with known():
        yield


def seen(tensor: np.ndarray, view: View, extents: tuple[int, ...]) -> np.ndarray:
    strides = [stride * tensor.itemsize for stride in view.strides]
    return as_strided(tensor.ravel()[view.offset :], extents, strides)


@pytest.mark.parametrize("form", FORMS)
def test_the_views_are_what_the_files_hold_each_element_once(form):
    shape, hf = replace(PLAIN, family=form), numbered(PLAIN)
    files = in_files(form, {name: torch.from_numpy(array) for name, array in hf.items()}, 6, 8)
    tensors = FORMS[form].file_tensors(shape)
    assert {name: tuple(tensor.shape) for name, tensor in files.items()} == {n: t.extents for n, t in tensors.items()}
    left = dict(hf)
    for name, tensor in tensors.items():
        for part, view in (tensor.views or {name: None}).items():
            whole, array = files[name].numpy(), left.pop(part)
            np.testing.assert_array_equal(seen(whole, view, array.shape) if view else whole, array, part)
        held = sum(prod(hf[part].shape) for part in tensor.views or (name,))
        assert held == prod(tensor.extents)
    assert not left
    assert FORMS[form].num_parameters(shape) == sum(array.size for array in hf.values())


def test_vectors_have_the_same_forms():
    """The biases of gpt-oss: [experts, 2 ffn]."""
    file = torch.arange(4 * 6).view(4, 6)
    for part in (0, 1):
        view = InFile("bias", part, 2, interleaved=True, transposed=True).view((3,), "", 2, 4)
        assert view.extents == (4, 6)
        assert file.as_strided((3,), view.strides, view.offset).tolist() == file[2, part::2].tolist()
        view = InFile("bias", part, 2).view((3,), "", 2, 4)
        assert file.as_strided((3,), view.strides, view.offset).tolist() == file[2, 3 * part :][:3].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_a_clip_is_what_lies_in_the_rows(form):
    """Every interval of rows, for the rectangles of two ranks and for a single row or column."""
    rows, columns = 4, 3
    boxes: list[Box] = [((0, 4), (0, 3)), ((2, 4), (0, 3)), ((0, 4), (1, 2)), ((1, 2), (0, 3)), ((3, 4), (2, 3))]
    for rule in FORMS[form].mixture:
        for tensor in rule.hf:
            if tensor.file is None:
                continue
            view = tensor.file.view((rows, columns), "", 1, 2)
            numbers = seen(np.arange(prod(view.extents)), view, (rows, columns))
            row = prod(view.extents[1:])
            for box in boxes:
                for first in range(view.extents[0]):
                    for last in range(first + 1, view.extents[0] + 1):
                        wanted = [n for n in numbers[slices(box)].ravel().tolist() if first * row <= n < last * row]
                        clipped = view.clip(box, first, last)
                        found = numbers[slices(clipped)].ravel().tolist() if clipped else []
                        assert found == wanted, (view, box, first, last)
                        assert not clipped or view.start(clipped) == min(wanted)


@pytest.mark.parametrize("form", FORMS)
def test_a_view_of_a_file_is_a_rectangle_exactly_if_one_has_its_elements(form):
    """Every rectangle is found, also with dims of length 1; steps of two, a transposition and what belongs to two
    tensors are none."""
    full, views = (4, 3), {}
    for rule in FORMS[form].mixture:
        for tensor in rule.hf:
            if tensor.file:
                for expert in (0, 1):
                    views[tensor.name.format(expert)] = tensor.file.view(full, "", expert, 2)
    for name, view in views.items():
        for a, b, c, d in np.ndindex(4, 5, 3, 4):
            if a < b and c < d:
                box = ((a, b), (c, d))
                sizes, strides = (b - a, 1, d - c), (view.strides[0], 99, view.strides[1])
                for other, part in views.items():
                    same = part.name == view.name and other == name
                    if part.name == view.name:
                        assert part.box_of(view.start(box), sizes, strides, full) == (box if same else None)
        first, last = view.strides
        assert view.box_of(view.offset, (2, 3), (2 * first, last), full) is None
        assert view.box_of(view.offset, (3, 4), (last, first), full) is None
        assert view.box_of(view.offset, (5, 3), (first, last), full) is None
        assert view.box_of(view.offset, (2, 4, 3), (prod(view.extents[1:]), first, last), full) is None


@pytest.mark.parametrize("form", ["like_gpt_oss", "each_mixed"])
def test_every_element_of_a_push_arrives_once(form):
    """The plan is that of the same model in the plain form: neither ranks nor engines have anything of a file."""
    shape, hf = replace(PLAIN, family=form), numbered(PLAIN)
    for mesh, engines in (
        (Mesh(tensor=2, pipeline=2), Engines(2, tensor=2)),
        (Mesh(tensor=2, data=2, expert=4, expert_tensor=1), Engines(tensor=4, expert_parallel=True)),
    ):
        plan = plan_weights(shape, mesh, engines)
        sources = [cut(megatron_shards(shape, mesh, rank), hf) for rank in range(mesh.world_size)]
        wanted = [
            cut(vllm_shards(shape, engines.tensor, rank, engines.expert_parallel), hf) for rank in range(engines.tensor)
        ]
        carry_out(plan, sources, wanted, max_bytes=100)
        assert plan.digest == plan_weights(PLAIN, mesh, engines).digest


@pytest.fixture
def folder(tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 8, "vocab_size": 16, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
        "norm_topk_prob": True,
    }  # fmt: skip
    (plain / "config.json").write_text(json.dumps(config))
    tensors = {
        name: torch.zeros(extents) for name, extents in FORMS["like_gpt_oss"].hf_tensors(read_shape(plain)).items()
    }
    save_file(tensors, plain / "model.safetensors")
    return write_form("like_gpt_oss", plain, tmp_path / "form")


HELD = "model.layers.1.mlp.experts.gate_up_proj"


def test_a_folder_is_scanned_by_the_names_of_its_files(folder):
    check_model(folder, read_shape(folder), Mesh(tensor=2))
    index = scan(folder, read_shape(folder))
    assert index.files[HELD] == folder / "model.safetensors" and not index.ignored
    assert not any("gate_proj" in name for name in index.files)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held.pop(HELD), rf"1 tensors are missing, the first is {HELD} .*which files hold in mlp.experts"),
        (lambda held: held.update({HELD: torch.zeros(4, 12, 8)}), r"\[4, 12, 8\], but .* asks for \[4, 8, 12\]"),
        (
            lambda held: held.update({"model.layers.0.mlp.experts.1.up_proj.weight": torch.zeros(6, 8)}),
            "belongs to like_gpt_oss's row .* which files hold in mlp.experts.gate_up_proj",
        ),
        (lambda held: held.update({HELD: held[HELD].to(torch.float8_e4m3fn)}), "F8_E4M3, but only a matrix can be"),
    ],
    ids=["missing", "extents", "plain", "fp8"],
)  # fmt: skip
def test_a_folder_that_does_not_fit_is_refused_by_the_names_of_its_files(folder, change, message):
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        scan(folder, read_shape(folder))


def test_a_matrix_in_fp8_is_refused_if_it_is_a_part(folder):
    """Blocks of a matrix of which the rows alternate are no blocks of its parts."""
    write_form("each_transposed", folder.parent / "plain", folder.parent / "each")
    folder = folder.parent / "each"
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    (folder / "config.json").write_text(json.dumps(config))
    held = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.gate_up_proj.weight"
    held[name] = held[name].to(torch.float8_e4m3fn)
    save_file(held, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} .*F8_E4M3, but .*of which fp8 cannot be read"):
        scan(folder, read_shape(folder))
