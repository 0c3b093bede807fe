"""Removes vLLM's shared memory, so that none of it outlives its processes.

The ranks of an engine exchange messages through files in /dev/shm. These files stay if the processes are killed, and
with some of vLLM's executors even after a normal end. Once all ranks have mapped a file, nobody needs its name. The
name is then removed, and the kernel frees the memory when the last process ends. If an engine was killed before that,
the next engine on the machine removes its files, or the driver at its end.

Invariant (tests/e2e): when a run has ended, by any signal, /dev/shm holds no more files than before.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from megatron_rl.processes import descendants

FOLDER = Path("/dev/shm")
NAMES = re.compile(r"psm_[0-9a-f]{8}|.+cpushm_\d+")
"""The file names of Python's SharedMemory, which vLLM uses, and of vLLM's collectives on a CPU."""
MIN_AGE_S = 1.0
"""A younger file is never removed, because a file is created a moment before it is mapped."""


def remove_own_names() -> None:
    """Remove the names of the shared memory that this process and its descendants have mapped. They keep the memory."""
    process = psutil.Process()
    for name in {name for member in [process, *descendants(process)] for name in _mapped(member.pid)}:
        (FOLDER / name).unlink(missing_ok=True)


def remove_leftovers() -> None:
    """Remove the files in /dev/shm that belong to this user, have names like vLLM's and are mapped by no process."""
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
    """The names of the files in /dev/shm that a process has mapped or holds open. There are none if the process has
    ended or belongs to another user."""
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
