"""How fast this rank computes, compared with the others.

The time of a step does not tell, because all ranks wait for the slowest one in their collectives. So each rank times a
matrix product of its own, without a collective.
"""

from __future__ import annotations

import time

import torch

from megatron_rl.actor import platform

SIZE = {"cuda": 8192, "cpu": 512}
"""The number of rows and columns of the square matrices. The products are much shorter than a step; not run on a
GPU."""
NUM_RUNS = 3


class SpeedMeter:
    def __init__(self) -> None:
        device, dtype = ("cuda", torch.bfloat16) if platform.HAS_CUDA else ("cpu", torch.float32)
        self._matrix = torch.ones(SIZE[device], SIZE[device], device=device, dtype=dtype)

    def seconds(self) -> float:
        """The seconds of one product: the least of several, because other work on the machine only adds time."""
        return min(self._run() for _ in range(NUM_RUNS))

    def _run(self) -> float:
        start = time.perf_counter()
        self._matrix @ self._matrix
        if platform.HAS_CUDA:
            torch.cuda.synchronize()
        return time.perf_counter() - start
