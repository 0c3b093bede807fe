"""tokenizer.json that is made of tiktoken's ranks, against tiktoken itself."""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path

import pytest
import tiktoken
from folders import write_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from megatron_rl.commands import megatron_to_hf
from megatron_rl.convert import tiktoken_files
from megatron_rl.data.tokenizer import open_tokenizer

PARTS = (
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
)
"""In the manner of Kimi's: Chinese characters are words of their own, which transformers' default pattern does not
know."""
CODE = f"raise RuntimeError('nobody runs this')\nclass Kimi:\n    pat_str = '|'.join({list(PARTS)!r})\n"
TEXT = (
    "你好世界 hello world 中文English混合 the quick brown fox 北京市 Pascal 1234567 naïve  日本語のテキスト\n\t Straße "
    * 3
)
NUM_MERGES = 60


def learnt_ranks() -> dict[bytes, int]:
    """The tokens of a small byte-pair encoding in the order in which they are learnt."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[bytes([byte]) for byte in word.encode()] for word in TEXT.split(" ")]
    words += [[bytes([byte]) for byte in word.encode()] for word in ("中文中", "文E", "Englis")]
    for _ in range(NUM_MERGES):
        pairs = Counter(pair for word in words for pair in zip(word, word[1:], strict=False))
        (a, b), _ = max(pairs.items(), key=lambda pair: (pair[1], pair[0]))
        ranks.setdefault(a + b, len(ranks))
        for word in words:
            for i in range(len(word) - 1, 0, -1):
                if i < len(word) and (word[i - 1], word[i]) == (a, b):
                    word[i - 1 : i + 1] = [a + b]
    return ranks


RANKS = learnt_ranks()
SPECIAL = {"[BOS]": len(RANKS), "<|im_end|>": len(RANKS) + 2, "[PAD]": len(RANKS) + 7}


def write_tokenizer(folder: Path, code: str = CODE) -> Path:
    """The files of a model's folder with this tokenizer, the vocabulary of 8 rows more than ranks."""
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in RANKS.items())
    (folder / "tiktoken.model").write_text("".join(lines))
    (folder / "tokenization_kimi.py").write_text(code)
    config = {
        "added_tokens_decoder": {str(number): {"content": name} for name, number in SPECIAL.items()},
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.Kimi", None]},
        "tokenizer_class": "Kimi",
        "eos_token": "<|im_end|>",
        "chat_template": "{{ messages[0]['content'] }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for other in ("tokenizer.json", "chat_template.jinja"):
        (folder / other).unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("kimi") / "model"
    write_folder(root, "kimi_k2", vocab_size=len(RANKS) + 8)
    return write_tokenizer(root)


@pytest.fixture(scope="module")
def converted(folder) -> Path:
    target = folder.parent / "converted"
    assert megatron_to_hf.main([str(folder), str(target)]) == 0
    return target


@pytest.fixture(scope="module")
def reference() -> tiktoken.Encoding:
    return tiktoken.Encoding("kimi", pat_str="|".join(PARTS), mergeable_ranks=RANKS, special_tokens=SPECIAL)


@given(text=st.text(st.sampled_from(sorted({*TEXT, "ǅ", "́", "ʰ", "🌍", "'", "\r"})), max_size=40))
@settings(max_examples=200, deadline=None)
def test_tokens_are_tiktokens(converted, reference, text):
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    found = tokenizer.encode(text, add_special_tokens=False).ids
    assert found == reference.encode(text) and tokenizer.decode(found) == text


def test_transformers_default_pattern_would_be_another_one(converted, reference):
    """What a plain conversion by transformers does."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    plain = TikTokenConverter(str(converted.parent / "model" / "tiktoken.model")).converted()
    assert plain.encode("中文English").ids != reference.encode("中文English")


def test_special_tokens_and_rows_without_a_name_keep_their_numbers(converted):
    tokenizer = open_tokenizer(converted)
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == list(SPECIAL.values())
    assert tokenizer.encode("[BOS]a<|im_end|>") == [SPECIAL["[BOS]"], ord("a"), SPECIAL["<|im_end|>"]]
    unnamed = len(RANKS) + 1
    assert tokenizer.convert_ids_to_tokens([unnamed]) == [f"<|reserved_token_{unnamed}|>"]
    assert len(tokenizer) == len(RANKS) + 8 and tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_the_vocabulary_of_a_composite_is_its_texts(folder, converted, tmp_path):
    write_tokenizer(tmp_path)
    text = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text, "vocab_size": 7}))
    made = tiktoken_files.tokenizer_files(tmp_path)
    assert made["tokenizer.json"] == (converted / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("pat_str = '|'.join(parts)", "line 1: `pat_str` is neither a text nor a list of texts"),
        ("pattern = 'a'", "has no `pat_str`"),
    ],
)
def test_a_pattern_that_cannot_be_read_is_named(folder, tmp_path, code, message):
    write_tokenizer(tmp_path, code)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ValueError, match=message):
        tiktoken_files.tokenizer_files(tmp_path)
    (tmp_path / "tokenization_kimi.py").unlink()
    with pytest.raises(ValueError, match="tokenization_kimi.py"):
        tiktoken_files.tokenizer_files(tmp_path)


def test_ranks_that_were_copied_again_are_read_again(folder, tmp_path):
    """The library tiktoken keeps what it has read by its path."""
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    whole, path = tiktoken_files.tokenizer_files(tmp_path)["tokenizer.json"], tmp_path / tiktoken_files.RANKS
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]))
    fewer = tiktoken_files.tokenizer_files(tmp_path)["tokenizer.json"]
    assert len(json.loads(fewer)["model"]["merges"]) == len(json.loads(whole)["model"]["merges"]) - 1
    path.write_text("\n".join([*lines[:-1], "YQ=="]))
    with pytest.raises(ValueError, match=f"tiktoken.model, line {len(lines)} cannot be read"):
        tiktoken_files.tokenizer_files(tmp_path)
    path.write_text("\n".join(lines) + "\n\n")
    assert tiktoken_files.tokenizer_files(tmp_path)["tokenizer.json"] == whole
