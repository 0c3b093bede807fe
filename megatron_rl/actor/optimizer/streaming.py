"""Adam whose state is kept in the host's memory, or in bfloat16, and is updated in fp32 piece by piece.

An update brings each piece of the state to the device as fp32, lets Adam update it, and stores it again. If the state
is offloaded, the next piece arrives and the previous one leaves while a piece is updated, on two further streams. So a
rank needs the memory of IN_FLIGHT pieces instead of its whole state. Adam runs on the GPU, with the same kernels as
otherwise.

Invariants (tests/ranks): with the state in the host's memory, weights and state are bitwise equal to an optimizer with
everything on the GPU; moments in bfloat16 equal an optimizer that rounds them after each update. On a CPU the same
copies are made. The CUDA path has not been run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_rl.actor import platform
from megatron_rl.actor.optimizer.adam import AdamOptimizer, last_step, set_step
from megatron_rl.actor.optimizer.intervals import COPY, Interval, IntervalState, intervals
from megatron_rl.actor.optimizer.norms import Norms
from megatron_rl.actor.optimizer.rounding import Dither
from megatron_rl.config.optimizer import ADAM_MOMENTS, IN_FLIGHT, PIECE_ELEMENTS, AdamConfig
from megatron_rl.config.policy import PolicyConfig


@dataclass(frozen=True, slots=True)
class Segment:
    """The flat interval [start, stop) of a parameter, whose state lies in one piece."""

    interval: Interval
    start: int
    stop: int
    place: slice
    """The place of the state in the piece's tensors."""

    @property
    def weights(self) -> Tensor:
        return self.interval.parameter.data.view(-1)[self.start : self.stop]

    @property
    def gradients(self) -> Tensor:
        first = self.interval.start
        assert self.interval.main.grad is not None, "the gradients have been taken"
        return self.interval.main.grad.view(-1)[self.start - first : self.stop - first]


@dataclass(frozen=True, slots=True)
class StatePiece:
    """A part of the state that is updated at once."""

    segments: list[Segment]
    stored: dict[str, Tensor]
    """[PIECE_ELEMENTS] at most: ADAM_MOMENTS, and COPY unless the parameters are float32, as they are between two
    updates."""


def cut(owned: Sequence[Interval], num_elements: int) -> Iterator[list[Segment]]:
    """Cut intervals into pieces of `num_elements`; only the last piece may have fewer."""
    segments: list[Segment] = []
    filled = 0
    for interval in owned:
        start = interval.start
        while start < interval.stop:
            size = min(interval.stop - start, num_elements - filled)
            segments.append(Segment(interval, start, start + size, slice(filled, filled + size)))
            start, filled = start + size, filled + size
            if filled == num_elements:
                yield segments
                segments, filled = [], 0
    if segments:
        yield segments


class _NoCopies(TorchFunctionMode):
    """Inside the block, `float()` of a tensor in bfloat16 or float16 returns a placeholder of the same shape that needs
    the memory of one number. Megatron makes its fp32 copies with this call, and here it only stores gradients on them.
    The real copies are in `StatePiece.stored`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float and args[0].dtype in (torch.bfloat16, torch.float16):
            return args[0].new_zeros(1, dtype=torch.float32).expand(args[0].shape)
        return func(*args, **(kwargs or {}))


class StreamedAdam(AdamOptimizer):
    """Adam whose state is kept between updates in pinned memory of the host (`policy.optimizer.offload`), in
    bfloat16 (`policy.optimizer.moments`), or both."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        policy: PolicyConfig,
        total_steps: int,
        dither: Dither | None = None,
    ) -> None:
        with _NoCopies():
            super().__init__(chunks, policy, total_steps, dither)
        assert isinstance(policy.optimizer, AdamConfig)
        self._offloads = policy.optimizer.offload
        self._dtype = getattr(torch, policy.optimizer.moments)
        self._arriving, self._leaving = _Copies(), _Copies()
        self._pieces: list[tuple[MegatronOptimizer, list[StatePiece]]] = []
        for inner in self.megatron.chained_optimizers:
            owned = list(intervals(inner))
            pieces = []
            for has_copy in (False, True):  # in one piece all parameters have the same parts of the state
                alike = [interval for interval in owned if interval.has_copy == has_copy]
                pieces += [self._allocate(segments, has_copy) for segments in cut(alike, PIECE_ELEMENTS)]
            self._pieces.append((inner, pieces))
        self.weights_changed()

    def _allocate(self, segments: list[Segment], has_copy: bool) -> StatePiece:
        size = segments[-1].place.stop
        place: dict[str, Any] = {"device": platform.device()}
        if self._offloads:
            # torch rounds pinned memory up to a power of two, which a whole piece is.
            place = {"device": "cpu", "pin_memory": platform.HAS_CUDA}
        stored = {kind: torch.zeros(size, dtype=self._dtype, **place) for kind in ADAM_MOMENTS}
        if has_copy:
            stored[COPY] = torch.zeros(size, dtype=torch.float32, **place)
        return StatePiece(segments, stored)

    @torch.no_grad()
    def weights_changed(self) -> None:
        for piece, segment in self._segments():
            if segment.interval.has_copy:
                piece.stored[COPY][segment.place].copy_(segment.weights.float())

    def states(self) -> Iterator[IntervalState]:
        for piece, segment in self._segments():
            name = self._names[id(segment.interval.parameter)]
            tensors = {kind: tensor[segment.place] for kind, tensor in piece.stored.items()}
            yield IntervalState(name, segment.start, segment.stop, tensors)

    def device_tensors(self) -> Iterator[Tensor]:
        for _, pieces in self._pieces:
            for piece in pieces:
                yield from (tensor for tensor in piece.stored.values() if tensor.device == platform.device())

    def _segments(self) -> Iterator[tuple[StatePiece, Segment]]:
        for _, pieces in self._pieces:
            for piece in pieces:
                yield from ((piece, segment) for segment in piece.segments)

    def _apply(self, norms: Mapping[int, Norms]) -> None:
        for inner, pieces in self._pieces:
            self._stream(inner, pieces, norms[id(inner)])
        for chunk in self._chunks:
            if chunk.ddp_config.use_distributed_optimizer and not chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync()

    def _stream(self, inner: MegatronOptimizer, pieces: Sequence[StatePiece], norms: Norms) -> None:
        if not self._offloads:
            for piece in pieces:
                here = _floats(piece.stored)
                self._step(inner, piece, here, norms)
                for kind in ADAM_MOMENTS:  # a copy is fp32, and has been updated where it is
                    piece.stored[kind].copy_(here[kind])
            return
        coming, leaving = deque(pieces), deque[_Transfer]()
        arriving: deque[_Transfer] = deque()
        for piece in pieces:
            while coming and len(arriving) < 2:  # the piece that is updated now, and the next one
                while len(leaving) + len(arriving) >= IN_FLIGHT:
                    leaving.popleft().wait()
                arriving.append(self._bring(coming.popleft()))
            here = _floats(arriving.popleft().arrived())
            self._step(inner, piece, here, norms)
            leaving.append(self._put(piece, here))
        for transfer in leaving:
            transfer.wait()

    def _bring(self, piece: StatePiece) -> _Transfer:
        tensors = {kind: torch.empty_like(x, device=platform.device()) for kind, x in piece.stored.items()}
        with self._arriving.after_computation():
            for kind, tensor in tensors.items():
                tensor.copy_(piece.stored[kind], non_blocking=True)
        return _Transfer(tensors, self._arriving.event())

    def _step(self, inner: MegatronOptimizer, piece: StatePiece, here: dict[str, Tensor], norms: Norms) -> None:
        """Let Adam update a piece that is on the device."""
        adam, updated = inner.optimizer, []
        groups = [group["params"] for group in adam.param_groups]
        for group in adam.param_groups:
            group["params"] = []
        for segment in piece.segments:
            state = {kind: here[kind][segment.place] for kind in ADAM_MOMENTS}
            value = here[COPY][segment.place] if segment.interval.has_copy else segment.weights.detach()
            value.grad = segment.gradients
            group = adam.param_groups[segment.interval.group]
            group["params"].append(value)
            adam.state[value] = dict(state)
            set_step(adam, adam.state[value], group, self.num_updates - 1)  # Adam itself counts this one
            updated.append((segment, value, state))
        adam.step()
        for segment, value, state in updated:
            if segment.interval.has_copy:
                self._write(segment.interval, segment.start, value, norms)
            if norms.counts(segment.interval):
                settings = adam.param_groups[segment.interval.group]
                norms.add(value, last_step(value, state, settings, self.num_updates))
        adam.state.clear()
        for group, mains in zip(adam.param_groups, groups, strict=True):
            group["params"] = mains

    def _put(self, piece: StatePiece, here: dict[str, Tensor]) -> _Transfer:
        tensors = {kind: here[kind].to(stored.dtype) for kind, stored in piece.stored.items()}
        with self._leaving.after_computation():
            for kind, stored in piece.stored.items():
                stored.copy_(tensors[kind], non_blocking=True)
        return _Transfer(tensors, self._leaving.event())


def _floats(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {kind: tensor.float() for kind, tensor in tensors.items()}


class _Copies:
    """A stream for copies between host and device during the computation. On a CPU they are made at once."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        if platform.HAS_CUDA:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # it has no types

    def after_computation(self) -> AbstractContextManager[object]:
        """The block whose copies start after the kernels that are already queued."""
        if self._stream is None:
            return nullcontext()
        # The allocator may have given memory that earlier kernels still use.
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def event(self) -> torch.cuda.Event | None:
        """It happens when all copies so far are made."""
        return None if self._stream is None else self._stream.record_event()


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A piece on its way to the device, or back. It holds the piece's memory on the device, because the allocator does
    not know about the copies."""

    tensors: dict[str, Tensor]
    event: torch.cuda.Event | None

    def arrived(self) -> dict[str, Tensor]:
        """The piece, for kernels that are started from now on."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        return self.tensors

    def wait(self) -> None:
        """Wait until the copies are made."""
        if self.event is not None:
            self.event.synchronize()
