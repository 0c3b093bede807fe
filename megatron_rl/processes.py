"""What all processes of a run have in common: their logs, a signal that makes them write their stacks, their memory,
their start, their descendants, and how they end."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import re
import select
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, TextIO

import psutil

STACKS = signal.SIGUSR2
"""The driver, our processes and vLLM's below them write the Python stacks of all their threads to their log on this
signal."""


def log_to(handler: logging.Handler) -> None:
    """Send our messages of level INFO and above to `handler` alone. The messages of libraries are not affected."""
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    ours = logging.getLogger("megatron_rl")
    ours.setLevel(logging.INFO)
    ours.handlers[:] = [handler]
    ours.propagate = False


def open_text(path: Path, mode: str = "w") -> TextIO:
    """A file of text for people and for programs: in UTF-8, with halves of surrogate pairs as `\\ud800`. Rows, rewards
    and models may contain such halves, which UTF-8 does not have. In a string of JSON this is the same character."""
    return path.open(mode, encoding="utf-8", errors="backslashreplace")  # type: ignore[return-value]  # it is no binary


def read_text(path: Path) -> str:
    """The text of a file that a user has named.

    Raises:
        ValueError: it cannot be read, or it is no text in UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(message_of(error)) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 (byte {error.start}); give another file") from error


def message_of(error: Exception) -> str:
    """What a user is told of it, which names the file."""
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    is_path = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | PermissionError)
    return f"{error.filename}: {error.strerror}" + "; give another path" * is_path


def failed(error: Exception) -> int:
    """Print an error on the error stream; returns the exit status."""
    print(f"error: {message_of(error)}", file=sys.stderr)
    return 1


def piped(command: Callable[[], int]) -> int:
    """The exit status of a command whose output may be read in part, as `head` does. Then it ends without a word, and
    with the status of a program that SIGPIPE has ended."""
    try:
        try:
            return command()
        finally:
            if sys.stdout is not None:  # it was closed when Python started
                sys.stdout.flush()
    except KeyboardInterrupt:  # before a command listens to signals itself, as while it imports libraries
        print("stopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        lost = [stream for stream in (sys.stdout, sys.stderr) if stream is not None and _is_unread(stream)]
        if not lost:  # another pipe, or a connection
            raise
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in lost:  # Python writes what is left when it ends
            os.dup2(null, stream.fileno())
        return 128 + signal.SIGPIPE


def _is_unread(stream: TextIO) -> bool:
    """Whether nobody can read a pipe any more."""
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


@contextmanager
def ending_together(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process for which this one waits. SIGTERM, or an error in the block, ends the process too, and waits for it. A
    program with its own handler for SIGTERM keeps it."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a scheduler may send several
        sys.exit(128 + number)

    is_ours = current_thread() is main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if is_ours:
        signal.signal(signal.SIGTERM, end)
    try:
        with subprocess.Popen(command, **options) as child:
            try:
                yield child
            except BaseException:
                child.terminate()
                raise
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def starting() -> Iterator[None]:
    """The block where a process imports and builds what it keeps until its end. Python does not search this for
    garbage, neither now nor later.

    The import of vLLM and Megatron-Core takes 6.1 CPU seconds in place of 7.3, and a later search for garbage 12 ms in
    place of 300 ms. During this time all other ranks of a step would wait.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # some libraries tell at the end what is still there


def peak_memory_bytes() -> int:
    """The peak memory of this process (VmHWM). Unlike ru_maxrss it does not begin with the parent process's memory."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux tells every process its peak memory"
    return int(found[1]) * 1024


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """The children of a process, their children, and so on; none if it has ended. Parents come before their children.

    `psutil.Process.children` leaves out a child that seems older than its parent. It computes ages from the time of the
    machine's start, which changes whenever the machine's clock is set.
    """
    children = defaultdict(list)
    for other in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            children[other.ppid()].append(other)
    found: list[psutil.Process] = []
    parents = [process.pid]
    while parents:
        born = children.pop(parents.pop(0), [])
        found += born
        parents += [child.pid for child in born]
    return found


def status_of(process: psutil.Process) -> str:
    """One of psutil's STATUS_...; STATUS_DEAD if it has ended."""
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL; most real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def command_line(process: psutil.Process) -> str:
    """Its command line; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
