"""Turns supervised rows into tokens.

Invariants: the actions are exactly the tokens of the trained texts of a row and their stop tokens. The last token is
one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.config.schema import OfflineRunConfig, SftRunConfig
from megatron_rl.data.demonstrations import Demonstration, Template, TrainedTurns, demonstrations_of
from megatron_rl.data.encode import encodable, plain_ids, rendered
from megatron_rl.data.files import load_rows
from megatron_rl.data.preferences import load_preferences
from megatron_rl.data.rows import LongRow, OnBadRow, Row
from megatron_rl.data.scored_texts import scored_reader
from megatron_rl.data.tokenizer import end_texts, padding_id
from megatron_rl.types import Tokens, TrainingRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_supervised(
    source: Path | str,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    on_bad_row: OnBadRow = "fail",
    ends: tuple[str, ...] = (),
    turns: TrainedTurns = "all",
) -> tuple[list[tuple[str, tuple[Tokens, ...]]], int]:
    """Read rows that have `messages` whose last turn is the assistant's, or `prompt` and `completion`, or another
    form of `supervised_forms.py`. `prompt` and `completion` are plain text, or chat turns as in TRL.

    A trained text ends with a stop token, which is added if the text or the chat template has none. What a template
    writes after this token (a line feed) is left out, because the model never samples it. A row is bad if it is
    unreadable, has another form, or is longer than `max_tokens` and is not cut; if the chat template does not write all
    of an answer; or if it writes an answer that is trained differently when the model would sample it.

    Args:
        ends: the texts of the model's stop tokens; the tokenizer's end-of-sequence token is always one.
        turns: which of a chat's turns of the assistant are trained. Of `prompt` and `completion`, only the latter's
            are.

    Returns:
        The rows, each as its name (`rows.jsonl:17`) and its texts, usually one, as tokens with `logp_rollout` 0 and
        `version` -1 everywhere; and the number of skipped rows.

    Raises:
        ValueError: an error of `load_rows`, or the tokenizer has no end-of-sequence token, or there are chats but no
            chat template.
    """
    read = demonstration_reader(tokenizer, max_tokens, ends, turns, is_cut=on_bad_row == "cut")
    return load_rows(source, lambda uid, row: (uid, read(row)), on_bad_row)


def demonstration_reader(
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    ends: tuple[str, ...],
    turns: TrainedTurns = "all",
    section: str = "sft",
    is_cut: bool = False,
) -> Callable[[Row], tuple[Tokens, ...]]:
    """A function that gives the tokens of a row's texts; see `load_supervised` for what it takes and raises.

    Args:
        section: the section of the configuration that has `max_tokens`. A row of preferences is always one text.
        is_cut: whether a row that is too long ends with the last action among its first `max_tokens` tokens.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no eos_token, so a completion could not end; set it in tokenizer_config.json"
        )
    eos_id, ends = tokenizer.eos_token_id, tuple(dict.fromkeys((str(tokenizer.eos_token), *ends)))
    template = Template(partial(rendered, tokenizer), ends, turns, section == "sft")

    def read(row: Row) -> tuple[Tokens, ...]:
        made = [ids_of(one, partial(plain_ids, tokenizer), eos_id) for one in demonstrations_of(row, template)]
        if is_cut:
            made = [_cut(*one, max_tokens) for one in made if any(one[1][:max_tokens])] or made
        for ids, _ in made:
            check_length(len(ids), max_tokens, section)
        return tuple(
            Tokens(
                ids=np.array(ids, np.int32),
                action_mask=np.array(mask, bool),
                logp_rollout=np.zeros(len(ids), np.float32),
                version=np.full(len(ids), -1, np.int32),
            )
            for ids, mask in made
        )

    return read


def _cut(ids: list[int], mask: list[bool], max_tokens: int) -> tuple[list[int], list[bool]]:
    """The tokens up to the last action among the first `max_tokens`."""
    end = min(max_tokens, len(ids))
    end -= mask[:end][::-1].index(True)
    return ids[:end], mask[:end]


def load_training_rows(
    config: OfflineRunConfig, source: Path | str, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[TrainingRow], int]:
    """The rows of a run without engines, and the number of skipped rows.

    Raises:
        ValueError: see `load_supervised`.
    """
    token: Callable[[int], str | None] = tokenizer.convert_ids_to_tokens  # type: ignore[assignment]  # one for one
    ends = end_texts(config.model.path, token, partial(plain_ids, tokenizer))
    offline = config.offline
    if loss := config.preferences:
        longest, on_bad_row = offline.max_tokens, offline.on_bad_row
        if loss.has_head:
            scored = scored_reader(tokenizer, padding_id(config.model.path), longest)
            return load_preferences(source, scored, loss, longest, on_bad_row)
        read = demonstration_reader(tokenizer, longest, ends, section=config.section, is_cut=on_bad_row == "cut")
        return load_preferences(source, lambda row: read(row)[0], loss, longest, on_bad_row)
    assert isinstance(config, SftRunConfig)
    rows, skipped = load_supervised(source, tokenizer, offline.max_tokens, offline.on_bad_row, ends, config.sft.turns)
    return [TrainingRow(uid, samples, (0.0,) * len(samples)) for uid, samples in rows], skipped


def ids_of(
    demonstration: Demonstration, encode: Callable[[str], list[int]], eos_id: int
) -> tuple[list[int], list[bool]]:
    """The tokens of a row, and which of them are actions.

    Args:
        encode: gives the tokens of a text, without special tokens that it does not have.
    """
    ids: list[int] = []
    mask: list[bool] = []
    for given, trained in demonstration.parts:
        before = encode(encodable(given))
        after = None
        if demonstration.is_chat:
            both = encode(given + trained)
            # White space at the beginning of an answer may be merged into the prompt's last token, which no answer can
            # change: the answer is then read alone.
            after = both[len(before) :] if both[: len(before)] == before else None
        if after is None:
            after = encode(encodable(trained))
        ids += before + after
        mask += [False] * len(before) + [True] * len(after)
    if not demonstration.is_ended:
        ids.append(eos_id)
        mask.append(True)
    mask[0] = False  # nothing is before the first token of a text, so that no model predicts it
    return ids, mask


def check_length(num_tokens: int, max_tokens: int, section: str) -> None:
    if num_tokens > max_tokens:
        raise LongRow(f"the row has {num_tokens} tokens, but {section}.max_tokens is {max_tokens}")
