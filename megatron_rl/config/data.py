"""The section `data`: the rows of a run, and how they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    FiniteFloat,
    NonNegativeInt,
    PlainValidator,
    PositiveInt,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from megatron_rl.config.package_files import find_shipped
from megatron_rl.config.section import Section

HUB = re.compile(r"hf://(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<configuration>[^/:\s]+))?(?::(?P<split>\S+))?")


def name_on_hub(value: str) -> tuple[str, str | None, str]:
    """The name, the configuration and the split of a data set of the hub.

    >>> name_on_hub("hf://openai/gsm8k/main:test")
    ('openai/gsm8k', 'main', 'test')

    Raises:
        ValueError: it is no such name.
    """
    if not (match := HUB.fullmatch(value)):
        raise ValueError(f"must read hf://owner/name:split or hf://owner/name/configuration:split, but it is {value!r}")
    return match["name"], match["configuration"], match["split"] or "train"


def _source_of_rows(value: Any) -> Path | str:
    if not isinstance(value, str | Path):
        raise ValueError(f"must be the path of a file or folder, or hf://owner/name:split, but it is {value!r}")
    if str(value).startswith("hf:"):
        name_on_hub(str(value))
        return str(value)
    return find_shipped(Path(value))


Rows = Annotated[Path | str, PlainValidator(_source_of_rows)]
"""Rows as a file of JSON lines, JSON, Parquet or Arrow, as a folder of such files, or as a data set of the Hugging Face
hub, which stays text. A path begins at the working folder, or is one of the files that ship with the package."""


class _Questions(Section):
    """How the questions of rows are read."""

    @field_validator("columns", check_fields=False)
    @classmethod
    def _one_question(cls, columns: Mapping[str, str] | None) -> Mapping[str, str] | None:
        if {"messages", "prompt"} <= (columns or {}).keys():
            raise ValueError("gives both `messages` and `prompt`, and a row has one question; remove one of them")
        return columns


class SourceConfig(_Questions):
    """One source of a mixture, which has either a `weight` or a `count`."""

    path: Rows
    """The rows, as `data.train` has them if it is no list."""
    weight: Annotated[FiniteFloat, Field(gt=0)] | None = None
    """The source's share of the prompts, in relation to the weights of the other sources."""
    count: PositiveInt | None = None
    """The number of prompts of this source among as many prompts as the sum of all counts."""
    name: str | None = None
    """The source's name, which must be unique. It is the column `dataset` of rows that have none. null means the name
    of the file or folder without its suffix, or the name of the data set on the hub."""
    columns: Mapping[str, str] | None = None
    """The columns of this source, in place of `data.columns`; null means `data.columns`."""
    system_prompt: str | None = None
    """The system turn of this source, in place of `data.system_prompt`; null means `data.system_prompt`."""
    chat_template: Mapping[str, Any] | None = None
    """The arguments of the chat template for this source, in place of `data.chat_template`; null means
    `data.chat_template`."""

    @property
    def label(self) -> str:
        if self.name is not None or isinstance(self.path, Path):
            return self.name or Path(self.path).stem
        return self.path.removeprefix("hf://").partition(":")[0]

    @model_validator(mode="after")
    def _one_share(self) -> Self:
        if (self.weight is None) == (self.count is None):
            raise ValueError(f"the source {self.label} must have either `weight` or `count`; give one of them")
        return self


SOURCES = TypeAdapter(tuple[SourceConfig, ...])


def _training_rows(value: Any, _: ValidatorFunctionWrapHandler) -> Path | str | tuple[SourceConfig, ...]:
    """Chooses the kind by the value, so that an error is about this kind alone."""
    if not isinstance(value, list | tuple):
        return _source_of_rows(value)
    if not value:
        raise ValueError("the list has no source; give one or more")
    sources = SOURCES.validate_python(value)
    labels = [source.label for source in sources]
    if len(set(labels)) < len(labels):
        raise ValueError(f"the names {labels} of the sources are not distinct; give each source its own `name`")
    if len({source.weight is None for source in sources}) > 1:
        raise ValueError("some sources have a `weight` and others a `count`; give all of them the same key")
    return sources


class DataConfig(_Questions):
    train: Annotated[Path | str | tuple[SourceConfig, ...], WrapValidator(_training_rows)]
    """The training rows: a file of JSON lines, JSON, Parquet or Arrow, a folder of such files, or
    `hf://owner/name:split`. A row has `messages` (chat turns) or `prompt` (text, or chat turns as in TRL and verl), and
    any other columns, such as `ground_truth`, which the rewards receive. A list is a mixture: `[{path: gsm8k.jsonl,
    weight: 0.7}, {path: code.jsonl, weight: 0.3}]`."""
    eval: Rows | None = None
    """The held-out rows for evaluations, in the same form; null means that nothing is evaluated."""
    columns: Mapping[str, str] = {}
    """The rows' names for our columns: `{messages: conversation, ground_truth: answer, dataset: source}`. A dot selects
    an entry of a mapping: `{ground_truth: extra_info.answer}`. If the column for `messages` is text, it becomes one
    turn of the user; `prompt` stays text without the chat template."""
    system_prompt: str | None = None
    """The system turn of chats that have none; null adds nothing."""
    chat_template: Mapping[str, Any] = {}
    """Arguments of the model's chat template, such as `{enable_thinking: false}`. A row's own arguments, in its column
    `chat_template_kwargs`, override them."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """What happens to an unreadable row and to a prompt that is too long. `fail` stops the run and names file and line;
    `skip` leaves the row out and counts it."""
    shuffle: bool = True
    """Whether each epoch of a source has an order of its own. false takes the rows as they are."""
    easy_first_epochs: NonNegativeInt = 0
    """The number of first epochs of each source that take its prompts by falling `pass_rate`, a column from 0 to 1 that
    `megatron-rl filter-difficulty` writes; every row then needs it. Prompts with the same rate, and later epochs, are
    shuffled; 0 shuffles all."""
    deduplicate: bool = False
    """Whether rows of a source that repeat an earlier row's question (as tokens) and all its other columns are removed.
    Columns that only name a row, such as `id` and `question_id`, and `pass_rate` may differ. Questions with several
    ground truths are kept and counted."""
    cache: Path | None = None
    """The folder that keeps the tokenized rows of files for the next start; null keeps nothing. Files in it are added
    and never removed."""
