"""Loads the tokenizer of a model's folder.

`transformers.AutoTokenizer` can load every folder, but its module imports the whole code of generation, torch and its
compiler included. This takes two to three seconds in every process that needs a tokenizer. For folders of Qwen3 we know
the class that AutoTokenizer chooses, and load it directly.

Invariant: the tokenizer is the one that AutoTokenizer returns.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FAMILIES = ("qwen3", "qwen3_moe")
"""For these model types AutoTokenizer takes the class that the tokenizer's file names, if it is one of `CLASSES`."""
CLASSES = {
    "TokenizersBackend": "TokenizersBackend",
    "Qwen2Tokenizer": "Qwen2Tokenizer",
    "Qwen2TokenizerFast": "Qwen2Tokenizer",
}
"""The class of transformers that loads a folder, by the class that the folder names."""


def open_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that `AutoTokenizer.from_pretrained(folder)` returns.

    Raises:
        OSError, ValueError: the folder has none that transformers can load.
    """
    name = _known_class(folder)
    import transformers

    loader: Any = getattr(transformers, name)  # its modules are imported by name, when they are asked for
    tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(folder)
    return tokenizer


def end_ids(folder: Path) -> set[int]:
    """The ids that end an answer by generation_config.json and config.json of a model's folder."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        found = _read(folder / name).get("eos_token_id")
        ids |= {one for one in (found if isinstance(found, list) else [found]) if isinstance(one, int)}
    return ids


def padding_id(folder: Path) -> int | None:
    """The padding token of a classifier that is made of the model in a folder: the tokenizer's, or else config.json's,
    or else the end-of-sequence token, as in TRL; None if there is none of them."""
    of_tokenizer, config = _read(folder / "tokenizer_config.json"), _read(folder / "config.json")
    token = of_tokenizer.get("pad_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = _read(folder / "tokenizer.json").get("added_tokens", [])
    known = {one["content"]: one["id"] for one in added}
    known |= {one["content"]: int(i) for i, one in of_tokenizer.get("added_tokens_decoder", {}).items()}
    end = config.get("eos_token_id")
    for found in (known.get(text), config.get("pad_token_id"), *(end if isinstance(end, list) else [end])):
        if isinstance(found, int):
            return found
    return None


def end_texts(
    folder: Path, text_of: Callable[[int], str | None], encode: Callable[[str], list[int]]
) -> tuple[str, ...]:
    """The texts of the tokens that end an answer.

    Args:
        text_of: gives the text of a token; None if there is no such token.
        encode: gives the tokens of a text.
    """
    texts = {i: text_of(i) for i in sorted(end_ids(folder))}
    return tuple(text for i, text in texts.items() if text and encode(text) == [i])


def _known_class(folder: Path) -> str:
    model, tokenizer = _read(folder / "config.json"), _read(folder / "tokenizer_config.json")
    if model.get("model_type") not in FAMILIES or "auto_map" in tokenizer or not (folder / "tokenizer.json").is_file():
        return "AutoTokenizer"
    return CLASSES.get(str(tokenizer.get("tokenizer_class")), "AutoTokenizer")


def _read(path: Path) -> dict[str, Any]:
    """The file's object; empty if there is no file, which AutoTokenizer reports."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
