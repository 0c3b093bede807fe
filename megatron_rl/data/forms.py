"""The forms of rows that are known, and what a row of each form means.

| form | question | ground truth and data set |
|---|---|---|
| messages (ours, open-instruct's) | `messages`, chat turns | `ground_truth`, `dataset`, each one value or a list |
| text (ours, TRL's) | `prompt`, text | any columns |
| TRL | `prompt`, chat turns | any columns |
| verl | `prompt`, chat turns | `reward_model.ground_truth`, `data_source` |

Supervised rows may have further forms, see `supervised_forms.py`.

TRL's columns `tools` and `chat_template_kwargs` are arguments of the chat template in every form with chat turns. The
forms are documented in TRL's docs/dataset_formats, in verl's docs/preparation, and by the data sets of open-instruct.
Chat turns may be a text of JSON.

`data.columns` maps our names to the row's names, and overrides the forms. A column with the value None counts as
absent when a form is recognised, because Parquet and Arrow give all rows of a file the same columns.

Invariants (tests/unit/data): a row has exactly one form, and the run and the preflight recognise it with the same
function. A row of no form is refused with the columns that it has. A verifier receives every column but the question's,
with the ground truth in `ground_truth` and the data set in `dataset`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_rl.data.row_images import COLUMNS as IMAGES
from megatron_rl.data.rows import (
    BadRow,
    FilledRow,
    Row,
    Turns,
    listed_turns,
    text_of,
    turns_of,
    without_none,
    without_none_outside,
)
from megatron_rl.data.supervised_forms import SupervisedForm, in_our_form

Form = Literal["messages", "text", "TRL", "verl"] | SupervisedForm
QUESTIONS = ("messages", "prompt")
"""Alternative columns: a row has exactly one of them."""
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
"""The columns with a row's arguments for the chat template."""
RESERVED = frozenset({"conversation", "messages", "add_generation_prompt", "tokenize", "return_dict"})
"""The arguments of the chat template that no row can choose."""
DESCRIPTIONS: dict[Form, str] = {
    "messages": "our form: `messages` (chat turns)",
    "text": "our form: `prompt` (text)",
    "TRL": "TRL's form: `prompt` (chat turns)",
    "verl": "verl's form: `prompt` (chat turns), `reward_model.ground_truth` is the `ground_truth`, and `data_source` "
    "the `dataset`",
    "language modelling": "TRL's form for language modelling: `text`, all of which is trained",
    "ShareGPT": "ShareGPT's form: `conversations`",
    "Alpaca": "Alpaca's form: `instruction`, `input` and `output`",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """How the rows of a run are read: keys of the section `data` of its configuration."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Our names of columns, and the row's names for them."""
    system_prompt: str | None = None
    """The system turn of chats that have none."""
    chat_template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template. A row's own arguments override them."""
    dataset: str | None = None
    """The data set of rows that name none: the name of their source in a mixture."""
    rated: bool = False
    """Whether each row must have a `pass_rate`."""
    in_turns: bool = False
    """Whether answers have several turns (`rollout.environment`), so that rows must be chats, and have no arguments of
    the chat template of their own."""

    sees_images: bool = False
    """Whether the turns may have images (`row_images.py`)."""
    is_supervised: bool = False
    """Whether rows have answers to train on, so that they may have the forms of `supervised_forms.py`."""


WRITTEN_TURNS = re.compile(r"""\s*\[*\s*\{\s*["'](role|from|messages|conversations)["']\s*:""")
"""The beginning of chat turns that were written as text, by Python or in a form that is not read."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a row asks."""

    form: Form
    messages: str | Turns
    """Plain text, or chat turns."""
    columns: Row
    """All other columns, and the columns that `data.columns` or the form adds."""
    template: Row
    """The arguments of the chat template, besides the turns."""


def recognise(row: Mapping[str, Any], reading: Reading) -> Question:
    """Find the form of a row, and take the row apart.

    Raises:
        BadRow: the row has no known form, or a column of its form has a wrong value, or the row is plain text although
            the run has a system prompt or arguments for the chat template.
    """
    columns = reading.columns
    supervised: SupervisedForm | None = None
    renamed = FilledRow(row) if isinstance(row, FilledRow) else dict(row)
    for name, source in columns.items():
        renamed[name] = _value(row, name, source)
    if reading.is_supervised:
        renamed, supervised = in_our_form(renamed)
    if supervised == "language modelling":
        return Question(supervised, text_of(renamed, "text"), renamed, {})
    question = _question_column(renamed, reading)
    value = renamed[question]
    taken = {question, *(columns[name] for name in (question, *IMAGES) if name in columns)}
    rest = {name: one for name, one in renamed.items() if name not in taken}
    if question == "prompt" and not _are_turns(value):
        text = text_of(renamed, "prompt")
        if WRITTEN_TURNS.match(text):
            raise BadRow(
                f"`prompt` is a text that looks like chat turns, {text[:40]!r}..., but it is no JSON list of mappings "
                f"with `role` and `content`; store the turns as a list, or as such JSON"
            )
        if not reading.in_turns and (reading.system_prompt or reading.chat_template):
            raise BadRow(
                f"data.system_prompt and data.chat_template belong to chats, but this row's `prompt` is plain text; "
                f"set data.columns={{messages: {columns.get('prompt', 'prompt')}}} to make it a turn of the user"
            )
        if reading.in_turns:
            raise BadRow(
                f"with rollout.environment an answer goes on by the chat template, but this row's `prompt` is plain "
                f"text; set data.columns={{messages: {columns.get('prompt', 'prompt')}}} to make it a turn of the user"
            )
        return Question("text", text, _in_dataset(rest, reading), {})
    form: Form = supervised or ("messages" if question == "messages" else "TRL")
    if question == "messages" and question in columns and isinstance(value, str) and not _are_turns(value):
        turns: Turns = ({"role": "user", "content": text_of(renamed, "messages")},)
    else:
        turns = turns_of(renamed, question, reading.sees_images)
    if reading.system_prompt and all(turn["role"] != "system" for turn in turns):
        turns = ({"role": "system", "content": reading.system_prompt}, *turns)
    own = next((name for name in TEMPLATE_COLUMNS if rest.get(name)), None)
    if reading.in_turns and own is not None:
        raise BadRow(
            f"`{own}` gives this row arguments of the chat template, but with rollout.environment all rows have those "
            f"of the run; remove the column, or set data.chat_template"
        )
    reward_model = rest.get("reward_model")
    if form == "TRL" and isinstance(reward_model, dict) and rest.get("data_source") is not None:
        form = "verl"
        for name, given in (("ground_truth", reward_model.get("ground_truth")), ("dataset", rest["data_source"])):
            if rest.get(name) is None:
                rest[name] = given
    template = _template_arguments(rest, reading.chat_template, isinstance(row, FilledRow))
    return Question(form, turns, _in_dataset(rest, reading), template)


def _in_dataset(columns: Row, reading: Reading) -> Row:
    """The columns, with the name of the source in `dataset` if they name no data set."""
    if reading.dataset is None or columns.get("dataset") is not None:
        return columns
    return columns | {"dataset": reading.dataset}


def _question_column(row: Mapping[str, Any], reading: Reading) -> str:
    """The column with the question. One that `data.columns` names wins over one that the row has by chance."""
    columns = reading.columns
    candidates = [name for name in QUESTIONS if name in columns] or [name for name in QUESTIONS if name in row]
    present = [name for name in candidates if row[name] is not None]
    if len(present) == 1 or not present and candidates:
        return (present or candidates)[0]
    if reading.is_supervised:
        raise BadRow(
            "a supervised row must have one of `messages`, `prompt` with `completion`, `text`, `conversations` and "
            f"`instruction` with `output`, but this one has {'both' if present else f'only {sorted(row)}'}; rename its "
            "columns"
        )
    hint = "messages: messages" if present else "messages: question"
    raise BadRow(
        f"a row must have either `messages` (chat turns) or `prompt` (text, or chat turns as TRL and verl have them), "
        f"but this one has {'both' if present else f'only {sorted(row)}'}; set data.columns, for example "
        f"data.columns={{{hint}}}"
    )


def _are_turns(value: Any) -> bool:
    return any(isinstance(turn, dict) for turn in listed_turns(value) or ())


def _value(row: Mapping[str, Any], name: str, source: str) -> Any:
    """The value of the column `source`, or of a key inside it if there is a dot: `extra_info.answer`."""
    if source in row:
        return row[source]
    value: Any = row
    for key in source.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise BadRow(f"data.columns takes `{name}` from `{source}`, but this row has only {sorted(row)}")
        value = value[key]
    return value


def _template_arguments(columns: Mapping[str, Any], of_run: Mapping[str, Any], is_filled: bool) -> Row:
    """
    Args:
        is_filled: whether a library may have filled in None.
    """
    arguments = dict(of_run)
    tools, more = columns.get("tools"), columns.get("chat_template_kwargs")
    if tools:
        arguments["tools"] = _cleared(tools, _parsed(tools, "tools", list), is_filled)
    if more:
        arguments |= _cleared(more, _parsed(more, "chat_template_kwargs", dict), is_filled)
    if reserved := RESERVED & arguments.keys():
        raise BadRow(
            f"`chat_template_kwargs` and data.chat_template must not hold {sorted(reserved)}, which the run decides; "
            f"remove it"
        )
    return arguments


def _cleared(given: Any, parsed: Any, is_filled: bool) -> Any:
    """An argument of the chat template without the None that nobody has written. No library fills in what is JSON."""
    return without_none(parsed) if is_filled and not isinstance(given, str) else without_none_outside(parsed)


def _parsed(value: Any, column: str, kind: type) -> Any:
    """The value of a column that is a list or a mapping, or its JSON text, which Parquet files can store."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRow(f"`{column}` is an argument of the chat template, but it is not JSON: {error}") from error
    if not isinstance(value, kind):
        expected = "a list of JSON schemas" if kind is list else "a mapping"
        raise BadRow(f"`{column}` is an argument of the chat template and must be {expected}, but it is {value!r}")
    return value
