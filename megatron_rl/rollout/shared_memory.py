"""Nothing of vLLM's shared memory outlives its processes.

The ranks of an engine exchange messages through files in /dev/shm, which stay when the processes are killed, and with
some of vLLM's executors after a normal end as well. Once all ranks have mapped a file, its name is of no use to
anybody: it is removed, and the kernel frees the memory with the last process. What was left by an engine that was
killed before that is removed by the next engine on the machine, and by the driver at its end.

Invariant (tests/e2e): after a run has ended, by whatever signal, /dev/shm holds no file more than before.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")
NAMES = re.compile(r"psm_[0-9a-f]{8}|.+cpushm_\d+")
"""Those of Python's SharedMemory, which vLLM uses, and of vLLM's collectives on a CPU."""
MIN_AGE_S = 1.0
"""A file is created a moment before it is mapped."""


def remove_own_names() -> None:
    """Remove the names of the shared memory that this process and those below it have mapped; they keep the memory."""
    process = psutil.Process()
    for name in {name for member in [process, *process.children(recursive=True)] for name in _mapped(member.pid)}:
        (FOLDER / name).unlink(missing_ok=True)


def remove_leftovers() -> None:
    """Remove this user's files in /dev/shm that have vLLM's names and are mapped by no process."""
    if not FOLDER.is_dir():
        return
    old = {path for path in FOLDER.iterdir() if NAMES.fullmatch(path.name) and _is_mine_and_old(path)}
    if old:
        in_use = {name for pid in psutil.pids() for name in _mapped(pid)}
        for path in old:
            if path.name not in in_use:
                path.unlink(missing_ok=True)


def _is_mine_and_old(path: Path) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_ctime > MIN_AGE_S


def _mapped(pid: int) -> Iterator[str]:
    """Names of the files in /dev/shm that a process has mapped or holds open; none of a process that is gone, or that
    this user may not look at."""
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            path = line[line.find("/") :] if "/" in line else ""
            if path.startswith(f"{FOLDER}/") and NAMES.fullmatch(path[len(f"{FOLDER}/") :]):
                yield path[len(f"{FOLDER}/") :]
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(link)
            if target.startswith(f"{FOLDER}/"):
                yield target[len(f"{FOLDER}/") :]
    except OSError:
        return
