"""The pipes and files of the sandbox's processes (`process.py`): all are closed, and gone, when their context ends."""

from __future__ import annotations

import io
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any


def pipe() -> AbstractContextManager[tuple[io.FileIO, io.FileIO]]:
    """The two ends of a pipe: what is written to the second is read from the first."""
    return _closing(*(io.FileIO(end, mode) for end, mode in zip(os.pipe(), "rw", strict=True)))


@contextmanager
def _closing(*files: io.FileIO) -> Iterator[Any]:
    try:
        yield files
    finally:
        for file in files:
            file.close()


@contextmanager
def file_of(content: bytes) -> Iterator[io.FileIO]:
    """A file without a name, open for reading alone."""
    with tempfile.TemporaryFile() as written:
        written.write(content)
        written.flush()
        with io.FileIO(f"/proc/self/fd/{written.fileno()}") as file:
            yield file


@contextmanager
def temporary_directory() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="megatron-rl-program-")
    try:
        yield path
    finally:
        # A program can nest directories deeper than shutil.rmtree can follow, and make some that nobody may read.
        remove = ["rm", "-rf", "--", path]
        if subprocess.run(remove, stderr=subprocess.DEVNULL).returncode:
            subprocess.run(["chmod", "-R", "u+rwx", "--", path], stderr=subprocess.DEVNULL)
            subprocess.run(remove, check=True)


def read(files: Sequence[io.FileIO], limits: Sequence[int], deadline: float) -> list[bytes]:
    """Read pipes until all are closed, the first has more bytes than its limit, or the deadline has passed.

    Args:
        limits: of the first file at most one byte more than its limit is kept, of each other file its last bytes.
        deadline: in seconds of time.monotonic().
    """
    texts = {file.fileno(): b"" for file in files}
    limit_of = dict(zip(texts, limits, strict=True))
    first = files[0].fileno()
    poll = select.poll()
    for number in texts:
        poll.register(number, select.POLLIN)
    num_open = len(files)
    # The clock is asked each time: a pipe that is written without end is always ready.
    while num_open and len(texts[first]) <= limit_of[first] and (rest_s := deadline - time.monotonic()) > 0:
        for number, _ in poll.poll(rest_s * 1000):
            part = os.read(number, 1 << 16)
            if not part:
                poll.unregister(number)
                num_open -= 1
            whole, limit = texts[number] + part, limit_of[number]
            texts[number] = whole[: limit + 1] if number == first else whole[-limit:]
    return list(texts.values())
