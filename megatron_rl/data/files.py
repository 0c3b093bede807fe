"""Reads rows from files, from folders of files, and from data sets of the Hugging Face hub.

| kind | recognised by |
|---|---|
| JSON lines | any name that is not listed below |
| JSON, one list of objects | `.json`, and the first character is `[` |
| Parquet | `.parquet` |
| Arrow, as a file or as a stream | `.arrow` |
| what `save_to_disk` of the `datasets` library wrote | a folder with state.json |
| several files of rows | a folder with files of the kinds above, in the order of their names |
| a data set of the hub | `hf://owner/name:split`, or `hf://owner/name/configuration:split` |

Invariants (tests/unit/data): the same rows give the same items from files of every kind. A bad row either stops the run
with an error that names file and row, or it is skipped and counted. Rows say whether a library may have filled in None
(`FilledRow`). A file that cannot be read stops the run. Blank
lines and a byte-order mark are ignored. Only Parquet and Arrow need pyarrow, and only the hub needs `datasets`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megatron_rl.config.data import name_on_hub
from megatron_rl.data.row_images import require_no_places
from megatron_rl.data.rows import BadRow, FilledRow, LongRow, OnBadRow, Row, plain_row

T = TypeVar("T")
SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
"""The names of files that are read in a folder."""
NO_ROWS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
"""Descriptions of a data set, which its folder may have besides its rows."""
SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])", re.IGNORECASE)
"""The beginning of a file's name that names the split of its rows."""
BATCH_ROWS = 1024
"""The number of rows of a Parquet or Arrow file that are in memory as Python values at a time."""


class ReadRow(NamedTuple):
    """A row as it was read."""

    uid: str
    """The row's name, `file.jsonl:17`. The number counts lines, or rows where there are no lines, from 1. In a folder,
    the file's path begins below the folder."""
    place: str
    """The row's name with the whole path of its file, for errors."""
    row: Row | BadRow
    """The row, or the error about it."""


def stops(error: BadRow, on_bad_row: OnBadRow) -> bool:
    """Whether a bad row stops the run."""
    return on_bad_row == "fail" or (on_bad_row == "cut" and not isinstance(error, LongRow))


class BadRows:
    """Stops the run at the first bad row, or counts all of them."""

    def __init__(self, on_bad_row: OnBadRow) -> None:
        self._on_bad_row = on_bad_row
        self.counts: Counter[str] = Counter()
        """The number of bad rows by their reason."""
        self.first = ""
        """The name of the first bad row, and its error."""

    def add(self, read: ReadRow, error: BadRow) -> None:
        """
        Raises:
            ValueError: `on_bad_row` is `fail`, or `cut` and the row is not too long.
        """
        if stops(error, self._on_bad_row):
            raise ValueError(f"{read.place}: {error}") from error
        self.counts[error.reason] += 1
        self.first = self.first or f"{read.uid}: {error}"

    def require_good(self, num_good: int, source: Path | str) -> None:
        """
        Raises:
            ValueError: the source has no good row.
        """
        if not num_good:
            first = f"; the first bad one is {self.first}" if self.first else ""
            raise ValueError(f"{source} holds no good row{first}; correct the file or the path")


def load_rows(source: Path | str, make: Callable[[str, Row], T], on_bad_row: OnBadRow) -> tuple[list[T], int]:
    """Read all rows of a source.

    Args:
        make: makes an item of (uid, row), or raises BadRow.

    Returns:
        The items in the order of the rows, and the number of skipped rows.

    Raises:
        ValueError: a bad row stops the run (`on_bad_row`), or there is no good row at all, or an error of `read_rows`.
        FileNotFoundError: the file does not exist.
    """
    items: list[T] = []
    bad = BadRows(on_bad_row)
    for read in read_rows(source):
        try:
            row = good_row(read)
            require_no_places(row)
            items.append(make(read.uid, row))
        except BadRow as error:
            bad.add(read, error)
    bad.require_good(len(items), source)
    return items, bad.counts.total()


def good_row(read: ReadRow) -> Row:
    """
    Raises:
        BadRow: the row could not be read.
    """
    if isinstance(read.row, BadRow):
        raise read.row
    return read.row


def read_rows(source: Path | str) -> Iterator[ReadRow]:
    """Yield the rows of a file, of a folder, or of a name that begins with `hf://`.

    Raises:
        ValueError: a file cannot be read as what its name says, the folder cannot be one set of rows, or a package is
            missing.
        OSError: a file is missing or cannot be opened.
    """
    if not isinstance(source, Path):
        name = source.removeprefix("hf://")
        yield from _located(_read_hub(source), name, source)
        return
    folder = source if source.is_dir() else source.parent
    for file in files_of(source):
        yield from _located(_read_file(file), file.relative_to(folder).as_posix(), str(file))


def files_of(source: Path) -> list[Path]:
    """The files with the rows of a file or of a folder, in reading order.

    Raises:
        FileNotFoundError: the folder holds no file of rows.
        ValueError: the folder holds several splits, so that it cannot be one set of rows.
    """
    if not source.is_dir():
        return [source]
    if (state := source / "state.json").is_file():
        try:
            return [source / part["filename"] for part in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{state} does not list the files of the data set ({error!r}); save it again") from error
    if (splits := source / "dataset_dict.json").is_file():
        names = sorted(path.parent.name for path in source.glob("*/state.json"))
        raise ValueError(f"{source} holds the splits {names} ({splits.name}); give the folder of one of them")
    files = sorted(
        path
        for path in source.rglob("*")
        if path.suffix in SUFFIXES
        and path.name not in NO_ROWS
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(source).parts)
    )
    if not files:
        raise FileNotFoundError(f"there is no file of rows ({', '.join(SUFFIXES)}) in the folder {source}")
    parts = (match for file in files for part in file.relative_to(source).parts if (match := SPLIT.match(part)))
    found = sorted({match[1].lower() for match in parts})
    if len(found) > 1:
        raise ValueError(
            f"{source} holds files of the splits {found}, which are not one set of rows; give a single file, or a "
            f"folder that holds one split"
        )
    return files


def _located(rows: Iterable[tuple[int, Row | BadRow]], uid: str, place: str) -> Iterator[ReadRow]:
    for number, row in rows:
        yield ReadRow(f"{uid}:{number}", f"{place}:{number}", row)


def _read_file(file: Path) -> Iterator[tuple[int, Row | BadRow]]:
    if file.suffix in (".parquet", ".arrow"):
        return _numbered(_read_columns(file), FilledRow)
    if file.suffix == ".json" and _is_list(file):
        return _numbered(_read_list(file))
    return _read_lines(file)


def _numbered(values: Iterable[Any], kind: type[Row] = dict) -> Iterator[tuple[int, Row | BadRow]]:
    for number, value in enumerate(values, start=1):
        try:
            yield number, kind(plain_row(_checked(value)))
        except BadRow as error:
            yield number, error


def _checked(value: Any) -> Row:
    if not isinstance(value, dict):
        raise BadRow(f"a row must be a JSON object, but this one is a {type(value).__name__}")
    return value


def _read_lines(file: Path) -> Iterator[tuple[int, Row | BadRow]]:
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not raw.strip():
                continue
            try:
                yield number, _parse(raw)
            except BadRow as error:
                yield number, error


def _parse(raw: bytes) -> Row:
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRow(f"the row is not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise BadRow(f"the row is not JSON: {error}") from error
    return _checked(value)


def _is_list(file: Path) -> bool:
    with file.open("rb") as content:
        for line in content:
            if text := line.removeprefix(b"\xef\xbb\xbf").strip():
                return text.startswith(b"[")
    return False


def _read_list(file: Path) -> list[Any]:
    try:
        values: list[Any] = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{file} begins with `[`, but is not JSON: {error}; correct the file") from error
    return values


def _read_columns(file: Path) -> Iterator[Any]:
    """The rows of a Parquet or Arrow file."""
    pyarrow = _package("pyarrow", file)
    form = import_module("pyarrow.parquet" if file.suffix == ".parquet" else "pyarrow.ipc")
    try:
        with file.open("rb") as content:
            if file.suffix == ".parquet":
                for batch in form.ParquetFile(content).iter_batches(BATCH_ROWS):
                    yield from batch.to_pylist()
                return
            # An Arrow file begins with these six bytes, and a stream, which the `datasets` library writes, does not.
            is_file = content.read(6) == b"ARROW1"
            content.seek(0)
            reader = form.open_file(content) if is_file else form.open_stream(content)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
            for whole in batches:
                for start in range(0, whole.num_rows, BATCH_ROWS):
                    yield from whole.slice(start, BATCH_ROWS).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file} cannot be read as {file.suffix[1:]} ({error}); copy or write it again") from error


def _read_hub(source: str) -> Iterator[tuple[int, Row | BadRow]]:
    name, configuration, split = name_on_hub(source)
    datasets = _package("datasets", source)
    try:
        rows = datasets.load_dataset(name, configuration, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{source} cannot be loaded: {error}") from error
    return _numbered(rows, FilledRow)


def check_hub(source: str) -> None:
    """Ask the hub, or the cache, for the splits of a data set; no row is downloaded.

    Raises:
        ValueError: the package `datasets` is not installed, or there is no such data set, configuration or split.
    """
    name, configuration, split = name_on_hub(source)
    datasets = _package("datasets", source)
    try:
        splits = datasets.get_dataset_split_names(name, configuration)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{source} cannot be loaded: {error}") from error
    if split.partition("[")[0] not in splits:
        raise ValueError(f"{source} has no split {split}; it has {', '.join(splits)}")


def _package(name: str, source: Path | str) -> Any:
    """The imported package.

    Raises:
        ValueError: the package is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{source} can only be read with the package {name} ({error}); install it, or give JSON lines"
        ) from error
