"""Merged weights, and the digest of a base model."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.convert import adapters
from megatron_rl.convert.adapters import write_merged
from megatron_rl.layout.peft import base_digest, require_base
from megatron_rl.planning.trainer import MERGED_BYTES


@pytest.fixture
def folder(tmp_path):
    tensors = {name: torch.arange(64.0).view(8, 8) + i for i, name in enumerate("abc")}
    for name, held in (("one", "ab"), ("two", "c")):
        save_file({key: tensors[key] for key in held}, tmp_path / f"{name}.safetensors")
    return tmp_path


def test_the_digest_does_not_depend_on_the_files_but_on_every_tensor(folder, tmp_path_factory):
    known, other = base_digest(folder), tmp_path_factory.mktemp("other")
    save_file({key: torch.arange(64.0).view(8, 8) + i for i, key in enumerate("abc")}, other / "model.safetensors")
    assert base_digest(other) == known
    for changed in "abc":
        tensors = {key: torch.arange(64.0).view(8, 8) + i for i, key in enumerate("abc")}
        tensors[changed][0, 3] += 1e-5
        save_file(tensors, other / "model.safetensors")
        assert base_digest(other) != known
    tensors = {key: torch.arange(64.0).view(4, 16) + i for i, key in enumerate("abc")}
    save_file(tensors, other / "model.safetensors")
    assert base_digest(other) != known, "extents count"


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(ValueError, match="has neither safetensors files nor a manifest.json"):
        base_digest(tmp_path)


def test_only_digests_of_one_kind_are_compared(folder):
    """A converted folder without safetensors files says what its manifest says."""
    mine = base_digest(folder)
    for told in ("", mine, "manifest:0123456789abcdef"):
        require_base(told, folder, "the adapters")
    with pytest.raises(ValueError, match="is not the base model that the adapters were trained on: .* had tensors:0"):
        require_base("tensors:0123456789abcdef", folder, "the adapters")


def random(*extents: int) -> torch.Tensor:
    return torch.randn(extents, generator=torch.Generator().manual_seed(sum(extents)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_weight_is_rounded_once(dtype):
    weight, a, b = random(70, 50).to(dtype), random(4, 50).to(dtype), random(70, 4).to(dtype)
    exact = weight.double() + 0.5 * b.double() @ a.double()
    out = torch.empty_like(weight)
    write_merged(out, weight, a, b, 0.5)
    half_a_unit = torch.finfo(dtype).eps / 2
    float32 = 6 * 2.0**-24 * (weight.double().abs() + 0.5 * b.double().abs() @ a.double().abs())  # six operations
    assert ((out.double() - exact).abs() <= half_a_unit * exact.abs() + float32).all()
    wide = torch.empty(70, 50)
    write_merged(wide, weight, a, b, 0.5)
    assert torch.equal(wide, out.float()), "the model's dtype, whatever holds it"
    write_merged(weight, weight, a, b, 0.5)
    assert torch.equal(weight, out)


def test_every_rectangle_of_a_merged_weight_has_the_bits_of_the_whole_one(monkeypatch):
    """Of a matrix product it has not."""
    weight, a, b = random(1536, 576), random(32, 576), random(1536, 32)
    whole = torch.empty_like(weight)
    write_merged(whole, weight, a, b, 2.0)
    product, differ = weight + 2.0 * b @ a, 0
    monkeypatch.setitem(adapters.MERGED_ELEMENTS, "cpu", 999)
    for rows, columns in [(slice(3, 77), slice(5, 500)), (slice(1, 2), slice(None)), (slice(5, 1000), slice(7, 8))]:
        part = torch.empty_like(weight[rows, columns])
        write_merged(part, weight[rows, columns], a[:, columns], b[rows], 2.0)
        assert torch.equal(part, whole[rows, columns])
        differ += not torch.equal(weight[rows, columns] + 2.0 * b[rows] @ a[:, columns], product[rows, columns])
    assert differ


def test_the_planner_knows_what_is_merged_at_once():
    assert 2 * 4 * adapters.MERGED_ELEMENTS["cuda"] == MERGED_BYTES
