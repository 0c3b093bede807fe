"""The forms of supervised rows besides ours, each turned into ours.

| form | columns | what it becomes |
|---|---|---|
| language modelling (TRL) | `text` | text whose tokens are all trained |
| ShareGPT | `conversations`, turns with `from` and `value` or with `role` and `content`; `system` | `messages` |
| Alpaca | `instruction`, `input`, `output`; `system`; `history`, pairs of texts | `messages` |

A row with `messages` or `prompt` is in our form, and otherwise in the first of these whose first column has a value:
Alpaca's own data set also has a column `text`.

Invariants (tests/unit/data): a column of a form is used or refused; rows of preferences are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from megatron_rl.data.rows import BadRow, Row, listed_turns

SupervisedForm = Literal["language modelling", "ShareGPT", "Alpaca"]
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's roles, with the names that its later users have added, and ours."""
OTHER_TRAINING = {
    "chosen": "`chosen` and `rejected` make a row of preferences, which `megatron-rl dpo` trains on; to train on the "
    "chosen answers alone, rename `chosen` to `completion` or `messages` and remove `rejected`",
    "input_ids": "`input_ids` are tokens already, but rows are tokenized here, so that the last token is a stop token; "
    "give the text",
}
"""The columns of rows for other kinds of training, and what to do about them."""


def in_our_form(row: Row) -> tuple[Row, SupervisedForm | None]:
    """The row with `messages`, `text`, or `prompt` and `completion`; and its form, if it is none of ours.

    Raises:
        BadRow: a column has a wrong value, or the row is for another kind of training.
    """
    for column, reason in OTHER_TRAINING.items():
        if row.get(column) is not None:
            raise BadRow(reason)
    if isinstance(row.get("label"), bool) and row.get("completion") is not None:
        raise BadRow(
            "`label` says whether a completion is wanted, and `megatron-rl dpo dpo.loss.kind=kto` trains on such rows; "
            "for supervised training keep the rows whose label is true, and remove the column"
        )
    if row.get("messages") is not None or row.get("prompt") is not None:
        return row, None
    if row.get("conversations") is not None:
        return _with_messages(row, "conversations", _system(row) + _share_gpt(row["conversations"])), "ShareGPT"
    if row.get("instruction") is not None:
        return _with_messages(row, "instruction", _system(row) + _alpaca(row)), "Alpaca"
    return row, "language modelling" if row.get("text") is not None else None


def _with_messages(row: Row, column: str, turns: list[dict[str, Any]]) -> Row:
    made = type(row)(row)  # a FilledRow stays one
    made.pop(column)
    made["messages"] = turns
    return made


def _system(row: Row) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}] if (text := _text(row, "system")) else []


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise BadRow(f"`{column}` must be text, but it is {value!r}")
    return value or ""


def _share_gpt(value: Any) -> list[dict[str, Any]]:
    turns = _listed(value)
    if not turns:
        raise BadRow(f"`conversations` must be a list of turns and not empty, but it is {value!r}")
    return [_turn(turn, f"`conversations[{index}]`") for index, turn in enumerate(turns)]


def _listed(value: Any) -> list[Any] | None:
    if isinstance(value, str) and '"from"' in value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return listed_turns(value)


def _turn(turn: Any, place: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping) or turn.get("from") is None:
        return turn if isinstance(turn, dict) else {}  # our form, or an error that names it
    name, text = turn["from"], turn.get("value")
    if name not in ROLES:
        raise BadRow(f"{place} is from {name!r}, which is none of {', '.join(ROLES)}; rename it")
    if not isinstance(text, str):
        raise BadRow(f"{place} must have `value` as text, but it is {text!r}")
    rest = {key: one for key, one in turn.items() if key not in ("from", "value")}
    if name != "function_call":
        return {**rest, "role": ROLES[name], "content": text}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BadRow(f"{place} is a call, but its `value` is not JSON: {error}") from error
    calls = found if isinstance(found, list) else [found]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise BadRow(f"{place} is a call, so that its `value` must be JSON with `name` and `arguments`: {text!r}")
    functions = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
    return {
        **rest,
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function} for function in functions],
    }


def _alpaca(row: Row) -> list[dict[str, Any]]:
    pairs = row.get("history") or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in pairs
    ):
        raise BadRow(f"`history` must be a list of pairs of texts, question and answer, but it is {pairs!r}")
    asked = [text for column in ("instruction", "input") if (text := _text(row, column)).strip()]
    answer = _text(row, "output")
    if not asked or not answer.strip():
        raise BadRow(
            "a row with `instruction` must have `output`, both as text and not empty; `input` may follow the "
            f"instruction, but this row has only {sorted(key for key, value in row.items() if value)}"
        )
    turns = [*pairs, ("\n".join(asked), answer)]
    return [
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
