"""Reads rows of preferences: pairs of answers to a prompt, or single answers with a label.

| columns | what they are |
|---|---|
| `prompt`, `chosen`, `rejected` | a prompt with two answers, as text, or as turns of a chat |
| `chosen`, `rejected` as chats | the prompt is the turns with which both begin; a column `prompt` as text is left out |
| `prompt`, `completion`, `label` | for KTO: an answer, which is liked if `label` is true |

For KTO a pair is two such rows. Further columns, such as `tools`, are the same for both answers. A row of a reward
model may have a number `margin`, and texts without a prompt.

Invariants (tests/unit/data): both answers of a pair have the same prompt; each answer has the tokens of the supervised
row with this prompt and this completion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.preferences import PreferenceLossConfig
from megatron_rl.data.files import load_rows
from megatron_rl.data.rows import BadRow, LongRow, OnBadRow, Row, counted, listed_turns
from megatron_rl.data.scored_texts import with_common_prefix
from megatron_rl.types import Tokens, TrainingRow

Read = Callable[[Row], Tokens]
PAIR = ("chosen", "rejected")
SAME = "`chosen` and `rejected` are the same, so that nothing can be learnt; remove the row"
FARTHEST = 100
"""KTO looks for another prompt among this number of the following rows."""


def load_preferences(
    source: Path | str, read: Read, loss: PreferenceLossConfig, max_tokens: int, on_bad_row: OnBadRow = "fail"
) -> tuple[list[TrainingRow], int]:
    """The rows for a loss, with 0 as log-probs of a reference, and the number of skipped rows. Those of a reward model
    have their margin there.

    Args:
        read: gives the tokens of a supervised row with `prompt` and `completion`.
        max_tokens: the largest length of an answer with its prompt. Longer rows are bad.

    Raises:
        ValueError: an error of `load_rows`, or there are too few rows for KTO.
    """

    def make(uid: str, row: Row) -> list[TrainingRow]:
        answers = [(read(supervised), label) for supervised, label in answers_of(row, loss)]
        if not loss.has_pairs:
            names = [uid] if len(answers) == 1 else [f"{uid}, {column}" for column in PAIR]
            return [
                TrainingRow(name, (one,), (label,), (0.0,)) for name, (one, label) in zip(names, answers, strict=True)
            ]
        (chosen, _), (rejected, _) = answers
        if np.array_equal(chosen.ids, rejected.ids):
            if on_bad_row == "cut" and len(chosen.ids) == max_tokens:
                raise LongRow(f"`chosen` and `rejected` have the same first {max_tokens} tokens")
            raise BadRow(SAME)
        if loss.has_head:
            return [TrainingRow(uid, with_common_prefix(chosen, rejected), (1.0, -1.0), (margin_of(row),) * 2)]
        return [TrainingRow(uid, (chosen, rejected), (1.0, -1.0), (0.0, 0.0))]

    found, skipped = load_rows(source, make, on_bad_row)
    rows = [row for rows in found for row in rows]
    return rows if loss.has_pairs else _with_others(rows, source, max_tokens), skipped


def margin_of(row: Row) -> float:
    """The number in a row's column `margin`; 0 if there is none.

    Raises:
        BadRow: it is no finite number.
    """
    margin = row.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise BadRow(f"`margin` is {margin!r}; it is the number by which the chosen answer's score must be ahead")
    return float(margin)


def answers_of(row: Row, loss: PreferenceLossConfig) -> list[tuple[Row, float]]:
    """The answers of a row as supervised rows with `prompt` and `completion`, and their labels, 1 or -1.

    Raises:
        BadRow: columns are missing, or have a wrong value.
    """
    rest = type(row)({name: value for name, value in row.items() if name not in (*PAIR, "label", "completion")})
    if all(row.get(column) is None for column in PAIR) and not loss.has_pairs:
        label = row.get("label")
        if not isinstance(label, bool) and label is not None:
            raise BadRow(f"`label` is {label!r}; it is true for an answer that is liked, and false for another one")
        if label is None or row.get("completion") is None:
            raise BadRow(
                "a row for kto must have `prompt`, `completion` and `label`, which is true or false, or a pair; this "
                f"row has {_columns(row)}"
            )
        return [(_with(rest, rest.get("prompt"), row["completion"]), 1.0 if label else -1.0)]
    missing = [column for column in PAIR if row.get(column) is None]
    if missing:
        raise BadRow(f"the row has no `{missing[0]}`; a pair has `chosen` and `rejected`, and this row {_columns(row)}")
    rest.pop("messages", None)  # in UltraFeedback's form it is the chosen chat again
    prompt, answers = row.get("prompt"), [row[column] for column in PAIR]
    if answers[0] == answers[1]:
        raise BadRow(SAME)
    for column, answer in zip(PAIR, answers, strict=True):
        if isinstance(answer, str) and not answer and not loss.has_head:
            raise BadRow(f"`{column}` is empty; give an answer, or remove the row")
    chosen, rejected = (listed_turns(answer) for answer in answers)
    if chosen is not None and rejected is not None:
        asked = listed_turns(prompt)
        num_common = _num_common(chosen, rejected) if asked is None else _num_repeated(asked, chosen, rejected)
        if asked is None and not num_common:
            raise BadRow("`chosen` and `rejected` begin with different turns, so they have no prompt in common")
        prompt = asked or chosen[:num_common]
        answers = [chosen[num_common:], rejected[num_common:]]
    elif prompt is None and not loss.has_head:
        raise BadRow(
            "the row has no `prompt`: `chosen` and `rejected` are texts, of which it is not known where the answers "
            "begin; give the prompt in a column of its own"
        )
    return [(_with(rest, prompt, answer), label) for answer, label in zip(answers, (1.0, -1.0), strict=True)]


def _with(rest: Row, prompt: Any, completion: Any) -> Row:
    """A supervised row. An answer as text to a chat is the assistant's turn."""
    if isinstance(completion, str) and listed_turns(prompt) is not None and listed_turns(completion) is None:
        completion = [{"role": "assistant", "content": completion}]
    made = type(rest)(rest)
    made.update(prompt=prompt, completion=completion)
    return made


def _num_common(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """The number of turns with which both chats begin, and after which each has another one."""
    shortest = min(len(chosen), len(rejected)) - 1
    return next((i for i in range(shortest) if chosen[i] != rejected[i]), max(shortest, 0))


def _num_repeated(asked: Sequence[Any], chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """The number of turns of the prompt with which both chats begin again: all of them, or none.

    Raises:
        BadRow: a chat begins with another question.
    """
    size = len(asked)
    if chosen[:size] == rejected[:size] == asked:
        return size
    for column, turns in zip(PAIR, (chosen, rejected), strict=True):
        if isinstance(turns[0], dict) and turns[0].get("role") not in ("assistant", "tool"):
            raise BadRow(
                f"`{column}` begins with a turn of the {turns[0].get('role')}, and `prompt` has other turns; begin it "
                "with the assistant's turn, or with all turns of `prompt`"
            )
    return 0


def _columns(row: Row) -> str:
    return ", ".join(f"`{name}`" for name in sorted(name for name, value in row.items() if value is not None))


def _with_others(rows: Sequence[TrainingRow], source: Path | str, max_tokens: int) -> list[TrainingRow]:
    """KTO's rows, each with its prompt and the answer of the next row that has another prompt, for z."""
    if len(rows) < 2:
        raise ValueError(
            f"{source} has {counted(len(rows), 'row')}, and kto compares each with another one; give two or more"
        )
    prompts = [row.samples[0].ids[: _num_given(row.samples[0])].tobytes() for row in rows]
    found = []
    for i, row in enumerate(rows):
        following = [(i + step) % len(rows) for step in range(1, min(len(rows), FARTHEST))]
        other = next((j for j in following if prompts[j] != prompts[i]), following[0])
        found.append(
            replace(
                row,
                samples=(row.samples[0], _joined(row.samples[0], rows[other].samples[0], max_tokens)),
                labels=(*row.labels, 0.0),
                logp_reference=(0.0, 0.0),
            )
        )
    return found


def _joined(asked: Tokens, answered: Tokens, max_tokens: int) -> Tokens:
    """The prompt of one row with the answer of another one, up to `max_tokens`."""
    before, start = _num_given(asked), _num_given(answered)

    def joined(of_prompt: np.ndarray, of_answer: np.ndarray) -> np.ndarray:
        both: np.ndarray = np.concatenate([of_prompt[:before], of_answer[start:]])
        return both[:max_tokens]

    return Tokens(
        ids=joined(asked.ids, answered.ids),
        action_mask=joined(asked.action_mask, answered.action_mask),
        logp_rollout=joined(asked.logp_rollout, answered.logp_rollout),
        version=joined(asked.version, answered.version),
    )


def _num_given(tokens: Tokens) -> int:
    """The number of tokens before the first action."""
    return int(tokens.action_mask.argmax())
