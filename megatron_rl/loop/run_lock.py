"""Only one process writes into a run's folder.

The lock is the kernel's (flock), so it ends with its process, however that ends. On a shared file system it holds
between machines if the file system supports flock there (NFSv4 does; Lustre with the mount option `flock`).

Invariants (tests/unit/loop): a second run is refused with host, process and start of the first; after SIGKILL of the
first the folder is free.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "lock"


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the run folder for the body's time; it is made when missing.

    Raises:
        ValueError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ValueError(
                f"another run writes into {folder}: {file.read().strip() or 'it has just started'}; wait for it, stop "
                "it, or choose another run.name"
            ) from error
        file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {started}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
