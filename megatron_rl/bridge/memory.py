"""The buffers of a rank, in memory that other processes of the machine (of the GPU) can read.

On a CPU the memory is a memfd. It lies in no folder, it is not bounded by the size of /dev/shm, and it is freed when
the last process that has it ends. On a GPU it is ordinary memory, which the other process opens through CUDA IPC (this
has not been run).
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from megatron_rl.bridge.line import SLOTS
from megatron_rl.bridge.messages import ALIGNMENT_BYTES, aligned


class Probe:
    """Memory of this process that holds a random text. A rank that finds the text there can read this rank's buffers.

    Names do not decide this: two nodes may have one host name, and containers of one machine may not see each other's
    processes.
    """

    def __init__(self, device: torch.device) -> None:
        text, file = secrets.token_hex(16), os.memfd_create("megatron_rl probe", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, file)
        os.write(file, text.encode())
        self.says = [f"/proc/{os.getpid()}/fd/{file}", text, _name(device)]
        """What another rank needs for `reads`, as long as this object exists."""


def reads(says: list[str], device: torch.device) -> bool:
    """Whether this process can read the buffers of the rank whose probe says this."""
    path, text, other = says
    with suppress(OSError), open(path, "rb") as file:
        return file.read(len(text)) == text.encode() and other == _name(device)
    return False


def _name(device: torch.device) -> str:
    """A CPU shares the memory of its machine; a GPU has its own memory."""
    return f"cuda {torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else device.type


class Slots:
    """The buffers of one rank (uint8, `num_bytes` each)."""

    def __init__(self, num_bytes: int, device: torch.device, num: int = SLOTS) -> None:
        num_bytes = max(aligned(num_bytes), ALIGNMENT_BYTES)  # the kernel refuses an empty mapping
        if device.type == "cpu":
            self._file: int | None = os.memfd_create("megatron_rl bridge", os.MFD_CLOEXEC)
            os.ftruncate(self._file, num * num_bytes)
            self._whole = _mapped(self._file, num * num_bytes)
        else:
            self._file = None
            self._whole = torch.empty(num * num_bytes, dtype=torch.uint8, device=device)
        self.tensors: list[Tensor] = list(self._whole.split(num_bytes))  # type: ignore[no-untyped-call]

    @property
    def handle(self) -> str:
        """What lets other processes open the buffers. Nobody has tried it on a GPU with `expandable_segments`, which
        ranks that share GPUs do not have."""
        if self._file is not None:
            return f"/proc/{os.getpid()}/fd/{self._file}"
        from torch.multiprocessing.reductions import reduce_tensor

        return _encode(reduce_tensor(self._whole)[1])  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Processes that have opened the buffers keep them."""
        self.tensors, self._whole = [], torch.empty(0)
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

        whole = rebuild_cuda_tensor(*_decode(handle, device))  # type: ignore[no-untyped-call]
    return list(whole.split(whole.numel() // SLOTS))  # type: ignore[no-untyped-call]


CLASSES = {0: torch.Tensor, 4: torch.TypedStorage, 5: torch.uint8}
"""The arguments of `rebuild_cuda_tensor` that JSON cannot hold and that never differ, by their places."""
DEVICE = 6
"""The place of the device's number. One GPU may have different numbers in two processes."""


def _encode(arguments: tuple[Any, ...]) -> str:
    """The arguments of `rebuild_cuda_tensor` as JSON: a pickle from a store without passwords could run any code."""
    assert all(arguments[place] == kind for place, kind in CLASSES.items()), arguments
    plain = [None if place in CLASSES else value for place, value in enumerate(arguments)]
    return json.dumps(plain, default=lambda value: {"hex": value.hex()})


def _decode(handle: str, device: torch.device) -> list[Any]:
    arguments: list[Any] = json.loads(handle, object_hook=lambda value: bytes.fromhex(value["hex"]))
    for place, kind in (CLASSES | {DEVICE: device.index}).items():
        arguments[place] = kind
    return arguments


def _mapped(file: int, num_bytes: int) -> Tensor:
    """The tensor keeps the mapping alive."""
    return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
