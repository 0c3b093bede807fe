"""One of our processes under Ray: its name, its location and its log, and a way to see what it is doing when it does
not answer."""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_rl.cluster.network import use_interface
from megatron_rl.processes import STACKS, descendants, log_to, status_of
from megatron_rl.types import Metrics

INSPECTION_S = 20.0
"""The time limit of `inspect`."""
MAX_LOG_BYTES = 16 << 20
"""The size of a log above which its middle is left out. Rewards and environments are programs of users, and may print
without end."""
LOOK_S = 0.5
"""How often the size of the log is looked at."""
LEFT_OUT = re.compile(rb"\n\[(\d+) bytes of output were left out here\]\n")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Location:
    """The place of a process."""

    pid: int
    host: str
    node: str
    """Ray's id of the node."""
    gpus: tuple[str, ...] = ()
    """The GPUs that Ray reserved for the process, as CUDA_VISIBLE_DEVICES names them."""


@dataclass(slots=True)
class Process:
    """A Ray actor as the driver sees it."""

    name: str
    """The name in messages, such as `trainer rank 3`."""
    log: Path
    actor: Any
    location: Location | None = None
    """Known once the actor has been placed."""
    memory: Metrics = field(default_factory=dict)
    """What a trainer rank has told of its GPU's memory by phase (`MegatronRank.enter`)."""

    @property
    def placed(self) -> Location:
        """The location of an actor that has been placed."""
        assert self.location is not None, f"{self.name} has not been placed"
        return self.location

    def __str__(self) -> str:
        return f"{self.name} (process {self.location.pid} on {self.location.host})" if self.location else self.name


def begin_process(path: Path, name: str) -> None:
    """Send the output of this process and its children, our log messages, and the stacks on the signal `STACKS` to the
    file `path`, and choose the network interface. A process calls this first.

    File descriptors are redirected instead of sys.stdout, because libraries print from C++ and from subprocesses. A
    thread keeps the file short (`shorten`).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.register(STACKS, file=2, all_threads=True, chain=False)
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):  # Ray's refuse halves of surrogate pairs
            reconfigure(errors="backslashreplace")
    log_to(logging.StreamHandler(sys.stderr))
    log.info("%s is process %d on %s, Python %s", name, os.getpid(), socket.gethostname(), sys.version.split()[0])
    log.info("it talks to other nodes through %s", use_interface())
    threading.Thread(target=_keep_short, args=[path], name="shortens the log", daemon=True).start()


def _keep_short(path: Path) -> None:
    while True:
        time.sleep(LOOK_S)
        with suppress(OSError):  # somebody has removed the file, or the disk is full
            shorten(path, MAX_LOG_BYTES)


def shorten(path: Path, max_bytes: int) -> None:
    """Cut the middle out of a log that is longer than `max_bytes`, and leave a line that says how much is missing. A
    quarter of `max_bytes` stays at each end: how it began, and the last error.

    A process that appends goes on at the new end. What it writes during the cut may be lost.
    """
    kept = max_bytes // 4
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size <= max_bytes:
            return
        file.seek(kept)
        before = LEFT_OUT.match(file.read(100))
        num_missing = size - 2 * kept + (int(before[1]) - len(before[0]) if before else 0)
        file.seek(size - kept)
        end = file.read(kept)
        file.seek(kept)
        file.write(b"\n[%d bytes of output were left out here]\n" % num_missing + end)
        file.truncate()


def locate() -> Location:
    """The location of the calling process."""
    gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
    return Location(os.getpid(), socket.gethostname(), ray.get_runtime_context().get_node_id(), gpus)


def inspect(process: Process) -> str:
    """Describe in a few words what a process that does not answer is doing. Its stacks go to its log."""
    if process.location is None:
        return "it has not been placed"
    on_its_node = NodeAffinitySchedulingStrategy(process.location.node, soft=False)
    task = ray.remote(_ask_for_stacks).options(num_cpus=0, scheduling_strategy=on_its_node)
    reference = task.remote(process.location.pid)
    done, _ = ray.wait([reference], timeout=INSPECTION_S)
    try:
        return ray.get(reference) if done else "its node does not answer either"
    except ray.exceptions.RayError:
        return "its node cannot be asked"


def _ask_for_stacks(pid: int) -> str:
    """Make a process and its children write their stacks, and describe its state. This runs on the process's node."""
    try:
        process = psutil.Process(pid)
        family = [process, *descendants(process)]
        status = process.status()
    except psutil.NoSuchProcess:
        return "it is gone"
    for member in family:
        if _catches(member.pid, STACKS):
            os.kill(member.pid, STACKS)
    stopped = [str(member.pid) for member in family if status_of(member) == psutil.STATUS_STOPPED]
    if stopped:
        return f"process {', '.join(stopped)} is stopped (SIGSTOP); `kill -CONT` lets it continue"
    return f"it is {status}, and its stacks are at the end of its log"


def _catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal. Without a handler the signal would kill it."""
    try:
        mask = re.search(r"SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return False
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


FAULT = re.compile(r"\b((?:\w+\.)*\w*(?:Error|Exception|Interrupt|OutOfMemory)): (.+)")
NOT_THE_CAUSE = re.compile(r"Engine core initialization failed|EngineDeadError|[Ss]ee (?:root cause|stack trace) above")


def last_error(path: Path, num_lines: int = 4) -> str:
    """The last error in a log that is a cause, or the log's last lines if it has none."""
    text = _tail(path)
    fault = root_cause(text)
    if fault:
        return fault
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-num_lines:])


def root_cause(text: str) -> str | None:
    """The last error in a log, without errors that only announce another error."""
    faults = [match for match in FAULT.finditer(text) if not NOT_THE_CAUSE.search(match[0])]
    return faults[-1][0].strip() if faults else None


def _tail(path: Path, num_bytes: int = 2**18) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
