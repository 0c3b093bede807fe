"""Lends the memory of a trainer rank to the engine that shares its GPU, and takes it back.

A storage shrinks to nothing and later grows again, so every tensor and every view of it stays valid. Weights and
optimizer state are copied to host memory before (host_copy.py), which is kept for the next time. Gradients are not
copied, because every update begins with zeros. On a CPU the same code runs. The CUDA path has not been run.

Invariants (tests/ranks): contents come back bit for bit, in every layout; a phase holds the bytes that it says and no
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_rl.actor import fp8_weights, platform, state
from megatron_rl.actor.host_copy import HostCopy
from megatron_rl.actor.optimizer.base import Optimizer
from megatron_rl.types import HOLDS, Phase


class PhasedMemory:
    """The device's memory of one rank's model and optimizer. It begins in the phase `training`."""

    def __init__(self, role: str, chunks: Sequence[DistributedDataParallel], optimizer: Optimizer) -> None:
        """
        Args:
            role: the rank's key in HOLDS.
        """
        self._role, self._chunks, self._optimizer = role, chunks, optimizer
        self.phase: Phase = "training"
        self._lent: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}
        """The storages of each part that is not on the device, with the bytes that they had."""
        self._copies: dict[str, HostCopy] = {}
        """The host's copy of each part."""

    def enter(self, phase: Phase) -> None:
        """Give up what the phase does not hold, and take back what it holds."""
        present, wanted = HOLDS[self._role][self.phase], HOLDS[self._role][phase]
        leaving = {part: list(self._storages(part)) for part in present if part not in wanted}
        for part, storages in leaving.items():
            if part != "gradients":
                self._copy_of(part, sum(storage.nbytes() for storage in storages)).store(storages)
        _synchronize()
        for part, storages in leaving.items():
            self._lent[part] = [(storage, storage.nbytes()) for storage in storages]
            for storage in storages:
                storage.resize_(0)
        if leaving:
            _empty_caches()
        for part in wanted:
            lent = self._lent.pop(part, [])
            for storage, num_bytes in lent:
                storage.resize_(num_bytes)
            if lent and part != "gradients":
                self._copies[part].restore([storage for storage, _ in lent])
        _synchronize()
        self.phase = phase

    def require(self, phase: Phase) -> None:
        """
        Raises:
            RuntimeError: the rank is in a phase that does not hold what `phase` does.
        """
        holds = HOLDS[self._role]
        missing = [part for part in holds[phase] if part not in holds[self.phase]]
        if missing:
            raise RuntimeError(
                f"the {self._role} is in the phase {self.phase}, in which the engines have the memory of its "
                f"{' and '.join(missing)}; it must enter the phase {phase} first"
            )

    def _storages(self, part: str) -> Iterator[torch.UntypedStorage]:
        """Each storage of a part on the device once."""
        seen: set[int] = set()
        if part == "optimizer":  # of an fp32 model, the parameters of the optimizer are views of the weights
            seen = {storage._cdata for other in ("weights", "gradients") for storage in self._storages(other)}
        for tensor in self._tensors(part):
            storage = tensor.untyped_storage()
            if storage._cdata not in seen and tensor.device == platform.device():
                seen.add(storage._cdata)
                yield storage

    def _tensors(self, part: str) -> Iterator[Tensor]:
        if part == "weights":
            for weight in state.local_parameters(self._chunks).values():
                yield from fp8_weights.stored(weight)
        elif part == "gradients":
            for chunk in self._chunks:
                yield from (buffer.grad_data for buffer in chunk.buffers + chunk.expert_parallel_buffers)
        else:
            yield from self._optimizer.device_tensors()

    def _copy_of(self, part: str, num_bytes: int) -> HostCopy:
        if part not in self._copies or self._copies[part].num_bytes != num_bytes:
            self._copies.pop(part, None)  # before room is made for the new one
            self._copies[part] = HostCopy(num_bytes)
        return self._copies[part]


def _synchronize() -> None:
    if platform.HAS_CUDA:
        torch.cuda.synchronize()


def _empty_caches() -> None:
    """Give back what Megatron and torch keep for reuse."""
    parallel_state.get_global_memory_buffer().buffer.clear()
    if platform.HAS_CUDA:
        torch.cuda.empty_cache()
