"""Scenarios that count the memory of a trainer rank."""

from __future__ import annotations

import weakref

import torch
from scenarios import COEFFICIENTS, OPTIMIZER, begin, build, save
from shares import share_of

from megatron_rl.actor import platform
from megatron_rl.actor.fp8_weights import stored
from megatron_rl.actor.packing import pack


def allocated(rank, world_size, url, *, folder, samples, layout, optimizer=OPTIMIZER, **settings):
    """The bytes of this rank's weights, gradients and optimizer state after an update, by their storages. `settings`
    are more keys of `policy`."""
    actor = build(rank, world_size, url, folder, layout, optimizer=optimizer, **settings)
    begin(actor, samples, layout, 1)
    actor.update(0, COEFFICIENTS)
    parameters = [p for chunk in actor.chunks for p in chunk.parameters()]
    held = [tensor for p in parameters for tensor in stored(p.data)]
    inner = [chained.optimizer for chained in actor.optimizer.megatron.chained_optimizers]
    owned = [p for optimizer in inner for group in optimizer.param_groups for p in group["params"]]
    weights = _storages(held)
    trained = [p for p in parameters if p.requires_grad]
    gradients = _storages([*(p.main_grad for p in trained), *(p.grad for p in owned if p.grad is not None)])
    kept = [(name, tensor) for one in inner for state in one.state.values() for name, tensor in state.items()]
    moments = _storages(tensor for name, tensor in kept if name != "step")
    copies = {key: size for key, size in _storages(p.data for p in owned).items() if key not in weights}
    actor.close()
    return sum(weights.values()), sum(gradients.values()), sum(moments.values()) + sum(copies.values())


def updated(rank, world_size, url, *, folder, samples, layout, optimizer):
    """The metrics of an update."""
    actor = build(rank, world_size, url, folder, layout, optimizer=optimizer)
    begin(actor, samples, layout, 1)
    metrics = actor.update(0, COEFFICIENTS)
    actor.close()
    return metrics


def _storages(tensors) -> dict[int, int]:
    """The bytes of every storage, by its address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


class Saved:
    """A tensor that autograd holds until it frees the graph."""

    def __init__(self, tensor):
        self.tensor = tensor


def saved_activations(rank, world_size, url, *, folder, samples, layout, **settings):
    """What autograd holds on this rank after one forward pass over one micro-batch: the bytes of all storages but those
    of the parameters, and the number of tokens of the row."""
    actor = build(rank, world_size, url, folder, layout, **settings)
    [[batch]] = pack(share_of([[samples]], alignment=layout.alignment), vision=actor.spec.shape.vision)
    parameters = _storages(p.data for chunk in actor.chunks for p in chunk.parameters())
    saved, outputs = weakref.WeakSet(), []

    def keep(tensor):
        held = Saved(tensor)
        saved.add(held)
        return held

    def loss(i, logp_T, entropy_T, support_TK):
        return logp_T.sum(), logp_T

    for chunk in actor.chunks:  # the outputs hold the graph
        chunk.register_forward_hook(lambda module, arguments, output: outputs.append(output))
    of_head = actor.schedule.head_share
    actor.schedule.head_share = lambda *arguments: outputs.append(of_head(*arguments)) or outputs[-1]
    with platform.running(), torch.autograd.graph.saved_tensors_hooks(keep, lambda held: held.tensor):
        logps = actor.schedule.run([batch], loss, forward_only=True)
    assert all(tensor.requires_grad for tensor in (*outputs, *logps))
    counted = _storages(held.tensor for held in saved)
    actor.close()
    return sum(size for key, size in counted.items() if key not in parameters), len(batch.ids_T)


def lend(rank, world_size, url, *, folder, samples, layout, target, enters, lora=None):
    """Updates with a checkpoint after each; if `enters`, the rank goes through all phases before and after each.

    Returns:
        The metrics of the updates; the bytes of this rank's storages by phase; and the refusals of the phase in which
        the rank holds nothing.
    """
    actor = build(rank, world_size, url, folder, layout, lora=lora)
    sizes, refusals, metrics = {}, [], []

    def go_round():
        before = {name: p.clone() for name, p in actor.parameters().items()}
        for phase in ("weight sync", "training", "weight sync", "generating", "weight sync", "training", "generating"):
            actor.enter(phase)
            sizes.setdefault(phase, held_bytes(actor))
            if phase == "weight sync":
                assert all(torch.equal(p, before[name]) for name, p in actor.parameters().items())
        calls = {
            "begin": lambda: begin(actor, samples, layout, 1),
            "update": lambda: actor.update(0, COEFFICIENTS),
            "save": lambda: actor.save(target / "refused", {}),
            "load": lambda: actor.load(target / "0"),
            "snapshot": actor.snapshot,
        }
        for name, call in calls.items():
            try:
                call()
            except RuntimeError as error:
                refusals.append((name, str(error)))
        actor.enter("training")

    for number in range(3):
        if enters:
            go_round()
        begin(actor, samples, layout, 1)
        metrics.append(actor.update(0, COEFFICIENTS))
        sizes["after an update"] = held_bytes(actor)
        save(actor, target / str(number), {})
    actor.close()
    return metrics, sizes, refusals


def held_bytes(actor) -> int:
    """The bytes of all storages of the model, its gradients and its optimizer."""
    tensors = [tensor for weight in actor.parameters().values() for tensor in stored(weight)]
    for chunk in actor.chunks:
        tensors += [p.main_grad for p in chunk.parameters() if p.requires_grad]
    tensors += actor.optimizer.device_tensors()
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
