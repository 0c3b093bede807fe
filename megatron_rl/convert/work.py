"""Carries out a conversion in several processes. Each process writes one span of a file at a time. The target folder is
either complete or absent.

Files are written to `<target>.partial`, and are called `<name>.unfinished` until they are on the disk. A journal in
that folder keeps the checksums of the finished files. If the same command runs again, it keeps every finished file
whose bytes are still right. The manifest is written last, and then the folder gets its name.

Invariants (tests/unit/convert): however the program ends, the target's name never belongs to an incomplete folder; the
next run writes only what was not finished.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from megatron_rl.convert import manifest
from megatron_rl.convert.conversion import Conversion
from megatron_rl.convert.source import check_copies
from megatron_rl.convert.spans import Span, Written, cut, entry, whole_sources, write
from megatron_rl.convert.target import TargetFile, check_file, naming
from megatron_rl.convert.tensor_files import Maps

Report = Callable[[int], None]
"""Called a few times a second with the number of bytes done so far."""
JOURNAL = "journal.jsonl"
MIN_STRETCH_BYTES, STRETCHES_PER_WORKER = 2**25, 16
"""A span is so small that all workers end at about the same time, and not so small that there are more tasks than a
worker needs for that."""
COPIES = -1
"""The number of the one task that writes no file: it compares what the source stores more than once."""
_FORK = multiprocessing.get_context("fork")  # a fork needs no import of torch and shares the plan's memory


class Stopped(Exception):
    """Raised in a worker when another worker failed or the user interrupted the program."""


class Workers:
    """Processes that run the tasks of a list and all stop at the first error.

    The processes are forks, so `task` may be a closure. It calls `tick` after each block. The shared memory that tasks
    write has no lock, because a process that is killed while it holds a lock would block all others.
    """

    def __init__(self, num_workers: int):
        if num_workers < 1:
            raise ValueError(f"workers is {num_workers}; it must be at least 1")
        self.num_workers = num_workers
        self._done_bytes = _FORK.RawArray("Q", num_workers)
        """The bytes that each worker has done; each worker writes its own slot."""
        self._slots = _FORK.Value("i", 0)
        self._slot = 0
        self._stop = _FORK.RawValue("b", 0)

    def tick(self, num_bytes: int) -> None:
        self._done_bytes[self._slot] += num_bytes
        if self._stop.value:
            raise Stopped

    def run(
        self, task: Callable[[int], Any], order: Sequence[int], finish: Callable[[int, Any], None], report: Report
    ) -> None:
        """Run `task(i)` for each i of `order`. `finish(i, result)` runs in this process, in a separate thread, for one
        result at a time.

        Raises:
            ValueError: a task or `finish` raised it, or a worker died.
            OSError: a task or `finish` raised it.
        """
        with (
            _held_interrupt() as interrupted,
            ProcessPoolExecutor(self.num_workers, _FORK, self._begin, (task, os.getpid())) as pool,
            ThreadPoolExecutor(1) as thread,
        ):
            waiting: dict[Future[Any], int] = {}
            finishing: set[Future[None]] = set()
            try:
                waiting.update((pool.submit(_run, i), i) for i in order)
                while waiting or finishing:
                    done, _ = wait([*waiting, *finishing], timeout=0.2, return_when=FIRST_COMPLETED)
                    report(sum(self._done_bytes))
                    if interrupted.is_set():
                        raise KeyboardInterrupt
                    for future in done:
                        if future in finishing:
                            finishing.remove(future)
                            future.result()
                        else:
                            finishing.add(thread.submit(finish, waiting.pop(future), future.result()))
            except BrokenProcessPool as error:
                raise ValueError(
                    "a worker process died. Was it killed, did memory run out, or did a source file shrink while it "
                    "was read?"
                ) from error
            finally:
                self._stop.value = 1
                pool.shutdown(cancel_futures=True)

    def _begin(self, task: Callable[[int], Any], parent: int) -> None:
        """Prepare a worker; runs in it before its first task."""
        # Garbage of the parent must not be collected here. A destructor may wait for threads that a fork does not have:
        # the destructor of a gloo process group does.
        gc.freeze()
        global _task
        _task = task
        with self._slots.get_lock():
            self._slot = self._slots.value
            self._slots.value += 1
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the worker between two blocks
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the worker dies with its parent
        if os.getppid() != parent:
            os._exit(1)
        torch.set_num_threads(1)


@contextmanager
def _held_interrupt() -> Iterator[threading.Event]:
    """Inside the block Ctrl-C sets the event and raises nothing. A KeyboardInterrupt inside `wait` could leave one of
    its locks taken, and the pool would then never end."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield interrupted
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


_task: Callable[[int], Any]
"""The task function of this worker process."""


def _run(i: int) -> Any:
    return _task(i)


@dataclass(frozen=True, slots=True)
class Outcome:
    num_files: int
    num_reused: int
    """The number of files that an interrupted run had finished."""
    num_bytes: int


class _Task(NamedTuple):
    """What a worker does at a time: it writes a span of a file, or the whole of one that an interrupted run seems to
    have finished, if it is damaged."""

    file: int
    span: Span
    was_finished: bool


def _plan(files: Sequence[TargetFile], finished: Container[str], num_workers: int) -> list[_Task]:
    """The tasks in the order of their starts. The workers write as many files at the same time as there are workers,
    because the kernel lets one process at a time write to a file."""
    num_bytes = sum(file.num_bytes for file in files)
    max_bytes = max(MIN_STRETCH_BYTES, num_bytes // (num_workers * STRETCHES_PER_WORKER))
    order = sorted(range(len(files)), key=lambda i: -files[i].num_bytes)
    whole = [(i, cut(files[i], files[i].num_bytes)) for i in order if files[i].name in finished]
    tasks = [_Task(i, span, True) for i, (span,) in whole]
    spans = [
        [_Task(i, span, False) for span in cut(files[i], max_bytes)] for i in order if files[i].name not in finished
    ]
    for first in range(0, len(spans), num_workers):
        for row in zip_longest(*spans[first : first + num_workers]):
            tasks += [task for task in row if task]
    return tasks


def require_new(folder: Path) -> None:
    """A command calls this before it reads a checkpoint, which can take long.

    Raises:
        ValueError: the target exists, be it as a link to nothing, or would be in a file.
    """
    if os.path.lexists(folder):
        raise ValueError(f"{folder} exists; remove it or choose another name")
    above = next(parent for parent in folder.absolute().parents if os.path.lexists(parent))
    if not above.is_dir():
        raise ValueError(f"{folder} cannot be made, because {above} is no folder; choose another name")


def carry_out(conversion: Conversion, folder: Path, num_workers: int, report: Report) -> Outcome:
    """Write the target folder.

    Raises:
        ValueError: the target exists, another process writes it, or the source is damaged.
        OSError: the disk has too little space, or the file system refuses a write; the error names the file.
    """
    require_new(folder)
    partial = folder.with_name(folder.name + ".partial")
    files = conversion.files
    with _journal(partial, _identity(conversion)) as (journal, known):
        _remove_unfinished(partial)  # files of a killed run
        _check_space(conversion.num_bytes - sum(entry["bytes"] for entry in known.values()), partial)
        for path in {(partial / file.name).parent for file in files}:
            path.mkdir(parents=True, exist_ok=True)
        workers = Workers(num_workers)
        maps = Maps(conversion.source.checksums)  # each fork has its own
        sources = [{stored for stored in whole_sources(file) if maps.has_checksum(stored)} for file in files]
        tasks = _plan(files, known, num_workers)

        def run(number: int) -> Written | None:
            journal.close()  # the descriptor that a fork inherits would keep the lock
            if number == COPIES:
                check_copies(conversion.source, maps, workers.tick)
                return None
            i, span, was_finished = tasks[number]
            path = partial / files[i].name
            if was_finished and _is_whole(path, known[files[i].name], workers.tick):
                return None
            return write(_unfinished(path), files[i], span, sources[i], maps, workers.tick)

        entries: dict[str, Any] = {}
        missing = Counter(task.file for task in tasks)
        written: dict[int, Written] = {}

        def finish(number: int, result: Written | None) -> None:
            if number == COPIES:
                return
            i = tasks[number].file
            path = partial / files[i].name
            if result is None:
                entries[files[i].name] = known[files[i].name]
                return
            # The disk writes while the workers make the rest. After the last span little is left for it to do.
            sync(_unfinished(path))
            written[number] = result
            missing[i] -= 1
            if not missing[i]:
                of_file = sorted((task.span.start, n) for n, task in enumerate(tasks) if task.file == i)
                entries[files[i].name] = entry(files[i], [written.pop(n) for _, n in of_file], maps)
                _unfinished(path).rename(path)
                with naming(partial / JOURNAL):
                    journal.write(json.dumps({"file": files[i].name, "entry": entries[files[i].name]}) + "\n")
                    journal.flush()

        try:
            workers.run(run, [COPIES, *range(len(tasks))], finish, report)
        finally:
            _remove_unfinished(partial)
        ordered = {file.name: entries[file.name] for file in files}
        text = manifest.describe(conversion.form, conversion.shape, conversion.mesh, conversion.fused_norms, ordered)
        _publish(partial, folder, text)
    num_reused = sum(entries[name] is values for name, values in known.items())
    return Outcome(len(files), num_reused, conversion.num_bytes)


def _remove_unfinished(partial: Path) -> None:
    for path in partial.rglob("*.unfinished"):
        path.unlink()


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + ".unfinished")


def _is_whole(path: Path, entry: dict[str, Any], tick: Callable[[int], None]) -> bool:
    try:
        check_file(path, entry, tick)
    except ValueError:
        return False  # it is written again
    return True


def _identity(conversion: Conversion) -> str:
    """A digest of the files to be written and of the files that they are made from. A run continues an earlier one only
    if the digests are equal."""
    digest = hashlib.sha256()
    sources = {part.source for file in conversion.files for tensor, _ in file.tensors() for part in tensor.parts}
    paths = {path for stored in sources for path in stored.paths}
    for path in sorted(paths):
        status = path.stat()
        digest.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    for file in conversion.files:
        digest.update(f"{file.name} {file.num_bytes}\n".encode())
        tensors = [segment for segment in file.segments if not isinstance(segment, bytes)]
        literals = [segment for segment in file.segments if isinstance(segment, bytes)]
        for tensor in tensors:
            digest.update(f"{tensor.name} {tensor.dtype} {tensor.extents}\n".encode())
        if not tensors:  # the other bytes follow from the tensors, and torch.save does not repeat all of them
            for literal in literals:
                digest.update(literal)
    return digest.hexdigest()


@contextmanager
def _journal(partial: Path, identity: str) -> Iterator[tuple[TextIO, dict[str, Any]]]:
    """The open journal, locked, and the entries of an earlier run of the same conversion. If the folder belongs to
    another conversion, it is emptied. A folder that ends without a finished file is removed."""
    partial.mkdir(parents=True, exist_ok=True)
    path = partial / JOURNAL
    with path.open("a+") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{partial} is being written by another process; wait until it ends") from error
        try:
            journal.seek(0)
            known = _entries(journal.read().splitlines(), identity)
            if known is None:
                for stale in partial.iterdir():
                    if stale.is_dir():
                        shutil.rmtree(stale)
                    elif stale != path:
                        stale.unlink()
                with naming(path):
                    path.write_text(json.dumps({"identity": identity}) + "\n")
            yield journal, known or {}
        finally:
            if path.exists() and not _entries(path.read_text().splitlines(), identity):
                shutil.rmtree(partial)


def _entries(lines: list[str], identity: str) -> dict[str, Any] | None:
    """The journal's entries by file name, or None if it belongs to another conversion."""
    if not lines or lines[0] != json.dumps({"identity": identity}):
        return None
    known = {}
    for line in lines[1:]:
        try:
            fields = json.loads(line)
        except ValueError:
            break  # a killed process left its last line incomplete
        known[fields["file"]] = fields["entry"]
    return known


def _check_space(num_bytes: int, partial: Path) -> None:
    free = shutil.disk_usage(partial).free
    if num_bytes > free:
        raise OSError(errno.ENOSPC, f"{num_bytes:,} bytes must be written, but only {free:,} are free", str(partial))


def _publish(partial: Path, folder: Path, text: bytes) -> None:
    path = partial / manifest.NAME
    with naming(path):
        path.write_bytes(text)
    sync(path)
    (partial / JOURNAL).unlink()
    for subfolder in {path.parent for path in partial.rglob("*")}:
        sync(subfolder)
    partial.rename(folder)
    sync(folder.parent)


def sync(path: Path) -> None:
    """Force a file's content or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
