"""Scenarios of the optimizer Muon."""

from __future__ import annotations

import numpy as np
import torch
from scenarios import OPTIMIZER, Layout, begin, build, save

from megatron_rl.actor.weights import find_holders, gather, hub_files
from megatron_rl.config.optimizer import MuonConfig
from megatron_rl.models import FAMILIES

MUON = MuonConfig(
    **OPTIMIZER.model_dump(include={"lr", "warmup_steps", "schedule", "min_lr_ratio", "weight_decay", "clip_grad"}),
    momentum=0.8,
    adam={"eps": 1e-4},
)
"""Clipping that is active, a decay that is felt, and a momentum that is partly gone after a few updates."""


def _build(rank, world_size, url, folder, layout: Layout, settings=None):
    """Of supervised training."""
    optimizer = MUON.model_copy(update=settings or {})
    return build(rank, world_size, url, folder, layout, algorithm=None, optimizer=optimizer)


def _whole(actor) -> dict[str, np.ndarray]:
    """The whole parameters by HF names on rank 0; nothing on the others."""
    holders = find_holders(actor.spec.shape, actor.mesh, actor.fused_norms)
    whole = {}
    dtype, family = getattr(torch, actor.spec.model.dtype), FAMILIES[actor.spec.shape.family]
    for tensors in hub_files(actor.spec.shape, dtype, family):
        whole |= gather(actor, actor.parameters(), tensors, holders)
    return {name: tensor.float().numpy().copy() for name, tensor in whole.items()}


def updates(rank, world_size, url, *, folder, samples, layout, num_updates, settings=None):
    """The metrics of updates on the same samples, and the whole parameters after each."""
    actor = _build(rank, world_size, url, folder, layout, settings)
    begin(actor, samples, layout, num_updates)
    metrics, parameters = [], []
    for i in range(num_updates):
        metrics.append(actor.update(i, {}))
        parameters.append(_whole(actor))
    actor.close()
    return metrics, parameters


def _two_more(actor, samples, layout):
    begin(actor, samples, layout, 2)
    metrics = [actor.update(i, {}) for i in range(2)]
    parameters = {name: p.float().numpy().copy() for name, p in actor.parameters().items()}
    actor.close()
    return metrics, parameters


def save_and_go_on(rank, world_size, url, *, folder, samples, layout, checkpoint):
    """Two updates, a checkpoint, an update that a mirror undoes, and two more."""
    actor = _build(rank, world_size, url, folder, layout)
    begin(actor, samples, layout, 2)
    for i in range(2):
        actor.update(i, {})
    save(actor, checkpoint, {"step": 2})
    mirror = actor.snapshot()
    begin(actor, samples, layout, 1)
    actor.update(0, {})
    actor.restore(mirror)
    for phase in ("weight sync", "generating", "training"):
        actor.enter(phase)
    return _two_more(actor, samples, layout)


def resume(rank, world_size, url, *, folder, samples, layout, checkpoint, again=None):
    """
    Args:
        again: where what has been read is written again.
    """
    actor = _build(rank, world_size, url, folder, layout)
    extra = actor.load(checkpoint)
    assert extra == {"step": 2}
    if again is not None:
        save(actor, again, extra)
    return _two_more(actor, samples, layout)
