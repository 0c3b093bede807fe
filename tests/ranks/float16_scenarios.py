"""Scenarios of a model in float16, whose gradients overflow where they are told to."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from megatron.core.utils import unwrap_model
from scenarios import _error, begin, build, save

from megatron_rl.actor.overflow import require_finite_weights
from megatron_rl.actor.weights import load_weights


def _state(actor) -> dict:
    """This rank's weights, and their fp32 copies and moments."""
    found = {("weights", name): p.detach().clone() for name, p in actor.parameters().items()}
    for held in actor.optimizer.states():
        found |= {(kind, held.name, held.start): tensor.clone() for kind, tensor in held.tensors.items()}
    return found


def _is_equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def updates(
    rank, world_size, url, *, folder, samples, layout, steps, spoilt=(), checkpoint=None, resumed=False, **settings
):
    """Steps on the same samples.

    Args:
        steps: the number of updates of each step.
        spoilt: the updates whose gradient of layer 1's output is infinite with the loss scale that they begin with.
        checkpoint: with `resumed`, what the first step continues; otherwise it is written after the first step. Then
            the mirror of that time is restored after one more update.

    Returns:
        (the metrics of each update, whether it has changed weights or optimizer, the state at the end, the number of
        updates that were made)
    """
    actor = build(rank, world_size, url, folder, layout, **settings)
    if resumed:
        actor.load(checkpoint)
    metrics, changed = [], []
    for step, num_updates in enumerate(steps):
        if checkpoint and not resumed and step == 1:
            save(actor, checkpoint, {})
            mirror = actor.snapshot()
            begin(actor, samples, layout, 1)
            with _spoilt(actor):
                actor.update(0, {})
            actor.update(0, {})
            actor.restore(mirror)
        begin(actor, samples, layout, num_updates)
        for i in range(num_updates):
            before = _state(actor)
            with _spoilt(actor) if len(metrics) in spoilt else ExitStack():
                metrics.append(actor.update(i, {}))
            changed.append(not _is_equal(before, _state(actor)))
    state = {key: tensor.float().numpy() for key, tensor in _state(actor).items()}
    made = actor.optimizer.num_updates
    actor.close()
    return metrics, changed, state, made


def _spoilt(actor) -> ExitStack:
    """Inside the block the gradient of the output of layer 1 is infinite with the present loss scale."""
    scale = actor.optimizer.loss_scale
    spoilt = scale.value

    def hook(module, arguments, output):
        hidden = output[0]
        if hidden.requires_grad:
            factor = float("inf") if scale.value == spoilt else 1.0
            hidden.register_hook(lambda gradient: gradient * factor)

    hooks = ExitStack()
    for chunk in actor.chunks:
        for layer in unwrap_model(chunk).decoder.layers:
            if layer.layer_number == 2:
                hooks.callback(layer.register_forward_hook(hook).remove)
    return hooks


def refused(rank, world_size, url, *, folder, samples, layout, spoilt=False, **settings):
    """The error of an update, or of the look at the weights after it, and whether the update has changed anything."""
    actor = build(rank, world_size, url, folder, layout, **settings)
    begin(actor, samples, layout, 1)
    before = _state(actor)
    with _spoilt(actor) if spoilt else ExitStack():
        error = _error(lambda: actor.update(0, {}))
    changed = not _is_equal(before, _state(actor))
    if error == "no error":
        error = _error(lambda: require_finite_weights(actor))
    actor.close()
    return error, changed


def refused_head(rank, world_size, url, *, folder, samples, layout, **settings):
    """The error of an update whose gradient of the multi-token head is NaN, and whether it has changed anything."""
    actor = build(rank, world_size, url, folder, layout, multi_token="train", **settings)
    begin(actor, samples, layout, 1)
    before = _state(actor)

    def hook(module, arguments, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("nan"))

    [layer] = [
        module
        for chunk in actor.chunks
        for name, module in chunk.named_modules()
        if name.endswith("mtp.layers.0.eh_proj")
    ]
    layer.register_forward_hook(hook)
    error = _error(lambda: actor.update(0, {}))
    changed = not _is_equal(before, _state(actor))
    actor.close()
    return error, changed


def unloadable(rank, world_size, url, *, folder, layout, weights):
    """The error of loading weights into a model."""
    actor = build(rank, world_size, url, folder, layout)
    error = _error(lambda: load_weights(actor, weights))
    actor.close()
    return error
