"""What is told about GGUF files where the packages that read them are missing. What becomes of such files is in
tests/e2e/test_real_model.py, which has the packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.commands import gguf_to_hf
from megatron_rl.convert import gguf, open_checkpoint
from megatron_rl.models import read_shape


def test_a_missing_package_and_an_existing_target_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    assert gguf_to_hf.main([str(tmp_path / "model.gguf"), str(tmp_path / "model")]) == 1
    assert "pip install gguf accelerate" in capsys.readouterr().err
    assert gguf_to_hf.main([str(tmp_path / "model.gguf"), str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path} exists; remove it or choose another name\n"


def test_where_a_folder_is_needed_a_gguf_file_is_told_from_it(tmp_path):
    for read in (read_shape, open_checkpoint):
        with pytest.raises(ValueError, match="megatron-rl convert from-gguf"):
            read(Path("models/model.gguf"))
