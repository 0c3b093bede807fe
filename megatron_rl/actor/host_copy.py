"""A copy of memory of the device in the host's memory, which is pinned on a machine with a GPU.

torch rounds every allocation of pinned memory up to a power of two, so a copy of a large buffer could need twice its
bytes. So the copy consists of chunks of CHUNK_BYTES, a power of two, wherever the storages begin and end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_rl.actor import platform

CHUNK_BYTES = 2**26


class HostCopy:
    """Room for the bytes of some storages, one after the other."""

    def __init__(self, num_bytes: int) -> None:
        """
        Args:
            num_bytes: the bytes of all storages together.
        """
        self.num_bytes = num_bytes
        sizes = [min(CHUNK_BYTES, num_bytes - start) for start in range(0, num_bytes, CHUNK_BYTES)]
        self._chunks = [torch.empty(size, dtype=torch.uint8, pin_memory=platform.HAS_CUDA) for size in sizes]

    def store(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copy the storages. On a GPU the copies are only queued when this returns."""
        for here, there in self._pairs(storages):
            there.copy_(here, non_blocking=True)

    def restore(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copy back into the storages that were stored, in their order, which must have their sizes again. On a GPU the
        copies are only queued when this returns."""
        for here, there in self._pairs(storages):
            here.copy_(there, non_blocking=True)

    def _pairs(self, storages: Sequence[torch.UntypedStorage]) -> Iterator[tuple[Tensor, Tensor]]:
        """The same bytes in a storage and in a chunk, each uint8 [n]."""
        position = 0
        for storage in storages:
            here = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            while len(here):
                there = self._chunks[position // CHUNK_BYTES][position % CHUNK_BYTES :][: len(here)]
                yield here[: len(there)], there
                here, position = here[len(there) :], position + len(there)
