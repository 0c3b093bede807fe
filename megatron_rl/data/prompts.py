"""Turns rows into prompts, which have the questions of a run as tokens.

Rows are read, rendered and tokenized some at a time, and each prompt is stored as bytes (`prompt_table.py`), so that
neither the rows nor the prompts are Python objects all at once.

Invariants (tests/unit/data): prompts have the order of the rows; the verifiers receive every column but the question's;
every row is a prompt, or it is counted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_rl.config.environment import ObjectColumns
from megatron_rl.config.machine import num_cores
from megatron_rl.config.prefix_values import PrefixValues
from megatron_rl.config.thinking import ColumnBudget
from megatron_rl.data.cache import Tell, keep, tokenizer_digests
from megatron_rl.data.encode import batch_ids, chat_text, encodable
from megatron_rl.data.files import BadRows, ReadRow, good_row, read_rows
from megatron_rl.data.forms import TEMPLATE_COLUMNS, Question, Reading, recognise
from megatron_rl.data.pictures import Pictures, pictures_of
from megatron_rl.data.prompt_table import PromptTable, Tally
from megatron_rl.data.row_images import COLUMNS, MARK, VIDEOS, each, expanded, folder_of, require_no_places, take_images
from megatron_rl.data.rows import BadRow, LongRow, OnBadRow, Row, turns_of, without_none
from megatron_rl.data.stream import RowsDigest
from megatron_rl.types import Picture, Prompt, Vision

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
U = TypeVar("U")
BATCH_ROWS = 1024
"""The number of rows that are tokenized at a time."""
AS_IT_IS = Reading()
"""Rows whose columns have the names of their form, and chats without further turns and arguments."""


@dataclass(frozen=True, slots=True)
class ImageRules:
    vision: Vision
    model: Path
    """The folder with the model's `preprocessor_config.json`."""
    folder: Path
    """Keeps the images (`pictures.py`)."""

    def take(self, question: Question, place: str, keep: bool = True) -> tuple[Question, tuple[Picture, ...]]:
        """The question of a row without the bytes of its images, and these, resized and kept.

        Args:
            keep: False: the images are read, and nothing is kept of them but their extents.

        Raises:
            BadRow: see `take_images`; or an image is broken, or has extents that the model's processor refuses.
        """
        question, images = _taken(question, folder_of(place))
        return question, tuple(each(self.pictures.add if keep else self.pictures.extents, images))

    def observed(self, message: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Picture, ...]]:
        """The same of a turn that an environment gives. A path is absolute, or beside the process's working folder.

        Raises:
            BadRow: see `take`; or a part is neither text nor an image.
        """
        [turn], images, _ = take_images(turns_of({"messages": [message]}, sees_images=True), None, Path())
        return turn, tuple(each(self.pictures.add, images))

    @property
    def pictures(self) -> Pictures:
        return pictures_of(self.model, self.folder)


def _taken(question: Question, folder: Path) -> tuple[Question, dict[str, bytes]]:
    if isinstance(question.messages, str):
        if named := [name for name in (*COLUMNS, *VIDEOS) if question.columns.get(name)]:
            raise BadRow(
                f"the prompt is a plain text, in which no image has a place, but the column `{named[0]}` is filled; "
                f"write the prompt as chat turns, with {MARK} where an image is"
            )
        return question, {}
    turns, images, columns = take_images(question.messages, question.columns, folder)
    return replace(question, messages=turns, columns=columns), images


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules by which rows become prompts."""

    max_prompt_tokens: int
    """A row with more tokens is bad."""
    on_bad_row: OnBadRow = "fail"
    required_columns: tuple[str, ...] = ()
    """The columns that every row must have."""
    thought_column: ColumnBudget | None = None
    """The column with the thinking budget, which every row must have."""
    prefix_values: PrefixValues | None = None
    """The section that says which right answers a row may have."""
    objects: ObjectColumns | None = None
    """What objects whose methods are tools need of a row."""
    images: ImageRules | None = None
    """How the images of rows are read; None if the model reads text alone."""
    deduplicate: bool = False
    """Whether of rows with the same question, as tokens, and the same columns for the rewards only the first is kept.
    Columns that only name a row, and `pass_rate`, may differ."""


def load_prompts(
    source: Path | str,
    tokenizer: PreTrainedTokenizerBase,
    rules: Rules,
    reading: Reading = AS_IT_IS,
    cache: Path | None = None,
    tell: Tell = print,
) -> PromptTable:
    """Read rows of any form in `forms.py`. Chat turns are turned into text by the model's chat template, up to the
    point where the answer starts; plain text stays as it is.

    A row is bad if it is unreadable, has no known form, lacks a required column or its thinking budget, is longer than
    `max_prompt_tokens`, or is a chat that ends with the assistant's turn.

    Args:
        source: a file, a folder, or a name of the hub; see `files.py`.
        reading: keys of the section `data`, which say how a row is taken apart.
        cache: the folder that keeps prompts for the next start; None keeps nothing.
        tell: is called with a sentence if the cache cannot be used.

    Raises:
        ValueError: a row is bad and `on_bad_row` is `fail`, or no row is good, or an error of `read_rows`, or there are
            chats but no chat template, or the source changed while it was read.
        FileNotFoundError: the file does not exist.
    """

    def read(tally: Tally) -> Iterator[Prompt]:
        return _prompts(source, tokenizer, rules, reading, tally)

    if cache is not None and not isinstance(source, Path):
        tell(f"the prompts of {source} are not kept in {cache}, because a name of the hub may get other rows")
    if cache is not None and rules.images is not None:
        tell(f"the prompts of {source} are not kept in {cache}, because they depend on images, which may change")
        cache = None
    if cache is None or not isinstance(source, Path):
        return PromptTable.of(read)
    return keep(cache, source, [asdict(rules), asdict(reading), tokenizer_digests(tokenizer)], read, tell)


def _prompts(
    source: Path | str, tokenizer: PreTrainedTokenizerBase, rules: Rules, reading: Reading, tally: Tally
) -> Iterator[Prompt]:
    """The prompts of a source. When the last one is there, the tally is complete."""
    bad, digest, known = BadRows(rules.on_bad_row), RowsDigest(), _Known()

    images = rules.images
    reading = replace(reading, sees_images=images is not None)

    def prepared(read: ReadRow) -> tuple[Question, tuple[Picture, ...]] | BadRow:
        try:
            question = question_of(good_row(read), rules.required_columns, reading)
            check_columns(question.columns, rules.thought_column, rules.prefix_values, rules.objects)
            return images.take(question, read.place) if images is not None else (question, ())
        except BadRow as error:
            return error

    def questions() -> Iterator[tuple[ReadRow, Question, str, tuple[Picture, ...]]]:
        rows = read_rows(source)
        for read, found in (
            _in_threads(prepared, rows) if images is not None else ((one, prepared(one)) for one in rows)
        ):
            tally.num_rows += 1
            try:
                if isinstance(found, BadRow):
                    raise found
                question, pictures = found
                messages = question.messages
                if not isinstance(messages, str):
                    messages = chat_text(tokenizer, messages, add_generation_prompt=True, arguments=question.template)
                yield read, question, encodable(messages), pictures
            except BadRow as error:
                bad.add(read, error)

    num_kept = 0
    for some in _batches(questions(), BATCH_ROWS):
        texts = [text for *_, text, _ in some]
        for (read, question, _, pictures), ids in zip(some, batch_ids(tokenizer, texts), strict=True):
            try:
                if images is not None:
                    ids = expanded(ids, pictures, images.vision)
                check_length(len(ids), rules.max_prompt_tokens)
            except BadRow as error:
                bad.add(read, error)
                continue
            shown = {"": [picture.digest for picture in pictures]} if pictures else {}
            if rules.deduplicate and not known.adds(ids, question.columns | shown):
                tally.num_duplicates += 1
                continue
            uid = read.uid if reading.dataset is None else f"{reading.dataset}/{read.uid}"
            digest.add(uid, ids, question.columns["pass_rate"] if reading.rated else None, pictures)
            num_kept += 1
            yield Prompt(uid, tuple(ids), question.messages, question.columns, pictures=pictures)
    bad.require_good(num_kept, source)
    tally.skipped, tally.first_skipped = dict(bad.counts), bad.first
    tally.num_ambiguous, tally.digest = known.num_ambiguous, str(digest)


NAMES_OF_ROWS = re.compile(
    r"_?(?:id|uid|uuid|guid|idx|index|qid|pid)"
    r"|(?:row|example|sample|item|instance|question|query|problem|prompt|task|conversation|data|doc|document|unique)_?"
    r"(?:id|uid|uuid|idx|index)|__index_level_\d+__|Unnamed: \d+",
    re.IGNORECASE,
)
"""The columns that only name or number a row. `answer_idx` and `label_id` are no such columns: they are answers."""
UNCOMPARED = ("pass_rate", *TEMPLATE_COLUMNS)
"""Further columns that make no other question: a measurement, and what the tokens of the question have in them."""


class _Known:
    """The questions that were there before, with the columns that their rewards get."""

    def __init__(self) -> None:
        self._asked: set[bytes] = set()
        self._truths: dict[bytes, tuple[bytes, ...]] = {}

    def adds(self, ids: Iterable[int], columns: Row) -> bool:
        """Whether question and columns are new together; they are known from then on. Any column may decide what a
        reward gives, so that all are compared but the names of rows, also inside `extra_info`."""
        question = _digest(list(ids))
        row = question + _digest(without_none(_compared(columns)))
        if row in self._asked:
            return False
        self._asked.add(row)
        truths, truth = self._truths.get(question, ()), _digest(columns.get("ground_truth"))
        if truth not in truths:
            self._truths[question] = (*truths, truth)
        return True

    @property
    def num_ambiguous(self) -> int:
        """The number of questions with several ground truths."""
        return sum(len(truths) > 1 for truths in self._truths.values())


def _compared(columns: Row) -> Row:
    return {
        name: _compared(value) if name == "extra_info" and isinstance(value, dict) else value
        for name, value in columns.items()
        if name not in UNCOMPARED and not NAMES_OF_ROWS.fullmatch(name)
    }


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()


def _in_threads(function: Callable[[T], U], items: Iterator[T]) -> Iterator[tuple[T, U]]:
    """Each item with what the function makes of it, in order. Pillow does most of its work without Python's lock."""
    cores = num_cores()
    with ThreadPoolExecutor(cores) as pool:
        for some in _batches(items, 4 * cores):
            yield from zip(some, pool.map(function, some), strict=True)


def _batches(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while some := list(islice(items, size)):
        yield some


def question_of(row: Mapping[str, Any], required_columns: Iterable[str], reading: Reading) -> Question:
    """A row's question before tokenization, and its other columns.

    Raises:
        BadRow: the row is bad for a reason that `load_prompts` lists.
    """
    if not reading.sees_images:
        require_no_places(row)
    question = recognise(row, reading)
    missing = [name for name in required_columns if question.columns.get(name) is None]
    if missing:
        raise BadRow(
            f"column `{missing[0]}` is missing; the configured rewards need it, and the row has {sorted(row)}; if one "
            f"of these is meant, set data.columns={{{missing[0]}: NAME}}"
        )
    if reading.rated:
        rate = question.columns.get("pass_rate")
        if not isinstance(rate, int | float) or not 0 <= rate <= 1:
            raise BadRow(
                f"`pass_rate` must be a number from 0 to 1, but it is {rate!r}; data.easy_first_epochs or the "
                f"estimator a2po needs it, and `megatron-rl filter-difficulty` writes it"
            )
    if not isinstance(question.messages, str) and question.messages[-1]["role"] == "assistant":
        raise BadRow("`messages` ends with the assistant's turn, but the model must write this turn; remove it")
    return question


def check_columns(
    columns: Mapping[str, Any],
    budget: ColumnBudget | None,
    values: PrefixValues | None,
    objects: ObjectColumns | None = None,
) -> None:
    """
    Raises:
        BadRow: the row has no usable thinking budget, or no usable right answer, or not what an object needs.
    """
    try:
        if budget is not None:
            budget.of(columns)
        if values is not None:
            values.answers(columns)
        if objects is not None:
            objects.check(columns)
    except ValueError as error:
        raise BadRow(str(error)) from None


def check_length(num_tokens: int, max_prompt_tokens: int) -> None:
    if not num_tokens:
        raise BadRow("the prompt has no tokens")
    if num_tokens > max_prompt_tokens:
        raise LongRow(f"the prompt has {num_tokens} tokens, rollout.max_prompt_tokens is {max_prompt_tokens}")
