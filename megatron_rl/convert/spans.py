"""Writes target files in spans: consecutive bytes of a file, which one worker writes while others write the rest.

A run of stored bytes is summed and written straight from the memory map of its file. Everything else is made in blocks;
each block is summed and written while it is in the processor's cache. Each byte is summed once: if a file holds all
bytes of a stored tensor, the tensor's checksum follows from the checksums of the runs.

Invariants (tests/unit/convert): the spans of a file cover each byte once; files and entries do not depend on how
files are cut; no entry is made of a stored tensor whose bytes are not the manifest's.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.convert.checksum import joined
from megatron_rl.convert.target import (
    BLOCK_BYTES,
    ByteRun,
    Rows,
    TargetFile,
    TargetTensor,
    Tick,
    as_bytes,
    blocks,
    naming,
    runs,
)
from megatron_rl.convert.tensor_files import Maps, Stored


class Piece(NamedTuple):
    """A segment of a file or, of a tensor, some of its rows."""

    segment: int
    rows: Rows | None
    """None for literal bytes."""


@dataclass(frozen=True, slots=True)
class Span:
    start: int
    """The offset of the first byte in the file."""
    pieces: tuple[Piece, ...]


class Sum(NamedTuple):
    """The crc32 of consecutive bytes."""

    start: int
    num_bytes: int
    checksum: int


class Written(NamedTuple):
    """What the writer of a span has summed."""

    of_segments: dict[int, Sum]
    """The sums of the segments' bytes, by the number of the segment."""
    of_sources: list[tuple[Stored, Sum]]
    """The sums of bytes of stored tensors."""


def cut(file: TargetFile, max_bytes: int) -> list[Span]:
    """Cut a file into spans of about `max_bytes`, each with at most one piece of a segment: literal bytes, or whole
    rows of a tensor."""
    spans: list[Span] = []
    pieces: list[Piece] = []
    start = position = 0

    def close() -> None:
        nonlocal pieces, start
        if pieces:
            spans.append(Span(start, tuple(pieces)))
        pieces, start = [], position

    for i, segment in enumerate(file.segments):
        if isinstance(segment, bytes):
            pieces.append(Piece(i, None))
            position += len(segment)
            continue
        num_rows, first = segment.extents[0], 0
        row_bytes = segment.num_bytes // num_rows
        while first < num_rows:
            free = max_bytes - (position - start)
            if free < row_bytes and position > start:
                close()
                free = max_bytes
            last = min(num_rows, first + max(1, free // row_bytes))
            pieces.append(Piece(i, (first, last)))
            position += (last - first) * row_bytes
            first = last
    close()
    return spans


def whole_sources(file: TargetFile) -> set[Stored]:
    """The stored tensors whose bytes are all in runs of the file, each byte once."""
    found: dict[Stored, list[ByteRun]] = {}
    for tensor, _ in file.tensors():
        for run in runs(tensor) or ():
            found.setdefault(run.source, []).append(run)
    return {stored for stored, parts in found.items() if _cover(stored, parts)}


def _cover(stored: Stored, parts: list[ByteRun]) -> bool:
    stop = 0
    for run in sorted(parts, key=lambda run: run.start):
        if run.start != stop:
            return False
        stop += run.num_bytes
    return stop == stored.num_bytes


def write(path: Path, file: TargetFile, span: Span, sources: set[Stored], maps: Maps, tick: Tick) -> Written:
    """Write a span of a file, which is made if it is not there.

    Args:
        sources: the stored tensors whose bytes are summed for `entry`; all others are checked before they are used.

    Raises:
        OSError: the file system refuses a write, for example because the disk is full; the error names the file.
        ValueError: a stored tensor is damaged.
    """
    written, position = Written({}, []), span.start
    with naming(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        for i, rows in span.pieces:
            segment, start, checksum = file.segments[i], position, 0
            for view, run in _views(segment, rows, sources, maps):
                if run is None:
                    checksum = zlib.crc32(view, checksum)
                else:
                    part = zlib.crc32(view)
                    checksum = joined(checksum, part, len(view))
                    _note(written.of_sources, run.source, Sum(run.start, len(view), part))
                with naming(path):
                    _write_at(descriptor, view, position)
                position += len(view)
                tick(len(view))
            written.of_segments[i] = Sum(start, position - start, checksum)
    finally:
        os.close(descriptor)
    return written


def _views(
    segment: bytes | TargetTensor, rows: Rows | None, sources: set[Stored], maps: Maps
) -> Iterator[tuple[memoryview, ByteRun | None]]:
    """The bytes of a piece, in views of at most a block, each with its run if that belongs to a tensor of `sources`."""
    if isinstance(segment, bytes):
        yield memoryview(segment), None
        return
    made_of = runs(segment, rows)
    if made_of is None:
        for block in blocks(segment, maps, rows):
            yield as_bytes(block), None
        return
    for run in made_of:
        is_summed = run.source in sources
        if not is_summed:
            maps.check(run.source)
        stored = maps.unchecked_bytes(run.source)
        for start in range(run.start, run.start + run.num_bytes, BLOCK_BYTES):
            view = stored[start : min(start + BLOCK_BYTES, run.start + run.num_bytes)]
            yield view, ByteRun(run.source, start, len(view)) if is_summed else None


def _note(sums: list[tuple[Stored, Sum]], source: Stored, new: Sum) -> None:
    """Add a sum to the list. If its bytes follow the bytes of the last sum, both become one."""
    if sums and sums[-1][0] == source and sums[-1][1].start + sums[-1][1].num_bytes == new.start:
        last = sums.pop()[1]
        new = _joined(last, new)
    sums.append((source, new))


def _joined(first: Sum, second: Sum) -> Sum:
    checksum = joined(first.checksum, second.checksum, second.num_bytes)
    return Sum(first.start, first.num_bytes + second.num_bytes, checksum)


def _write_at(descriptor: int, view: memoryview, position: int) -> None:
    while len(view):
        count = os.pwrite(descriptor, view, position)
        view, position = view[count:], position + count


def entry(file: TargetFile, written: Sequence[Written], maps: Maps) -> dict[str, Any]:
    """The file's entry in the manifest.

    Args:
        written: of all spans of the file, in order.

    Raises:
        ValueError: a stored tensor is damaged.
    """
    of_sources: dict[Stored, list[Sum]] = {}
    of_segments: dict[int, Sum] = {}
    for span in written:
        for stored, part in span.of_sources:
            of_sources.setdefault(stored, []).append(part)
        for i, part in span.of_segments.items():
            of_segments[i] = _joined(of_segments[i], part) if i in of_segments else part
    for stored, parts in of_sources.items():
        whole = Sum(0, 0, 0)
        for part in sorted(parts):
            whole = _joined(whole, part)
        maps.conclude(stored, whole.checksum)
    frame, tensors = Sum(0, 0, 0), {}
    for i, segment in enumerate(file.segments):
        if isinstance(segment, bytes):
            frame = _joined(frame, of_segments[i])
            continue
        tensors[segment.name] = {
            "dtype": str(segment.dtype).removeprefix("torch."),
            "start": of_segments[i].start,
            "bytes": segment.num_bytes,
            "crc32": f"{of_segments[i].checksum:08x}",
        }
    found: dict[str, Any] = {"bytes": file.num_bytes, "crc32": f"{frame.checksum:08x}"}
    return found | {"tensors": tensors} if tensors else found
