"""The tokenizer of a folder is the one that AutoTokenizer returns, and for Qwen3 it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cover
import pytest
from tiny_chat import KEEPS, characters
from transformers import TokenizersBackend

from megatron_rl.data.tokenizer import CLASSES, FAMILIES, _known_class, open_tokenizer

ABSENT = None
OTHER_FAMILIES = ("qwen2", "llama", "olmo2", "deepseek_v3")
OTHER_CLASSES = ("LlamaTokenizerFast", "PreTrainedTokenizerFast", "Misspelt", ABSENT)


def folder_of(folder: Path, family: str, named: str | None) -> Path:
    TokenizersBackend(
        tokenizer_object=characters(), eos_token="<end>", unk_token="<unk>", chat_template=KEEPS
    ).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": named}
    path.write_text(json.dumps({name: value for name, value in settings.items() if value is not ABSENT}))
    return folder


@pytest.fixture(scope="session")
def auto_tokenizer():
    from transformers import AutoTokenizer  # it takes seconds to import

    return AutoTokenizer


@pytest.mark.parametrize(
    ("family", "named", "known"),
    [
        ("qwen3", "TokenizersBackend", "TokenizersBackend"),
        ("qwen3", "Qwen2Tokenizer", "Qwen2Tokenizer"),
        ("qwen3_moe", "Qwen2TokenizerFast", "Qwen2Tokenizer"),
        ("qwen3", "LlamaTokenizerFast", "AutoTokenizer"),
        ("qwen3_moe", ABSENT, "AutoTokenizer"),
        ("llama", "TokenizersBackend", "AutoTokenizer"),
    ],
)
def test_the_class_of_a_folder_is_known_or_left_to_auto_tokenizer(tmp_path, family, named, known):
    folder = folder_of(tmp_path, family, named)
    assert _known_class(folder) == known
    if known != "AutoTokenizer":
        tokenizer = open_tokenizer(folder)
        assert type(tokenizer).__name__ == known
        assert tokenizer.decode(tokenizer("1+1")["input_ids"]) == "1+1" and tokenizer.chat_template == KEEPS
        (folder / "tokenizer.json").unlink()
        assert _known_class(folder) == "AutoTokenizer"


@pytest.mark.deep
@pytest.mark.parametrize(
    ("family", "named"), cover.cases((*FAMILIES, *OTHER_FAMILIES), (*CLASSES, *OTHER_CLASSES)), ids=str
)
def test_it_is_the_one_of_auto_tokenizer(tmp_path, family, named, auto_tokenizer):
    folder = folder_of(tmp_path, family, named)
    given, expected = open_tokenizer(folder), auto_tokenizer.from_pretrained(folder)
    assert type(given) is type(expected)
    assert given.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert given.init_kwargs.keys() == expected.init_kwargs.keys()
    assert given.special_tokens_map == expected.special_tokens_map and given.chat_template == expected.chat_template
    turns = [{"role": "user", "content": "1+1="}]
    rendered = [each.apply_chat_template(turns, add_generation_prompt=True) for each in (given, expected)]
    assert rendered[0]["input_ids"] == rendered[1]["input_ids"] and len(rendered[0]["input_ids"]) > 4


@pytest.mark.deep
@pytest.mark.parametrize("damage", ["tokenizer.json", "tokenizer_config.json", "config.json", "all"])
def test_a_folder_with_a_fault_is_refused_as_by_auto_tokenizer(tmp_path, damage, auto_tokenizer):
    folder = folder_of(tmp_path, "qwen3", "TokenizersBackend")
    for path in list(folder.iterdir()) if damage == "all" else [folder / damage]:
        path.write_text("{")
    said = []
    for load in (open_tokenizer, auto_tokenizer.from_pretrained):
        with pytest.raises(Exception) as raised:
            load(folder)
        said.append((raised.type, str(raised.value)))
    assert said[0] == said[1]


@pytest.mark.deep
def test_that_of_a_qwen3_needs_no_torch(tmp_path):
    folder = folder_of(tmp_path, "qwen3", "TokenizersBackend")
    code = (
        "import sys; from pathlib import Path; from megatron_rl.data.tokenizer import open_tokenizer\n"
        "tokenizer = open_tokenizer(Path(sys.argv[1]))\n"
        "print(tokenizer.decode(tokenizer('1+1')['input_ids']), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1+1", "False"]
