"""A lock that lets only one process write into a run's folder.

It is a lock of the kernel (flock), so it ends with its process, however the process ends. On a shared file system it
works between machines if the file system supports flock (NFSv4 does, and Lustre with the mount option `flock`).

Invariants (tests/unit/loop): a second run is refused, and the error gives the host, process and start time of the first
run; after a SIGKILL of the first run the folder is free.
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
    """Lock the run folder while the body of the `with` statement runs. The folder is created if it does not exist.

    Raises:
        ValueError: another process has locked it.
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
