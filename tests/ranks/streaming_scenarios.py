"""Scenarios of an optimizer whose state is streamed."""

from __future__ import annotations

import weakref
from dataclasses import replace
from unittest.mock import patch

import torch
from memory_scenarios import held_bytes
from scenarios import COEFFICIENTS, OPTIMIZER, _error, begin, build, save

from megatron_rl.actor.optimizer import streaming
from megatron_rl.actor.optimizer.adam import AdamOptimizer
from megatron_rl.actor.optimizer.intervals import intervals

NUM_ELEMENTS = 1000
"""Of a piece: a fraction of the larger parameters."""
small_pieces = patch.object(streaming, "PIECE_ELEMENTS", NUM_ELEMENTS)


def _build(rank, world_size, url, folder, layout, settings):
    actor = build(rank, world_size, url, folder, layout, optimizer=OPTIMIZER.model_copy(update=settings))
    assert (type(actor.optimizer) is AdamOptimizer) == (not settings)
    return actor


def _state(actor) -> dict:
    """{(kind, name): flat tensor} of this rank, with the weights."""
    parts: dict = {}
    for held in actor.optimizer.states():
        for kind, tensor in held.tensors.items():
            parts.setdefault((kind, held.name), []).append((held.start, tensor.clone()))
    found = {
        key: torch.cat([tensor for _, tensor in sorted(values, key=lambda v: v[0])]) for key, values in parts.items()
    }
    return found | {("weights", name): p.detach().flatten().clone() for name, p in actor.parameters().items()}


@small_pieces
def updates(rank, world_size, url, *, folder, samples, layout, settings, rounds=False, target=None):
    """Three steps of two updates, with all that may happen between steps if the state is streamed, and a checkpoint.

    Args:
        rounds: round the moments to bfloat16 after each update.

    Returns:
        The metrics of each update; and this rank's weights and state after each step.
    """
    actor = _build(rank, world_size, url, folder, layout, settings)
    metrics, states = [], []
    for _ in range(3):
        begin(actor, samples, layout, 2)
        for i in range(2):
            metrics.append(actor.update(i, COEFFICIENTS))
            if rounds:
                for held in actor.optimizer.states():
                    for kind in ("exp_avg", "exp_avg_sq"):
                        held.tensors[kind].copy_(held.tensors[kind].bfloat16())
        states.append(_state(actor))
        if settings:
            _disturb(actor, samples, layout)
    if target is not None:
        save(actor, target, {})
    actor.close()
    return metrics, states


def _disturb(actor, samples, layout) -> None:
    """An update that is refused, the phases of shared GPUs, and a restored mirror change nothing."""
    before = _state(actor)
    begin(actor, [replace(sample, advantage=1e30) for sample in samples], layout, 1)
    error = _error(lambda: actor.update(0, COEFFICIENTS))
    assert "the gradient norm is" in error, error
    mirror = actor.snapshot()
    begin(actor, samples, layout, 1)
    actor.update(0, COEFFICIENTS)
    actor.restore(mirror)
    for phase in ("weight sync", "generating"):
        actor.enter(phase)
    assert held_bytes(actor) == 0
    actor.enter("training")
    after = _state(actor)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@small_pieces
def resume(rank, world_size, url, *, folder, samples, layout, settings, checkpoint):
    """The metrics of an update after a checkpoint was loaded, and the weights and the state after it."""
    actor = _build(rank, world_size, url, folder, layout, settings)
    actor.load(checkpoint)
    begin(actor, samples, layout, 1)
    metrics = actor.update(0, COEFFICIENTS)
    state = _state(actor)
    actor.close()
    return metrics, state


@small_pieces
def memory(rank, world_size, url, *, folder, samples, layout, settings):
    """The bytes of the state that is stored on this rank; the largest number of bytes that pieces had on the device in
    an update; and the number of pieces."""
    actor = _build(rank, world_size, url, folder, layout, settings)
    optimizer = actor.optimizer
    for inner in optimizer.megatron.chained_optimizers:
        for interval in intervals(inner):
            assert not interval.has_copy or interval.main.untyped_storage().nbytes() == 4
    alive: weakref.WeakSet = weakref.WeakSet()
    most = 0
    bring, step = optimizer._bring, optimizer._step

    def watched_bring(piece):
        arrival = bring(piece)
        for tensor in arrival.tensors.values():
            alive.add(tensor.untyped_storage())
        return arrival

    def watched_step(inner, piece, here, norms):
        nonlocal most
        for tensor in here.values():
            alive.add(tensor.untyped_storage())
        most = max(most, sum({storage._cdata: storage.nbytes() for storage in alive}.values()))
        step(inner, piece, here, norms)

    optimizer._bring, optimizer._step = watched_bring, watched_step
    begin(actor, samples, layout, 1)
    actor.update(0, COEFFICIENTS)
    pieces = [piece for _, pieces in optimizer._pieces for piece in pieces]
    stored = sum(tensor.untyped_storage().nbytes() for piece in pieces for tensor in piece.stored.values())
    actor.close()
    return stored, most, len(pieces)
