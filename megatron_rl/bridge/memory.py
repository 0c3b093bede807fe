"""The buffers of a rank, in memory that other processes of the machine (of the GPU) can read.

On a CPU it is a memfd: it lies in no folder, is not bound by the size of /dev/shm, and is gone with the last process
that has it. On a GPU it is ordinary memory, opened by the other process through CUDA IPC (not run).
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
    """Equal for two ranks that can read each other's buffers: machine, kernel, user, namespace of processes; on GPUs
    the device too."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    parts = [socket.gethostname(), boot, str(os.getuid()), os.readlink("/proc/self/ns/pid"), device.type]
    if device.type == "cuda":
        parts.append(str(torch.cuda.get_device_properties(device).uuid))
    return " ".join(parts)


class Slots:
    """The buffers of one rank, `num_bytes` each (uint8), and the handle under which others find them."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        num_bytes = ALIGNMENT_BYTES * max(1, -(-num_bytes // ALIGNMENT_BYTES))  # an empty mapping is refused
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
        """Others keep what they have opened."""
        self.tensors = []
        if self._file is not None:
            os.close(self._file)
            self._file = None


def opened(handle: str, device: torch.device) -> list[Tensor]:
    """Another rank's buffers."""
    if device.type == "cpu":
        file = os.open(handle, os.O_RDWR)
        try:
            whole = _mapped(file, os.fstat(file).st_size)
        finally:
            os.close(file)
    else:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        arguments = list(pickle.loads(base64.b64decode(handle)))
        arguments[6] = device.index  # the same GPU may have another number in the other process
        whole = rebuild_cuda_tensor(*arguments)
    return list(whole.split(whole.numel() // SLOTS))


def _mapped(file: int, num_bytes: int) -> Tensor:
    """The tensor keeps the mapping alive."""
    return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)


def synchronize(device: torch.device) -> None:
    """Wait until what was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
