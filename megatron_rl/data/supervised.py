"""Turns supervised rows into tokens, with the completion as actions.

Invariants: the actions are exactly the tokens of the completion and its end-of-sequence token, which is the last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.data.encode import chat_ids, plain_ids
from megatron_rl.data.rows import BadRow, OnBadRow, form_of, load_rows, text_of, turns_of
from megatron_rl.types import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_supervised(
    path: Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int, on_bad_row: OnBadRow = "fail"
) -> tuple[list[tuple[str, Tokens]], int]:
    """Read a file whose rows have `prompt` and `completion` (plain text), or `messages` whose last turn is the
    assistant's.

    The completion ends with an end-of-sequence token, which is added if the text or the chat template has none. What a
    template writes after this token (a line feed) is left out, because the model never samples it. A row is bad if it
    is unreadable, has another form, or is longer than `max_tokens`.

    Returns:
        The rows, each as its name (`rows.jsonl:17`) and its tokens, with `logp_rollout` 0 and `version` -1 everywhere;
        and the number of skipped rows.

    Raises:
        ValueError: an error of `load_rows`, or the tokenizer has no end-of-sequence token, or there are chats but no
            chat template.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no eos_token, so a completion could not end; set it in tokenizer_config.json"
        )

    def make(uid: str, row: dict[str, Any]) -> tuple[str, Tokens]:
        demonstration = demonstration_of(row)
        if isinstance(demonstration[0], str):
            prompt, completion = (plain_ids(tokenizer, text) for text in demonstration)
        else:
            prompt, completion = _split_chat(tokenizer, demonstration)
        if not prompt:
            raise BadRow("the prompt has no tokens")
        completion = ended(completion, tokenizer.eos_token_id)
        length = len(prompt) + len(completion)
        if length > max_tokens:
            raise BadRow(f"the row has {length} tokens, but sft.max_tokens is {max_tokens}")
        return uid, Tokens(
            ids=np.array(prompt + completion, np.int32),
            action_mask=np.arange(length) >= len(prompt),
            logp_rollout=np.zeros(length, np.float32),
            version=np.full(length, -1, np.int32),
        )

    return load_rows(path, make, on_bad_row)


def demonstration_of(row: Mapping[str, Any]) -> tuple[str, str] | tuple[dict[str, str], ...]:
    """A row's prompt and completion as text, or its chat turns.

    Raises:
        BadRow: the row is bad for a reason that `load_supervised` lists.
    """
    if form_of(row) == "prompt":
        return text_of(row, "prompt"), text_of(row, "completion")
    turns = turns_of(row)
    if turns[-1]["role"] != "assistant":
        raise BadRow(f"`messages` must end with a turn of the role assistant, not {turns[-1]['role']}")
    return turns


def _split_chat(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, str]]) -> tuple[list[int], list[int]]:
    prompt = chat_ids(tokenizer, turns[:-1], add_generation_prompt=True) if turns[:-1] else []
    whole = chat_ids(tokenizer, turns, add_generation_prompt=False)
    if whole[: len(prompt)] != prompt:
        raise BadRow("the chat template writes the earlier turns differently once the answer is there")
    return prompt, whole[len(prompt) :]


def ended(completion: list[int], eos_id: int) -> list[int]:
    """The completion up to its last end-of-sequence token; if it has none, the completion with one added."""
    if eos_id not in completion:
        return [*completion, eos_id]
    return completion[: len(completion) - completion[::-1].index(eos_id)]
