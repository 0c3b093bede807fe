"""Folders that hold experts in other forms than the family's table: both ways through every form of the converter."""

from __future__ import annotations

import re
from pathlib import Path

import cover
import pytest
import torch
from file_forms import FORMS, known, write_form
from folders import assert_same, back, read, write, write_folder
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_rl.convert import Options, Verification, open_checkpoint, smallest_mesh, to_hub, to_open, to_ranks, work
from megatron_rl.convert import target as target_files

MESHES = {
    "tp2_pp2": (dict(tensor=2, expert=1, expert_tensor=None), dict(pipeline=2)),
    "tp2_ep2_whole": (dict(tensor=2, expert=2, expert_tensor=1), {}),
    "tp2_ep4_vpp2": (dict(tensor=2, expert=4, expert_tensor=2), dict(pipeline=2, virtual=2)),
}


@pytest.fixture(scope="module", autouse=True)
def _known():
    with known():
        yield


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """Its first layer is dense."""
    return write_folder(tmp_path_factory.mktemp("plain") / "hub", "qwen3_moe_dense")


@pytest.fixture(scope="module")
def folders(plain) -> dict[str, Path]:
    return {form: write_form(form, plain, plain.with_name(form)) for form in FORMS}


@pytest.fixture
def small_pieces(monkeypatch):
    """Spans and blocks that are smaller than an expert's matrix, so that it is written in several."""
    monkeypatch.setattr(work, "MIN_STRETCH_BYTES", 700)
    monkeypatch.setattr(work, "STRETCHES_PER_WORKER", 1000)
    monkeypatch.setattr(target_files, "BLOCK_BYTES", 100)


@pytest.mark.parametrize("form", cover.essential(FORMS, "like_gpt_oss"))
@pytest.mark.usefixtures("small_pieces")
def test_round_trips_are_bitwise(folders, plain, form, tmp_path):
    """In between are the bytes that the same weights in the plain form give."""
    held = read(folders[form])
    for name, (ways, stages) in MESHES.items():
        mesh = smallest_mesh(**ways, **stages)
        for source, target in ((folders[form], "ranks"), (plain, "plain_ranks")):
            write(to_ranks(open_checkpoint(source), mesh, True), tmp_path / name / target)
        for file in (tmp_path / name / "plain_ranks").glob("*.safetensors"):
            assert (tmp_path / name / "ranks" / file.name).read_bytes() == file.read_bytes(), file
        assert_same(read(back(tmp_path / name / "ranks", tmp_path / name / "hub", Options(max_file_bytes=5000))), held)
    write(to_open(open_checkpoint(tmp_path / "tp2_pp2" / "ranks")), tmp_path / "open")
    write(to_open(open_checkpoint(plain)), tmp_path / "plain_open")
    for file in (tmp_path / "plain_open").glob("*.distcp"):
        assert (tmp_path / "open" / file.name).read_bytes() == file.read_bytes(), file
    assert_same(read(back(tmp_path / "open", tmp_path / "again")), held)


def test_a_change_of_dtype_is_that_of_the_plain_form(folders, plain, tmp_path):
    options = Options(dtype="bfloat16")
    write(to_open(open_checkpoint(folders["like_gpt_oss"]), options), tmp_path / "open")
    converted, halves = back(tmp_path / "open", tmp_path / "hub"), tmp_path / "halves"
    write(to_hub(open_checkpoint(plain), options), halves)
    found, wanted = read(converted), read(write_form("like_gpt_oss", halves, tmp_path / "form"))
    assert_same(*({name: tensor.nan_to_num(7) for name, tensor in held.items()} for held in (found, wanted)))


def verified(folder: Path, against: Path | None = None) -> int:
    return Verification(folder, against).run(1, lambda done_bytes: None).num_tensors


def test_a_changed_element_is_named_with_its_expert_and_row(folders, tmp_path):
    write(to_open(open_checkpoint(folders["like_gpt_oss"])), tmp_path / "open")
    again = back(tmp_path / "open", tmp_path / "again")
    assert verified(again, tmp_path / "open") == verified(tmp_path / "open", folders["like_gpt_oss"]) > 0
    file = again / "model.safetensors"
    held = load_file(file)
    name = "model.layers.2.mlp.experts.gate_up_proj"
    held[name][3, 4, 11] += 1  # the fourth expert's up, row 5
    save_file(held, file, metadata={"format": "pt"})
    (again / "manifest.json").unlink()
    named = rf"{file}: tensor model.layers.2.mlp.experts.3.up_proj.weight \(in {name}\) differs .*, first in row 5"
    with pytest.raises(ValueError, match=named):
        verified(again, tmp_path / "open")


def test_a_damaged_byte_is_named_by_the_files_tensor(folders, tmp_path):
    again = back(folders["like_gpt_oss"], tmp_path / "again")
    file = again / "model.safetensors"
    name = "model.layers.2.mlp.experts.gate_up_proj"
    with safe_open(file, framework="pt") as opened:
        content = opened.get_tensor(name).numpy().tobytes()
    whole = bytearray(file.read_bytes())
    whole[bytes(whole).index(content) + 77] ^= 1
    file.write_bytes(whole)
    with pytest.raises(ValueError, match=f"{re.escape(name)} is damaged"):
        verified(again)
    with pytest.raises(ValueError, match=f"{re.escape(name)} is damaged"):
        write(to_open(open_checkpoint(again)), tmp_path / "open")


@pytest.mark.deep
def test_a_stacked_tensor_takes_the_memory_of_an_expert(plain, tmp_path):
    """Writing a stacked tensor of 96 MB, of which an expert has 6, needs less than 32 MiB of private memory."""
    sizes = dict(hidden_size=1024, moe_intermediate_size=768, num_experts=16, num_hidden_layers=1)
    large = write_folder(tmp_path / "large", "qwen3_moe", torch.float32, 1, **sizes)
    conversion = to_hub(open_checkpoint(write_form("like_gpt_oss", large, tmp_path / "form")))
    tensors = {tensor.name: tensor for tensor, _ in conversion.files[0].tensors()}
    tensor = tensors["model.layers.0.mlp.experts.gate_up_proj"]
    assert tensor.num_bytes == 96 * 2**20
    maps = target_files.Maps({})

    def private_bytes() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

    before = private_bytes()
    peak = max(private_bytes() for _ in target_files.blocks(tensor, maps))
    assert peak - before < 2**25
