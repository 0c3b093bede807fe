"""What a trainer rank keeps between two updates: what training changes, and the optimizer's state of it. Checkpoints
and mirrors hold this."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor import state
from megatron_rl.actor.checkpoint import Part
from megatron_rl.actor.optimizer.base import Optimizer
from megatron_rl.actor.optimizer.fill import Target
from megatron_rl.actor.optimizer.intervals import IntervalState
from megatron_rl.convert.forms import open_chunks
from megatron_rl.convert.manifest import WEIGHTS
from megatron_rl.convert.pieces import clip, interval_view, pieces_of, written_shards
from megatron_rl.models import slices
from megatron_rl.types import Mesh, ModelShape


class TrainingState:
    def __init__(
        self, chunks: state.Chunks, optimizer: Optimizer, shape: ModelShape, mesh: Mesh, rank: int, fused_norms: bool
    ) -> None:
        self._chunks, self._optimizer = chunks, optimizer
        self._shape, self._mesh, self._rank, self._fused_norms = shape, mesh, rank, fused_norms

    def weights(self) -> dict[str, Tensor]:
        """What training changes, by the names of `state.local_parameters`: all parameters, or the adapters and the
        value head."""
        parameters = state.local_parameters(self._chunks)
        if self._shape.adapters is None:
            return parameters
        return {name: parameters[name] for name, _ in state.trained_parameters(self._chunks)}

    def targets(self) -> list[Target]:
        """What a checkpoint fills."""
        weights = self.weights()
        targets = [Target(WEIGHTS, name, tuple(p.shape), 0, p.view(-1)) for name, p in weights.items()]
        for held in self._optimizer.states():
            extents = tuple(weights[held.name].shape)
            targets += [Target(kind, held.name, extents, held.start, flat) for kind, flat in held.tensors.items()]
        return targets

    def parts(self) -> Iterator[Part]:
        """What this rank writes into a checkpoint: of each parameter the interval whose optimizer state it has. A
        buffer has no such state; the first of its data-parallel ranks writes it."""
        weights, trained = self.weights(), {name for name, _ in state.trained_parameters(self._chunks)}
        held_of: dict[str, list[IntervalState]] = {}
        for held in self._optimizer.states():
            held_of.setdefault(held.name, []).append(held)
        if self._mesh.coordinates(self._rank)[2] == 0 and self._mesh.context_rank(self._rank) == 0:
            buffers = weights.keys() - trained
            held_of |= {name: [IntervalState(name, 0, weights[name].numel(), {})] for name in buffers}
        written = written_shards(self._shape, self._mesh, self._rank, self._fused_norms)
        for name, pieces in pieces_of(written, open_chunks(self._shape)).items():
            if (weight := weights.get(name)) is None:  # it is frozen
                continue
            extents = tuple(weight.shape)
            for held in held_of.get(name, ()):
                for piece in (part for whole in pieces for part in clip(whole, extents, held.start, held.stop)):
                    yield Part(WEIGHTS, piece, weight[slices(piece.local_box)])
                    for kind, flat in held.tensors.items():
                        yield Part(kind, piece, interval_view(flat, held.start, extents, piece.local_box))

    def snapshot(self) -> np.ndarray:
        """All of it as bytes, which `restore` takes."""
        buffer = io.BytesIO()
        training_state = {
            "weights": self.weights(),
            "optimizer": [held.tensors for held in self._optimizer.states()],
            "num_updates": self._optimizer.num_updates,
            "loss_scale": self._optimizer.scale_state(),
            "random": state.random_state(),
        }
        torch.save(training_state, buffer)
        return np.frombuffer(buffer.getbuffer(), np.uint8)

    def restore(self, snapshot: np.ndarray) -> None:
        """Restore what `snapshot` returned on the same rank of the same mesh. The optimizer keeps the settings of this
        run."""
        saved = torch.load(io.BytesIO(snapshot.data), map_location="cpu", weights_only=True)
        targets = [self.weights(), *(held.tensors for held in self._optimizer.states())]
        for tensors, values in zip(targets, [saved["weights"], *saved["optimizer"]], strict=True):
            for name, tensor in tensors.items():
                tensor.copy_(values[name])
        self._optimizer.resume_at(saved["num_updates"], saved["loss_scale"])
        state.restore_random(saved["random"])
