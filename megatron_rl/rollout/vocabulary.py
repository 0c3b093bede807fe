"""Reads the few token ids that the engine needs from a model folder.

The engine gets and returns token ids, so nothing is tokenised during a run. The end-of-sequence ids are the ids in
generation_config.json, the ids in config.json and the tokenizer's `eos_token` together. Base and chat models list
different ids, and an answer that ends with an unlisted id would use up its whole budget.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.data.tokenizer import end_ids
from megatron_rl.models.vision import vision_of


def stop_ids(folder: Path) -> tuple[int, ...]:
    """All ids that end an answer, in ascending order.

    Raises:
        ValueError: no file of the folder names one.
    """
    named = {token for token in (_special_id(folder, "eos_token"), *end_ids(folder)) if token is not None}
    if not named:
        raise ValueError(f"{folder} names no end-of-sequence token: set eos_token_id in its config.json")
    return tuple(sorted(named))


def token_ids(folder: Path, text: str, key: str = "rollout.delimiter") -> tuple[int, ...]:
    """A text of the configuration as token ids of the model, at least one.

    Args:
        key: the key of the configuration that has the text.

    Raises:
        ValueError: the tokenizer does not know the text or a part of it.
    """
    ids = tuple(_ids(load_tokenizer(folder), text))
    if not ids or _special_id(folder, "unk_token") in ids:
        raise ValueError(
            f"{key} {text!r} is not in the vocabulary of {folder}; choose a text that its tokenizer "
            "knows, or an empty one for a model that does not think"
        )
    return ids


def single_ids(folder: Path, texts: Sequence[str], key: str) -> list[int]:
    """The ids of texts. Each text must be one token of the model.

    Args:
        key: the key of the configuration that has the texts.

    Raises:
        ValueError: the tokenizer splits a text, or does not know it.
    """
    tokenizer, unknown = load_tokenizer(folder), _special_id(folder, "unk_token")
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
    for text, ids in zip(texts, encoded, strict=True):
        if len(ids) != 1 or ids[0] == unknown:
            what = f"is the tokens {ids}" if len(ids) > 1 else "is not in the vocabulary"
            raise ValueError(
                f"{key}: {text!r} {what} of {folder}, but it must be one token; add it to the tokenizer and to the "
                "model's vocabulary, or write it as several texts"
            )
    return [ids[0] for ids in encoded]


def forbidden_ids(folder: Path, vocab_size: int, rollout: RolloutConfig) -> tuple[int, ...]:
    """The ids that are never sampled, in ascending order: the rows of the model's vocabulary without a token, the token
    that stands for images, and the tokens in `rollout.sampling.forbid`.

    Example: a model with 8 rows, a tokenizer with the tokens a, b, </s> and <pad> as the ids 0 to 3, and forbid
    (<pad>): 3, 4, 5, 6, 7.

    Raises:
        ValueError: the tokenizer has no such token, or the token ends answers or thoughts; with all such tokens.
    """
    sampling, path = rollout.sampling, folder / "tokenizer.json"
    if not path.is_file():  # transformers can read the tokenizer, and only it knows the ids
        if sampling.forbid:
            raise ValueError(f"rollout.sampling.forbid needs {path}; save it with transformers' save_pretrained")
        return image_tokens(folder)
    known = load_tokenizer(folder).get_vocab(with_added_tokens=True)
    ends, faults = stop_ids(folder), []
    delimiter = token_ids(folder, rollout.delimiter) if sampling.forbid and rollout.delimiter else ()
    for token in sampling.forbid:
        if token not in known:
            near = get_close_matches(token, known, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            faults.append(f"the tokenizer of {folder} has no token {token!r}{hint}")
        elif known[token] in ends:
            faults.append(f"{token!r} ends answers (eos_token_id), so every answer would use up its budget: remove it")
        elif known[token] in delimiter:
            faults.append(
                f"{token!r} is a token of rollout.delimiter {rollout.delimiter!r}, so that no reasoning would end by "
                "itself: remove it"
            )
    if faults:
        raise ValueError(f"rollout.sampling.forbid: {'; '.join(faults)}")
    named = {known[token] for token in sampling.forbid}
    return tuple(sorted(named | {*image_tokens(folder)} | (set(range(vocab_size)) - set(known.values()))))


def image_tokens(folder: Path) -> tuple[int, ...]:
    """The tokens that stand for images and videos, if the model sees any."""
    vision = vision_of(folder)
    known = () if vision is None else (vision.image_token, vision.video_token)
    return tuple(token for token in known if token is not None)


WORDS, SIGNS = ("x", "7"), (".", " ", "\n")
"""What may stand before a delimiter or a closing. A closing that begins with white space may melt into a sign: nobody
looks for it as a whole."""


def thinking_faults(tokenizer: Tokenizer, delimiter: str, closing: str | None, opening: str | None) -> list[str]:
    """Why these texts cannot end, close or open a thought; empty if they can.

    Args:
        closing: None: it is the delimiter.
        opening: None: nobody needs it.
    """
    ids = _ids(tokenizer, delimiter)
    texts = {"rollout.delimiter": delimiter, "rollout.thinking.opening": opening, "rollout.thinking.closing": closing}
    faults = []
    for key, text in texts.items():
        if text is None:
            continue
        alone = _ids(tokenizer, text)
        for before in WORDS if key == "rollout.thinking.closing" else WORDS + SIGNS:
            found = _ids(tokenizer, before + text)
            if found[len(found) - len(alone) :] != alone:
                faults.append(
                    f"{key} {text!r} is the tokens {alone}, but after {before!r} the tokenizer makes {found} of both: "
                    f"it would not be found there; choose a text that is the same tokens everywhere, such as a special "
                    f"token"
                )
                break
    if closing is None or closing == delimiter:
        return faults
    whole, size = _ids(tokenizer, closing), len(ids)
    if whole[-size:] != ids or any(whole[i : i + size] == ids for i in range(len(whole) - size)):
        faults.append(
            f"rollout.thinking.closing {closing!r} is the tokens {whole}, which must have those of rollout.delimiter, "
            f"{ids}, once and at their end"
        )
    elif any(ids[-i:] == whole[:i] for i in range(1, size)):
        faults.append(
            f"rollout.thinking.closing {closing!r} begins with tokens with which rollout.delimiter ends ({whole} and "
            f"{ids}): together with the end of the reasoning they could be a delimiter; begin it with another text"
        )
    return faults


def native_fault(delimiter: Sequence[int], closing: Sequence[int]) -> str | None:
    """Why vLLM cannot keep the thinking budget on a CPU; None if it can. Its model runner V2, for GPUs, can always. The
    older one, for CPUs, looks for the closing alone, so that it does not see a thought that the model has ended with
    the delimiter, and restarts a closing if a push interrupts it."""
    if len(closing) == 1 and list(closing) == list(delimiter):
        return None
    return (
        "rollout.thinking.mode native works on a CPU only if rollout.thinking.closing is rollout.delimiter, and one "
        f"token; they are the tokens {list(closing)} and {list(delimiter)}. Set it to two_call"
    )


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


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


def _read(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return read
