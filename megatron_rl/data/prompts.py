"""Turns rows into prompts, which have the questions of a run as tokens.

Invariants: prompts have the order of the file; the verifiers receive every column but the prompt itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.data.encode import chat_ids, plain_ids
from megatron_rl.data.rows import FORMS, BadRow, OnBadRow, form_of, load_rows, text_of, turns_of
from megatron_rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_prompts(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    on_bad_row: OnBadRow,
    required_columns: Sequence[str] = (),
) -> tuple[list[Prompt], int]:
    """Read a file whose rows have `messages` or `prompt`. `messages` are chat turns, which the model's chat template
    turns into text up to the point where the answer starts. `prompt` is plain text.

    A row is bad if it is unreadable, has another form, lacks a required column, is longer than `max_prompt_tokens`, or
    is a chat that ends with the assistant's turn.

    Returns:
        The prompts, and the number of skipped rows.

    Raises:
        ValueError: an error of `load_rows`, or there are chats but no chat template.
    """

    def make(uid: str, row: dict[str, Any]) -> Prompt:
        messages = question_of(row, required_columns)
        if isinstance(messages, str):
            ids = plain_ids(tokenizer, messages)
        else:
            ids = chat_ids(tokenizer, messages, add_generation_prompt=True)
        check_length(len(ids), max_prompt_tokens)
        columns = {name: value for name, value in row.items() if name not in FORMS}
        return Prompt(uid, tuple(ids), messages, columns)

    return load_rows(path, make, on_bad_row)


def question_of(row: Mapping[str, Any], required_columns: Sequence[str]) -> str | tuple[dict[str, str], ...]:
    """A row's plain text or chat turns, before tokenization.

    Raises:
        BadRow: the row is bad for a reason that `load_prompts` lists.
    """
    form = form_of(row)
    missing = [name for name in required_columns if row.get(name) is None]
    if missing:
        raise BadRow(f"column `{missing[0]}` is missing; the configured rewards need it")
    if form == "prompt":
        return text_of(row, "prompt")
    turns = turns_of(row)
    if turns[-1]["role"] == "assistant":
        raise BadRow("`messages` ends with the assistant's turn, but the model must write this turn")
    return turns


def check_length(num_tokens: int, max_prompt_tokens: int) -> None:
    if not num_tokens:
        raise BadRow("the prompt has no tokens")
    if num_tokens > max_prompt_tokens:
        raise BadRow(f"the prompt has {num_tokens} tokens, rollout.max_prompt_tokens is {max_prompt_tokens}")
