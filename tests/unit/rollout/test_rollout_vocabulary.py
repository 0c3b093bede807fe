"""Token ids are read from a model folder's own files."""

from __future__ import annotations

import json
import shutil

import pytest
from tokenizers import Tokenizer, models

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.rollout.programs.budgets import Budgets
from megatron_rl.rollout.vocabulary import forbidden_ids, stop_ids, thinking_faults, token_ids


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


def _rollout(*forbid, delimiter="") -> RolloutConfig:
    return RolloutConfig(delimiter=delimiter, sampling={"forbid": forbid})


def test_rows_without_a_token_and_named_tokens_are_forbidden(folder):
    tokens = {"a": 0, "</s>": 1, "<pad>": 2, "b": 5}
    Tokenizer(models.WordLevel(tokens, unk_token="a")).save(str(folder / "tokenizer.json"))
    assert forbidden_ids(folder, 8, _rollout()) == (3, 4, 6, 7)
    assert forbidden_ids(folder, 6, _rollout("<pad>")) == (2, 3, 4)
    with pytest.raises(ValueError, match="rollout.sampling.forbid.*'<pat>'"):
        forbidden_ids(folder, 8, _rollout("<pat>"))
    with pytest.raises(ValueError, match="'</s>'"):
        forbidden_ids(folder, 8, _rollout("</s>"))
    with pytest.raises(ValueError, match="'b' .*rollout.delimiter 'b'"):
        forbidden_ids(folder, 8, _rollout("b", delimiter="b"))
    with pytest.raises(ValueError, match="'<pat>'.*; '</s>' ends answers.*; 'b' is a token.*; .* no token 'zzzzz'$"):
        forbidden_ids(folder, 8, _rollout("<pat>", "</s>", "<pad>", "b", "zzzzz", delimiter="b"))
    (folder / "tokenizer.json").unlink()
    assert forbidden_ids(folder, 8, _rollout()) == ()
    with pytest.raises(ValueError, match="forbid needs .*tokenizer.json"):
        forbidden_ids(folder, 8, _rollout("<pad>"))


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


def merging() -> Tokenizer:
    """A tokenizer for which `.<` is one token."""
    characters = ["x", "7", ".", " ", "\n", "<", ">", "T"]
    return Tokenizer(models.BPE({c: i for i, c in enumerate([*characters, ".<"])}, merges=[(".", "<")]))


def test_a_delimiter_that_a_sign_melts_into_is_refused():
    assert thinking_faults(merging(), "T", None, None) == []
    [fault] = thinking_faults(merging(), "<T>", None, None)
    assert "rollout.delimiter '<T>' is the tokens [5, 7, 6], but after '.' the tokenizer makes [8, 7, 6]" in fault
    [fault] = thinking_faults(merging(), "T", None, "<")
    assert fault.startswith("rollout.thinking.opening '<' is the tokens [5], but after '.'")
    assert thinking_faults(merging(), "T", "<T", None) == [], "a closing is forced, and nobody looks for its beginning"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"closing": "1=?2=?"}, r"is the tokens \[6, 16, 18, 7, 16, 18\], which must have those of .* once"),
        ({"closing": "?1=?"}, r"begins with tokens with which rollout.delimiter ends \(\[18, 6, 16, 18\] and \[16, 18"),
        ({"closing": "so =?"}, r"rollout.thinking.closing 'so =\?' is not in the vocabulary"),
        ({"mode": "native"}, r"on a CPU only if .* one token; they are the tokens \[16, 18\] and \[16, 18\]"),
        ({"mode": "native", "opening": "=="}, r"opening '==' is the tokens \[16, 16\], but mode native needs one"),
        ({"thought_tokens": 10, "response_tokens": 6}, r"the closing's 2 tokens \+ response_tokens = 18; raise it"),
        ({"closing": "123=?"}, r"\(17\) is below .* the closing's 5 tokens \+ response_tokens = 18; raise it"),
    ],
)
def test_a_closing_that_cannot_work_is_refused(folders, changes, message):
    section = {"thought_tokens": 9, "response_tokens": 4, **changes}
    with pytest.raises(ValueError, match=message):
        Budgets(folders[0], rollout(section), on_gpu=False)


def rollout(section: dict, delimiter: str = "=?") -> RolloutConfig:
    sizes = {"prompts_per_step": 1, "samples_per_prompt": 1, "max_prompt_tokens": 8, "max_response_tokens": 17}
    return RolloutConfig(**sizes, delimiter=delimiter, thinking=section)


def test_the_tokens_of_a_closing(folders):
    section = {"thought_tokens": 9, "response_tokens": 4}
    assert Budgets(folders[0], rollout(section | {"closing": "1 =?"}), on_gpu=False).closing == (6, 19, 16, 18)
    assert Budgets(folders[0], rollout(section | {"mode": "truncate"}), on_gpu=False).closing is None
    on_gpu = Budgets(folders[0], rollout(section | {"mode": "native"}), on_gpu=True)
    assert (on_gpu.opening, on_gpu.delimiter, on_gpu.closing) == (2, (16, 18), (16, 18))


def test_the_channels_of_gpt_oss_are_a_delimiter():
    """Its special tokens are one token each after any text, and what stands between thought and answer is found."""
    signs = ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|return|>"]
    characters = sorted({*"x7. \nassistantfinalanalysis<|>"})
    harmony = Tokenizer(models.BPE({c: i for i, c in enumerate([*characters, ".<"])}, merges=[(".", "<")]))
    harmony.add_special_tokens(signs)
    delimiter = "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert thinking_faults(harmony, delimiter, None, None) == []
    assert thinking_faults(harmony, delimiter, f"So I answer.{delimiter}", None) == []
