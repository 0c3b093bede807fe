"""Rows to demonstrations: prompt and completion as tokens, the completion masked as actions.

Invariants: actions are exactly the completion and its end of sequence; the last token is the end of sequence.
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
) -> tuple[list[Tokens], int]:
    """Read a file of `prompt` and `completion` (plain text), or `messages` whose last turn is the
    assistant's.

    The completion ends with one end of sequence, added when the text or the template has none. What a
    template writes after it (a line feed) is left out: the model never samples it. Bad rows: unreadable, of
    another form, longer than `max_tokens`.

    Returns:
        The rows, `logp_rollout` 0 and `version` -1 throughout, and the number of rows skipped.

    Raises:
        ValueError: see `load_rows`; a tokenizer without an end of sequence; a chat and no template.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token: a completion could not end; set it in tokenizer_config.json")

    def make(uid: str, row: dict[str, Any]) -> Tokens:
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
            raise BadRow(f"the row has {length} tokens, sft.max_tokens is {max_tokens}")
        return Tokens(
            ids=np.array(prompt + completion, np.int32),
            action_mask=np.arange(length) >= len(prompt),
            logp_rollout=np.zeros(length, np.float32),
            version=np.full(length, -1, np.int32),
        )

    return load_rows(path, make, on_bad_row)


def demonstration_of(row: Mapping[str, Any]) -> tuple[str, str] | tuple[dict[str, str], ...]:
    """A row's prompt and completion as text, or its chat turns; raises BadRow as `load_supervised` says."""
    if form_of(row) == "prompt":
        return text_of(row, "prompt"), text_of(row, "completion")
    turns = turns_of(row)
    if turns[-1]["role"] != "assistant":
        raise BadRow(f"`messages` must end with the assistant's turn, not the {turns[-1]['role']}'s")
    return turns


def _split_chat(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, str]]) -> tuple[list[int], list[int]]:
    prompt = chat_ids(tokenizer, turns[:-1], add_generation_prompt=True) if turns[:-1] else []
    whole = chat_ids(tokenizer, turns, add_generation_prompt=False)
    if whole[: len(prompt)] != prompt:
        raise BadRow("the chat template writes the earlier turns differently once the answer is there")
    return prompt, whole[len(prompt) :]


def ended(completion: list[int], eos_id: int) -> list[int]:
    """The completion up to its last end of sequence, or with one."""
    if eos_id not in completion:
        return [*completion, eos_id]
    return completion[: len(completion) - completion[::-1].index(eos_id)]
