"""The digest of a base model."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.layout.peft import base_digest, require_base


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
