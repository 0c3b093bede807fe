"""What torch.cuda and CUDA's driver say, where there is none: eight H100 that nothing runs on."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nvidia
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    total_memory=80 << 30,
    multi_processor_count=132,
    major=9,
    minor=0,
    uuid="GPU-0",
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
)


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass


def load_driver(home: Path) -> None:
    """Load a libcuda.so.1 whose every function answers CUDA_ERROR_NO_DEVICE (100). vLLM's extensions need the library
    when they are imported, and Triton in the processes that vLLM starts looks for it in LD_LIBRARY_PATH.

    Args:
        home: an existing folder, where the library stays.
    """
    [header] = Path(nvidia.__path__[0]).glob("cu*/include/cuda.h")
    names = sorted(set(re.findall(r"\bcu[A-Z]\w+(?=\s*\(|\s*$)", header.read_text(), re.MULTILINE)))
    source, library = home / "driver.c", home / "libcuda.so.1"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in names))
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", library], check=True)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    known = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = f"{home}:{known}" if known else str(home)


def pretend() -> None:
    """Let torch.cuda describe the devices. What would run on one still fails."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 8
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: H100
    cuda.get_device_name = lambda *_: H100.name
    cuda.current_device = lambda: 0
    cuda.set_device = lambda *_: None
    cuda.synchronize = lambda *_: None
    cuda.mem_get_info = lambda *_: (79 << 30, 80 << 30)
    cuda.Stream = _Stream


class CudaMeansCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU are on the CPU."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        if options.get("device") is not None and torch.device(options["device"]).type == "cuda":
            options["device"] = "cpu"
        return function(*arguments, **options)


def join(rank: int, world_size: int) -> None:
    """Be this rank of a world whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
