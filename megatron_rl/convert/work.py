"""Carry out a conversion: several processes, a file each at a time, and a folder that is whole or absent.

Files are written beside the target, in `<target>.partial`, under `<name>.unfinished` until they are on the disk; a
journal there keeps the checksums of those that are. The same command run again takes them over if their bytes are
still right. The manifest comes last, then the folder gets its name.

Invariants (tests/unit/convert): whatever ends the program, nothing stands under the target's name unless it is whole;
a run that follows writes only what was not finished.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.convert import manifest
from megatron_rl.convert.plan import Conversion
from megatron_rl.convert.source import check_copies
from megatron_rl.convert.stored import Maps
from megatron_rl.convert.target import TargetFile, Tick, check_file, naming, write_file

Report = Callable[[int], None]
"""Told the bytes done so far, some times a second."""
JOURNAL = "journal.jsonl"
COPIES = -1
"""The task that is no file: what the source stores twice is compared."""
_FORK = multiprocessing.get_context("fork")  # workers have torch and the plan at once, and share their memory


class Stopped(Exception):
    """Another worker failed, or the user gave up."""


class Workers:
    """Processes that run `task(i)` of a list, and stop all at the first error.

    `task` is a closure over everything that it needs: the processes are forks. It calls `tick` after each block. What
    they share has no lock: a process that is killed while it holds one would stop all others.
    """

    def __init__(self, num_workers: int):
        if num_workers < 1:
            raise ValueError(f"workers is {num_workers}; it is at least 1")
        self.num_workers = num_workers
        self._done_bytes = _FORK.RawArray("Q", num_workers)
        """A slot a worker."""
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
        """`finish(i, result)` runs here, on a thread of its own, one after the other.

        Raises:
            ValueError, OSError: what a task or `finish` raised, or a worker died.
        """
        with (
            _held_interrupt() as interrupted,
            ProcessPoolExecutor(self.num_workers, _FORK, self._begin, (task, os.getpid())) as pool,
            ThreadPoolExecutor(1) as thread,
        ):
            waiting: dict[Future, int] = {}
            finishing: set[Future] = set()
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
                    "a worker died: was it killed, is memory short, or did a source file shrink while it was read?"
                ) from error
            finally:
                self._stop.value = 1
                pool.shutdown(cancel_futures=True)

    def _begin(self, task: Callable[[int], Any], parent: int) -> None:
        """First thing in a worker."""
        global _task
        _task = task
        with self._slots.get_lock():
            self._slot = self._slots.value
            self._slots.value += 1
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops us, between two blocks
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
        if os.getppid() != parent:
            os._exit(1)
        torch.set_num_threads(1)


@contextmanager
def _held_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C inside the block sets the event and raises nothing: an exception between the locks of `wait` would leave
    one of them taken, and the pool would never end."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # which gets no signals
        yield interrupted
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


_task: Callable[[int], Any]
"""Of this worker."""


def _run(i: int) -> Any:
    return _task(i)


@dataclass(frozen=True, slots=True)
class Outcome:
    num_files: int
    num_reused: int
    """Taken over from a run that was interrupted."""
    num_bytes: int


def carry_out(conversion: Conversion, folder: Path, num_workers: int, report: Report) -> Outcome:
    """Write the folder.

    Raises:
        ValueError: the target exists, another run writes it, or a source is damaged.
        OSError: no space, or whatever the file system says, with the file's name.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists; remove it or choose another name")
    partial = folder.with_name(folder.name + ".partial")
    files = conversion.files
    with _journal(partial, _identity(conversion)) as (journal, known):
        _check_space(conversion.num_bytes - sum(entry["bytes"] for entry in known.values()), partial)
        workers = Workers(num_workers)
        maps = Maps(conversion.source.checksums)  # each fork has its own

        def task(i: int) -> tuple[dict[str, Any], bool] | None:
            journal.close()  # a fork's copy would hold the lock
            if i == COPIES:
                return check_copies(conversion.source, maps, workers.tick)
            path, entry = partial / files[i].name, known.get(files[i].name)
            if entry and _is_whole(path, entry, workers.tick):
                return entry, True
            return _write(_unfinished(path), files[i], maps, workers.tick), False

        entries: dict[str, Any] = {}
        reused = 0

        def finish(i: int, result: tuple[dict[str, Any], bool] | None) -> None:
            nonlocal reused
            if i == COPIES:
                return
            path, (entry, was_there) = partial / files[i].name, result
            if not was_there:
                sync(_unfinished(path))
                _unfinished(path).rename(path)
                with naming(partial / JOURNAL):
                    journal.write(json.dumps({"file": files[i].name, "entry": entry}) + "\n")
                    journal.flush()
            reused += was_there
            entries[files[i].name] = entry

        order = sorted(range(len(files)), key=lambda i: -files[i].num_bytes)
        try:
            workers.run(task, [COPIES, *order], finish, report)
        finally:
            for path in partial.rglob("*.unfinished"):
                path.unlink()
        ordered = {file.name: entries[file.name] for file in files}
        text = manifest.describe(conversion.form, conversion.shape, conversion.mesh, conversion.fused_norms, ordered)
        _publish(partial, folder, text)
    return Outcome(len(files), reused, conversion.num_bytes)


def _write(path: Path, file: TargetFile, maps: Maps, tick: Tick) -> dict[str, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = None
    try:
        entry = write_file(path, file, maps, tick)
    finally:
        if entry is None:  # whatever ended it: no half of a file stays
            path.unlink(missing_ok=True)
    return entry


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + ".unfinished")


def _is_whole(path: Path, entry: dict[str, Any], tick: Callable[[int], None]) -> bool:
    try:
        check_file(path, entry, tick)
    except ValueError:
        return False  # it is written again
    return True


def _identity(conversion: Conversion) -> str:
    """Of what is written and of what it is made from: a run goes on only where both are the same."""
    digest = hashlib.sha256()
    paths = {copy.source.path for file in conversion.files for tensor, _ in file.tensors() for copy in tensor.copies}
    for path in sorted(paths):
        status = path.stat()
        digest.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    for file in conversion.files:
        digest.update(f"{file.name} {file.num_bytes}\n".encode())
        for segment in file.segments:
            digest.update(segment if isinstance(segment, bytes) else f"{segment.name} {segment.dtype}\n".encode())
    return digest.hexdigest()


@contextmanager
def _journal(partial: Path, identity: str):
    """The open journal, locked, and the entries of an earlier run of the same conversion. Of another one nothing is
    kept."""
    partial.mkdir(parents=True, exist_ok=True)
    path = partial / JOURNAL
    with path.open("a+") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{partial} is being written by another process") from error
        journal.seek(0)
        known = _entries(journal.read().splitlines(), identity)
        if known is None:
            for stale in partial.iterdir():
                if stale.is_dir():
                    shutil.rmtree(stale)
                elif stale != path:
                    stale.unlink()
            journal.truncate(0)
            journal.write(json.dumps({"identity": identity}) + "\n")
            journal.flush()
        yield journal, known or {}


def _entries(lines: list[str], identity: str) -> dict[str, Any] | None:
    """None: the journal is another conversion's."""
    if not lines or lines[0] != json.dumps({"identity": identity}):
        return None
    known = {}
    for line in lines[1:]:
        try:
            fields = json.loads(line)
        except ValueError:
            break  # the last line of a process that was killed
        known[fields["file"]] = fields["entry"]
    return known


def _check_space(num_bytes: int, partial: Path) -> None:
    free = shutil.disk_usage(partial).free
    if num_bytes > free:
        raise OSError(errno.ENOSPC, f"{num_bytes:,} bytes are to be written, {free:,} are free", str(partial))


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
    """Force a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
