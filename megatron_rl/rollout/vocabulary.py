"""Reads the few token ids that the engine needs from a model folder.

The engine gets and returns token ids, so nothing is tokenised during a run. The end-of-sequence ids are the union of
those in generation_config.json, in config.json and of the tokenizer's `eos_token`. Base and chat models list different
ones, and an answer with an id that is not listed would use up its whole budget.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer


def stop_ids(folder: Path) -> tuple[int, ...]:
    """All ids that end an answer, in ascending order.

    Raises:
        ValueError: no file of the folder names one.
    """
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        found = _read(folder / name).get("eos_token_id")
        ids |= set(found) if isinstance(found, list) else {found} - {None}
    ids |= {_special_id(folder, "eos_token")} - {None}
    if not ids:
        raise ValueError(f"{folder} names no end-of-sequence token: set eos_token_id in its config.json")
    return tuple(sorted(ids))


def delimiter_ids(folder: Path, text: str) -> tuple[int, ...]:
    """The delimiter as token ids of the model, at least one.

    Raises:
        ValueError: the tokenizer does not know the text or a part of it.
    """
    ids = tuple(load_tokenizer(folder).encode(text, add_special_tokens=False).ids)
    if not ids or _special_id(folder, "unk_token") in ids:
        raise ValueError(
            f"rollout.delimiter {text!r} is not in the vocabulary of {folder}; choose a text that its tokenizer "
            "knows, or an empty one for a model that does not think"
        )
    return ids


def load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no tokenizer.json; save it with transformers' save_pretrained")
    return Tokenizer.from_file(str(path))


def _special_id(folder: Path, role: str) -> int | None:
    token = _read(folder / "tokenizer_config.json").get(role)
    if token is None:
        return None
    return load_tokenizer(folder).token_to_id(token if isinstance(token, str) else token["content"])


def _read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.is_file() else {}
