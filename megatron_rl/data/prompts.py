"""Turns rows into prompts, which have the questions of a run as tokens.

Invariants: prompts have the order of the rows; the verifiers receive every column but the question's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.data.encode import chat_ids, plain_ids
from megatron_rl.data.files import load_rows
from megatron_rl.data.forms import Question, Reading, recognise
from megatron_rl.data.rows import BadRow, OnBadRow
from megatron_rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AS_IT_IS = Reading()
"""Rows whose columns have the names of their form, and chats without further turns and arguments."""


def load_prompts(
    source: Path | str,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    on_bad_row: OnBadRow,
    required_columns: Sequence[str] = (),
    reading: Reading = AS_IT_IS,
) -> tuple[list[Prompt], int]:
    """Read rows of any form in `forms.py`. Chat turns are turned into text by the model's chat template, up to the
    point where the answer starts; plain text stays as it is.

    A row is bad if it is unreadable, has no known form, lacks a required column, is longer than `max_prompt_tokens`, or
    is a chat that ends with the assistant's turn.

    Args:
        source: a file, a folder, or a name of the hub; see `files.py`.
        reading: keys of the section `data`, which say how a row is taken apart.

    Returns:
        The prompts, and the number of skipped rows.

    Raises:
        ValueError: an error of `load_rows`, or there are chats but no chat template.
    """

    def make(uid: str, row: dict[str, Any]) -> Prompt:
        question = question_of(row, required_columns, reading)
        messages = question.messages
        if isinstance(messages, str):
            ids = plain_ids(tokenizer, messages)
        else:
            ids = chat_ids(tokenizer, messages, add_generation_prompt=True, arguments=question.template)
        check_length(len(ids), max_prompt_tokens)
        return Prompt(uid, tuple(ids), messages, question.columns)

    return load_rows(source, make, on_bad_row)


def question_of(row: Mapping[str, Any], required_columns: Sequence[str], reading: Reading) -> Question:
    """A row's question before tokenization, and its other columns.

    Raises:
        BadRow: the row is bad for a reason that `load_prompts` lists.
    """
    question = recognise(row, reading)
    missing = [name for name in required_columns if question.columns.get(name) is None]
    if missing:
        raise BadRow(
            f"column `{missing[0]}` is missing; the configured rewards need it, and the row has {sorted(row)}; if one "
            f"of these is meant, set data.columns={{{missing[0]}: NAME}}"
        )
    if not isinstance(question.messages, str) and question.messages[-1]["role"] == "assistant":
        raise BadRow("`messages` ends with the assistant's turn, but the model must write this turn; remove it")
    return question


def check_length(num_tokens: int, max_prompt_tokens: int) -> None:
    if not num_tokens:
        raise BadRow("the prompt has no tokens")
    if num_tokens > max_prompt_tokens:
        raise BadRow(f"the prompt has {num_tokens} tokens, rollout.max_prompt_tokens is {max_prompt_tokens}")
