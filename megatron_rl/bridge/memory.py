"""The buffers of a rank, in memory that other processes of the machine (of the GPU) can read.

On a CPU the memory is a memfd. It lies in no folder, it is not bounded by the size of /dev/shm, and it is freed when
the last process that has it ends. On a GPU it is ordinary memory, which the other process opens through CUDA IPC (this
has not been run).
"""

from __future__ import annotations

import base64
import mmap
import os
import pickle
import socket
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.bridge.line import SLOTS

ALIGNMENT_BYTES = 64


def place(device: torch.device) -> str:
    """A text that is equal for two ranks if and only if they can read each other's buffers. It names the machine, the
    kernel's boot, the user and the namespace of processes, and on GPUs the device too."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    parts = [socket.gethostname(), boot, str(os.getuid()), os.readlink("/proc/self/ns/pid"), device.type]
    if device.type == "cuda":
        parts.append(str(torch.cuda.get_device_properties(device).uuid))
    return " ".join(parts)


class Slots:
    """The buffers of one rank (uint8, `num_bytes` each), and the handle with which other processes open them."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        num_bytes = ALIGNMENT_BYTES * max(1, -(-num_bytes // ALIGNMENT_BYTES))  # the kernel refuses an empty mapping
        if device.type == "cpu":
            self._file: int | None = os.memfd_create("megatron_rl bridge", os.MFD_CLOEXEC)
            os.ftruncate(self._file, SLOTS * num_bytes)
            whole = _mapped(self._file, SLOTS * num_bytes)
            self.handle = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            from torch.multiprocessing.reductions import reduce_tensor

            self._file = None
            whole = torch.empty(SLOTS * num_bytes, dtype=torch.uint8, device=device)
            self.handle = base64.b64encode(pickle.dumps(reduce_tensor(whole)[1])).decode()
        self.tensors = list(whole.split(num_bytes))

    def close(self) -> None:
        """Processes that have opened the buffers keep them."""
        self.tensors = []
        if self._file is not None:
            os.close(self._file)
            self._file = None


def opened(handle: str, device: torch.device) -> list[Tensor]:
    """Open another rank's buffers."""
    if device.type == "cpu":
        file = os.open(handle, os.O_RDWR)
        try:
            whole = _mapped(file, os.fstat(file).st_size)
        finally:
            os.close(file)
    else:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        arguments = list(pickle.loads(base64.b64decode(handle)))
        arguments[6] = device.index  # one GPU may have different numbers in two processes
        whole = rebuild_cuda_tensor(*arguments)
    return list(whole.split(whole.numel() // SLOTS))


def _mapped(file: int, num_bytes: int) -> Tensor:
    """The tensor keeps the mapping alive."""
    return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
