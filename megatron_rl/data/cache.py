"""Keeps the prompts of a source in a folder, so that the next start need not read and tokenize its rows.

A file's name is the digest of everything that its prompts depend on: the contents and names of the files of rows, the
tokenizer with its chat template, the keys of the configuration, and the code of this room. So a file is never stale,
and none is ever changed; users who need room delete files.

A file gets its name when it is whole. Two runs at once may both write one, and the later takes its place; a run that
has mapped the earlier one keeps it. A damaged file is reported and written again. A disk that is full only costs the
cache.

Invariants (tests/unit/data): prompts from the cache equal those from the rows; each thing that they depend on changes
the key.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import TYPE_CHECKING, Any

from megatron_rl.data.files import files_of
from megatron_rl.data.prompt_table import DamagedTable, PromptTable, Read, write_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tell = Callable[[str], None]


class _Unwritable(Exception):
    """The cache cannot be written."""


def keep(folder: Path, source: Path, depends: Sequence[Any], read: Read, tell: Tell) -> PromptTable:
    """The prompts of a source, from the cache if it has them.

    Args:
        depends: what the prompts depend on besides the files of the source and the code of this room.

    Raises:
        ValueError: the source changed while it was read, or an error of `read`.
    """
    before = _stamps(source)
    path = folder / f"{key_of(source, depends)}.prompts"
    try:
        return PromptTable.mapped(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, DamagedTable) as error:
        tell(f"{path} cannot be used ({error}); the rows of {source} are read and tokenized again")
    try:
        with _partial(folder, path) as file:
            write_table(file, read)
            if before != _stamps(source):
                raise ValueError(f"{source} changed while it was read; start again when it is complete")
        return PromptTable.mapped(path)
    except _Unwritable as error:
        tell(f"data.cache: {folder} cannot be written ({error}); the prompts of {source} stay in memory")
    return PromptTable.of(read)


def key_of(source: Path, depends: Sequence[Any]) -> str:
    """The digest of everything that the prompts of a source depend on."""
    folder = source if source.is_dir() else source.parent
    rows = [(str(file.relative_to(folder)), contents_digest(file)) for file in files_of(source)]
    code = [contents_digest(file) for file in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.blake2b(json.dumps([rows, code, depends], default=repr).encode(), digest_size=16).hexdigest()


def tokenizer_digests(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """The digests of the files that make up a tokenizer and its chat template, and the versions of the libraries that
    use them."""
    with TemporaryDirectory() as name:
        tokenizer.save_pretrained(name)
        files = sorted(path for path in Path(name).rglob("*") if path.is_file())
        return [
            *((str(path.relative_to(name)), contents_digest(path)) for path in files),
            *((library, version(library)) for library in ("transformers", "tokenizers", "jinja2")),
        ]


def contents_digest(path: Path) -> str:
    """A digest of all bytes of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _stamps(source: Path) -> list[tuple[str, int, int]]:
    """What changes when a file of the source is written."""
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files_of(source)]


@contextmanager
def _partial(folder: Path, path: Path) -> Iterator[_Sink]:
    """A file that gets its name `path` in the folder if nothing fails, and else is removed.

    Raises:
        _Unwritable: the file cannot be made or written.
    """
    with _unwritable():
        folder.mkdir(parents=True, exist_ok=True)
        file = NamedTemporaryFile(dir=folder, prefix=f"{path.stem}.", suffix=".partial", delete=False)  # noqa: SIM115
    try:
        yield _Sink(file)
        with _unwritable():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(file.name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(file.name)
        with suppress(OSError):  # what could not be written is tried again
            file.close()
        raise


class _Sink:
    """A file whose errors count as errors of the cache, not of the rows that are read meanwhile."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any, /) -> None:
        with _unwritable():
            self._file.write(data)


@contextmanager
def _unwritable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _Unwritable(error.strerror or str(error)) from error
