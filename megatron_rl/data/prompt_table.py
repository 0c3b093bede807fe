"""Prompts as bytes, in memory or in a file that is mapped: a prompt is only made when it is asked for.

The bytes are an Arrow stream, then the tally as JSON, then the foot: the lengths of both parts and the CRC-32 of the
two, 8 bytes each and little-endian, and eight bytes that name the form. The stream has the columns `ids` (the tokens)
and `rest` (name, messages and columns as JSON), so nothing in it can run code.

Invariants (tests/unit/data): what is read equals what was written; bytes that were cut off or changed anywhere are
refused.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, overload

from megatron_rl.data.rows import counted
from megatron_rl.types import Picture, Prompt

FOOT = struct.Struct("<QQQ8s")
MAGIC = b"prompts1"
BATCH_ROWS = 1024
"""The number of prompts of one batch of the stream, which are Python objects until the batch is written."""


class DamagedTable(ValueError):
    """The bytes do not form a whole table."""


class Writable(Protocol):
    def write(self, data: Any, /) -> Any: ...


@dataclass(slots=True)
class Tally:
    """The numbers of kept, skipped and removed rows of a source."""

    num_rows: int = 0
    """The number of all rows."""
    skipped: dict[str, int] = field(default_factory=dict)
    """The number of bad rows by their reason."""
    first_skipped: str = ""
    """The name of the first bad row, and its error."""
    num_duplicates: int = 0
    """The number of rows that were left out because their question and ground truth were there before."""
    num_ambiguous: int = 0
    """The number of questions with several ground truths, if duplicates are looked for."""
    digest: str = ""
    """The digest of the names and tokens of the prompts."""

    def __str__(self) -> str:
        parts = [counted(self.num_rows, "row")]
        if self.skipped:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.skipped.items()))
            parts.append(f"skipped {reasons} (the first one is {self.first_skipped})")
        if self.num_duplicates:
            parts.append(f"left out {counted(self.num_duplicates, 'duplicate')}")
        if self.num_ambiguous:
            have = "has" if self.num_ambiguous == 1 else "have"
            parts.append(f"{counted(self.num_ambiguous, 'question')} {have} several ground truths")
        return "; ".join(parts)


Read = Callable[[Tally], Iterator[Prompt]]
"""Reads prompts from the beginning. When the last one is there, the tally is complete."""


class PromptTable(Sequence[Prompt]):
    """The prompts of one source.

    Args:
        data: a buffer of Arrow with the bytes of `write_table`.

    Raises:
        DamagedTable: the bytes do not form a whole table.
    """

    def __init__(self, data: Any) -> None:
        pyarrow = import_module("pyarrow")
        view = memoryview(data)
        if len(view) < FOOT.size:
            raise DamagedTable(f"it has only {len(view)} bytes")
        size, tail, checksum, magic = FOOT.unpack(view[-FOOT.size :])
        if magic != MAGIC or size + tail + FOOT.size != len(view):
            raise DamagedTable(f"it has {len(view)} bytes, which do not end as they should")
        if zlib.crc32(view[: size + tail]) != checksum:
            raise DamagedTable("its checksum is wrong")
        self.tally = Tally(**json.loads(bytes(view[size : size + tail])))
        table = pyarrow.ipc.open_stream(data.slice(0, size)).read_all()
        self._ids, self._rest = table["ids"], table["rest"]

    @classmethod
    def of(cls, read: Read) -> PromptTable:
        """A table in memory."""
        sink = io.BytesIO()
        write_table(sink, read)
        return cls(import_module("pyarrow").py_buffer(sink.getbuffer()))

    @classmethod
    def mapped(cls, path: Path) -> PromptTable:
        """A table in a file. The operating system keeps as much of it in memory as there is room for.

        Raises:
            OSError: the file cannot be read.
        """
        with import_module("pyarrow").memory_map(str(path)) as file:
            return cls(file.read_buffer())

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        ids = self._ids[index].values.to_numpy()
        uid, messages, columns, *more = json.loads(bytes(self._rest[index].as_buffer()))
        pictures = tuple(Picture(*one) for of_prompt in more for one in of_prompt)
        turns = messages if isinstance(messages, str) else tuple(messages)
        return Prompt(uid, tuple(ids.tolist()), turns, columns, pictures=pictures)


def write_table(sink: Writable, read: Read) -> None:
    """Write the bytes of a table."""
    pyarrow = import_module("pyarrow")
    schema = pyarrow.schema([("ids", pyarrow.large_list(pyarrow.int32())), ("rest", pyarrow.large_binary())])
    counted, tally = _Counted(sink), Tally()
    with pyarrow.ipc.new_stream(pyarrow.PythonFile(counted, mode="w"), schema) as stream:
        ids: list[Sequence[int]] = []
        rest: list[bytes] = []

        def flush() -> None:
            arrays = [pyarrow.array(column, kind.type) for column, kind in zip((ids, rest), schema, strict=True)]
            stream.write_batch(pyarrow.record_batch(arrays, schema=schema))
            ids.clear()
            rest.clear()

        for prompt in read(tally):
            ids.append(prompt.token_ids)
            pictures = [[astuple(one) for one in prompt.pictures]] if prompt.pictures else []
            rest.append(json.dumps([prompt.uid, prompt.messages, prompt.columns, *pictures]).encode())
            if len(ids) == BATCH_ROWS:
                flush()
        flush()
    size = counted.size
    counted.write(json.dumps(asdict(tally)).encode())
    sink.write(FOOT.pack(size, counted.size - size, counted.checksum, MAGIC))


class _Counted(io.RawIOBase):
    """Passes bytes on, and counts and checks them."""

    def __init__(self, sink: Writable) -> None:
        self._sink, self.size, self.checksum = sink, 0, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self._sink.write(data)
        self.size += len(data)
        self.checksum = zlib.crc32(data, self.checksum)
        return len(data)
