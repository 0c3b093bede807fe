"""Turns supervised rows into tokens, with the completion as actions.

Invariants: the actions are exactly the tokens of the completion and its end-of-sequence token, which is the last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.data.encode import chat_text, plain_ids
from megatron_rl.data.files import load_rows
from megatron_rl.data.forms import Reading, recognise
from megatron_rl.data.rows import BadRow, LongRow, OnBadRow, Row, Turns, text_of, turns_of
from megatron_rl.types import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_supervised(
    source: Path | str, tokenizer: PreTrainedTokenizerBase, max_tokens: int, on_bad_row: OnBadRow = "fail"
) -> tuple[list[tuple[str, Tokens]], int]:
    """Read rows that have `messages` whose last turn is the assistant's, or `prompt` and `completion`. These two are
    plain text, or chat turns as in TRL; the completion is then one turn of the assistant.

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
        demonstration, template = demonstration_of(row)
        if isinstance(demonstration[0], str):
            prompt, completion = (plain_ids(tokenizer, text) for text in demonstration)
        else:
            prompt, completion = _split_chat(tokenizer, demonstration, template)
        if not prompt:
            raise BadRow("the prompt has no tokens")
        completion = ended(completion, tokenizer.eos_token_id)
        length = len(prompt) + len(completion)
        if length > max_tokens:
            raise LongRow(f"the row has {length} tokens, but sft.max_tokens is {max_tokens}")
        return uid, Tokens(
            ids=np.array(prompt + completion, np.int32),
            action_mask=np.arange(length) >= len(prompt),
            logp_rollout=np.zeros(length, np.float32),
            version=np.full(length, -1, np.int32),
        )

    return load_rows(source, make, on_bad_row)


def demonstration_of(row: Mapping[str, Any]) -> tuple[tuple[str, str] | Turns, Row]:
    """A row's prompt and completion as text, or its chat turns; and the arguments of the chat template.

    Raises:
        BadRow: the row is bad for a reason that `load_supervised` lists.
    """
    question = recognise(row, Reading())
    turns = question.messages
    if isinstance(turns, str):
        return (turns, text_of(row, "completion")), question.template
    if question.form != "messages":
        completion = turns_of(row, "completion")
        if len(completion) != 1:
            raise BadRow(f"`completion` must be one turn of the role assistant, but it has {len(completion)} turns")
        turns += completion
    if turns[-1]["role"] != "assistant":
        column = "messages" if question.form == "messages" else "completion"
        raise BadRow(f"`{column}` must end with a turn of the role assistant, not {turns[-1]['role']}")
    return turns, question.template


def _split_chat(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, Any]], template: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    before = chat_text(tokenizer, turns[:-1], add_generation_prompt=True, arguments=template) if turns[:-1] else ""
    text = chat_text(tokenizer, turns, add_generation_prompt=False, arguments=template)
    if not text.startswith(before):
        raise BadRow("the chat template writes the earlier turns differently once the answer is there")
    prompt, whole = plain_ids(tokenizer, before), plain_ids(tokenizer, text)
    if whole[: len(prompt)] == prompt:
        return prompt, whole[len(prompt) :]
    # White space at the beginning of the answer is merged into the prompt's last token, which no answer can change.
    return prompt, plain_ids(tokenizer, text.removeprefix(before))


def ended(completion: list[int], eos_id: int) -> list[int]:
    """The completion up to its last end-of-sequence token; if it has none, the completion with one added."""
    if eos_id not in completion:
        return [*completion, eos_id]
    return completion[: len(completion) - completion[::-1].index(eos_id)]
