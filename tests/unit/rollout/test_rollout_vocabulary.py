"""Token ids are read from a model folder's own files."""

from __future__ import annotations

import json
import shutil

import pytest

from megatron_rl.rollout.vocabulary import stop_ids, token_ids


@pytest.fixture
def folder(folders, tmp_path):
    return shutil.copytree(folders[0], tmp_path / "model")


def test_stop_ids_are_the_union_of_all_files(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert stop_ids(folder) == (1, 7, 9)


def test_a_folder_without_an_end_is_refused(folder):
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    with pytest.raises(ValueError, match="eos_token_id"):
        stop_ids(folder)


def test_delimiters_of_one_and_more_tokens(folder):
    assert token_ids(folder, "</think>") == (3,)
    assert token_ids(folder, "=?") == (16, 18)


def test_a_delimiter_outside_the_vocabulary_is_refused(folder):
    with pytest.raises(ValueError, match="rollout.delimiter 'so'"):
        token_ids(folder, "so")


def test_a_folder_without_a_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer.json"):
        token_ids(folder, "</think>")
