"""What `nvidia-smi` and torch say about this machine's GPUs, as one sentence if a program cannot use them now.

A machine without `nvidia-smi`, and one whose `nvidia-smi` does not answer, has no fault that is told here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

FREE_SHARE = 0.9
"""The least share of a GPU's memory that must be free. The driver itself keeps about a hundredth."""
LEAST_DRIVER = {12: 525, 13: 580}
"""The oldest driver for each major version of CUDA, without a compat library."""
PAUSE_S = 0.5
"""The time between two questions in `fault_of_memory`."""


@dataclass(frozen=True, slots=True)
class GpuMemoryNow:
    """A GPU at this moment; memory is in bytes."""

    uuid: str
    index: int
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class GpuUser:
    """A process that uses a GPU."""

    uuid: str
    """The GPU's."""
    pid: int
    name: str
    bytes: int | None
    """What it has taken; None if the driver does not tell."""


def visible_ids() -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, in its words; none if it is not set."""
    return [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]


def fault_of_memory(ids: Sequence[str], patience_s: float = 0.0) -> str:
    """Why the GPUs' memory is not free; empty if it is, or if `nvidia-smi` does not tell.

    Args:
        ids: the GPUs, by index or UUID; none means all.
        patience_s: how long to wait for memory that an ended process gives back.
    """
    end = time.monotonic() + patience_s
    while True:
        gpus, users = parse_gpus(_ask(_GPUS, ids)), parse_users(_ask(_USERS, ids))
        faults = [fault for gpu in gpus if (fault := fault_of(gpu, users))]
        if not faults or time.monotonic() >= end:
            return " ".join(faults)
        time.sleep(PAUSE_S)


def fault_of(gpu: GpuMemoryNow, users: Sequence[GpuUser]) -> str:
    """Why a GPU is not free; empty if it is."""
    if gpu.free >= FREE_SHARE * gpu.total:
        return ""
    named = ", ".join(
        f"{user.pid} {user.name}" + (f" ({user.bytes / 1e9:.1f} GB)" if user.bytes is not None else "")
        for user in users
        if user.uuid == gpu.uuid
    )
    who = f"used by {named}" if named else "and nvidia-smi names no process (it may be in another container)"
    free = f"GPU {gpu.index} has only {gpu.free / 1e9:.1f} of {gpu.total / 1e9:.1f} GB free, {who}"
    return f"{free}; end what uses it, or choose another GPU with CUDA_VISIBLE_DEVICES."


def fault_of_torch() -> str:
    """Why torch finds no GPU here; empty if it finds one."""
    import torch

    if torch.cuda.is_available():
        return ""
    said = ""
    with suppress(AssertionError):  # a CPU build
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            said = str(error).strip().split("\n")[0]
    return why_no_gpu(torch.version.cuda, driver(), said)


def driver() -> str:
    """The version of the driver; empty if `nvidia-smi` does not tell."""
    return next(iter(_ask("--query-gpu=driver_version", [])), [""])[0]


def why_no_gpu(cuda: str | None, installed: str, said: str) -> str:
    """
    Args:
        cuda: the version of CUDA that torch was built for; None for a CPU build.
        installed: the version of the driver; empty if it is not known.
        said: what torch says.
    """
    if cuda is None:
        return f"torch finds no GPU here: torch in {sys.prefix} is a build for CPUs; install a CUDA build of torch"
    least = LEAST_DRIVER.get(int(cuda.partition(".")[0]), 0)
    major = installed.partition(".")[0]
    if major.isdecimal() and int(major) < least:
        return (
            f"torch finds no GPU here: it is built for CUDA {cuda}, which needs driver {least} or newer, and the "
            f"driver is {installed}; update the driver, or install a torch for an older CUDA"
        )
    if not installed:
        return (
            f"torch finds no GPU here: it is built for CUDA {cuda}, and nvidia-smi names no driver"
            f"{f' ({said})' if said else ''}; install the driver, or start the container with GPUs"
        )
    reason = said or "CUDA_VISIBLE_DEVICES may hide it"
    return f"torch finds no GPU here, although driver {installed} is installed: {reason}; see nvidia-smi"


def total_bytes(ids: Sequence[str]) -> int | None:
    """The memory of the first GPU in bytes; None if `nvidia-smi` does not tell. CUDA is not initialised."""
    return next((gpu.total for gpu in parse_gpus(_ask(_GPUS, ids))), None)


_GPUS = "--query-gpu=uuid,index,memory.total,memory.free"
_USERS = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
MIB = 2**20


def parse_gpus(lines: Sequence[Sequence[str]]) -> list[GpuMemoryNow]:
    """Lines with numbers alone; other ones are left out (`[N/A]` of a GPU in partitions)."""
    return [
        GpuMemoryNow(uuid, int(index), int(total) * MIB, int(free) * MIB)
        for uuid, index, total, free in (line for line in lines if len(line) == 4)
        if (index + total + free).isdecimal()
    ]


def parse_users(lines: Sequence[Sequence[str]]) -> list[GpuUser]:
    """A process name may have commas."""
    return [
        GpuUser(uuid, int(pid), ", ".join(name), int(used) * MIB if used.isdecimal() else None)
        for uuid, pid, *name, used in (line for line in lines if len(line) >= 4)
        if pid.isdecimal()
    ]


def _ask(query: str, ids: Sequence[str]) -> list[list[str]]:
    """The cells of each line that `nvidia-smi` answers; nothing if it does not answer."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", *([f"--id={','.join(ids)}"] if ids else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.split(", ") for line in done.stdout.splitlines() if line] if done.returncode == 0 else []
