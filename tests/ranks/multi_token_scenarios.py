"""What trainer processes with a multi-token head do; each function is called on every rank of a world."""

from __future__ import annotations

from scenarios import begin, build, meet, save

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.spec import ActorSpec
from megatron_rl.actor.weights import export_hf, gather_gradient, load_weights
from megatron_rl.algorithms import SupervisedObjective
from megatron_rl.config.optimizer import AdamConfig
from megatron_rl.models import read_shape


def update_once(rank, world_size, url, *, folder, model, policy, shares):
    """The metrics of one update, and on rank 0 the gradient, which nothing has clipped."""
    spec = ActorSpec(
        shape=policy.adapted(read_shape(folder)),
        model=model,
        policy=policy.model_copy(update={"optimizer": AdamConfig(clip_grad=0.0)}),
        objective=SupervisedObjective(),
        temperature=1.0,
        total_steps=1,
        seed=0,
    )
    actor = MegatronActor(spec, rank=rank, world_size=world_size, store=meet(rank, world_size, url))
    load_weights(actor, folder)
    actor.begin(shares[actor.mesh.coordinates(rank)[2]], {})
    metrics = actor.update(0, {})
    gradient = {name: tensor.numpy() for name, tensor in gather_gradient(actor).items()}
    actor.close()
    return metrics, gradient


def train_and_save(rank, world_size, url, *, folder, samples, layout, checkpoint, target, num_updates=3):
    """The metrics of each update; then a checkpoint, and an export."""
    actor = build(rank, world_size, url, folder, layout, multi_token="train")
    begin(actor, samples, layout, num_updates)
    metrics = [actor.update(i, {}) for i in range(num_updates)]
    save(actor, checkpoint, {})
    export_hf(actor, target)
    actor.close()
    return metrics


def sent(rank, world_size, url, *, folder, layout):
    """The extents of what a push sends."""
    actor = build(rank, world_size, url, folder, layout, multi_token="train")
    extents = {name: tuple(tensor.shape) for name, tensor in actor.sent(actor.spec.shape.served).items()}
    actor.close()
    return extents
