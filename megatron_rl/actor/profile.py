"""Profiles of a trainer rank: torch.profiler, NVTX ranges for Nsight Systems, and snapshots of CUDA's memory.

torch.profiler runs on CPUs, too. What needs CUDA has not been run.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_rl import spans
from megatron_rl.actor import platform

log = logging.getLogger(__name__)

CUDA: Any = torch.cuda
"""Its functions for profiles have no types."""
MAX_ENTRIES = 100_000
"""The number of allocations that a snapshot of the memory remembers."""


class RankProfile:
    """One rank. `begin` and `end` are called in turn, in the same thread."""

    def __init__(self, folder: Path, name: str, tool: str, memory: bool) -> None:
        """
        Args:
            folder: the folder of the files.
            name: a part of their names, such as `trainer_0`.
            tool: `torch` or `nsys`.
            memory: whether to write snapshots of CUDA's memory.
        """
        self._folder, self._name, self._tool, self._memory = folder, name, tool, memory
        folder.mkdir(parents=True, exist_ok=True)
        if memory:
            CUDA.memory._record_memory_history(max_entries=MAX_ENTRIES)
            functions: Any = torch._C  # a build without CUDA lacks the function
            functions._cuda_attach_out_of_memory_observer(self._out_of_memory)

    def begin(self) -> None:
        if self._tool == "nsys":
            spans.show(spans.Ranges(torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop))
            CUDA.profiler.start()
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if platform.HAS_CUDA else [])]
        self._profile = profile(activities=activities)
        self._profile.start()

    def end(self, step: int) -> list[str]:
        """Returns the files that were written. The file of nsys appears when the process ends."""
        path = self._folder / f"step_{step:06}_{self._name}.json"
        written = []
        if self._tool == "nsys":
            torch.cuda.synchronize()
            CUDA.profiler.stop()
            spans.show(None)
        else:
            self._profile.stop()
            self._profile.export_chrome_trace(str(path))
            written.append(str(path))
        if self._memory:
            written.append(self._dump(f"step_{step:06}"))
        return written

    def _dump(self, when: str) -> str:
        path = str(self._folder / f"{when}_{self._name}_memory.pickle")
        CUDA.memory._dump_snapshot(path)
        return path

    def _out_of_memory(self, device: int, asked: int, on_device: int, free: int) -> None:
        log.error(
            "GPU %d has %d bytes free, and %d were asked for; snapshot: %s", device, free, asked, self._dump("oom")
        )
