"""The norm of a gradient that is given."""

from __future__ import annotations

import zlib

import critic_scenarios
import numpy as np
import scenarios
import torch
from scenarios import OPTIMIZER

from megatron_rl.actor import platform
from megatron_rl.actor.optimizer.intervals import COPY
from megatron_rl.actor.optimizer.rounding import Dither
from megatron_rl.actor.state import named_parameters
from megatron_rl.models import slices


def gradient_of(name: str, extents: tuple[int, ...]) -> np.ndarray:
    """float32 [extents]: the same for all that hold the tensor, with magnitudes of 1e-6 to 1e2."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return (random.standard_normal(extents) * 10.0 ** random.uniform(-6, 2, extents)).astype(np.float32)


def give_gradients(trainer, extents) -> None:
    """Set every gradient to `gradient_of`."""
    gradients = {name: parameter.main_grad.zero_() for name, parameter in named_parameters(trainer.chunks)}
    for shard in trainer.shards:
        if shard.local_name in gradients:  # the bias of a router has no gradient
            part = gradients[shard.local_name][slices(shard.local_box)]
            values = gradient_of(shard.hf_name, extents[shard.hf_name])[slices(shard.hf_box)]
            part.copy_(torch.from_numpy(values).view(part.shape))


def rounded_weights(rank, world_size, url, *, folder, layout, extents, settings):
    """The numbers of weights, of those that are not their copies with the dither, and of those that are not their
    copies to the nearest number, after an update of this rank's part."""
    optimizer = OPTIMIZER.model_copy(update=settings)
    trainer = scenarios.build(rank, world_size, url, folder, layout, optimizer=optimizer)
    give_gradients(trainer, extents)
    live = dict(named_parameters(trainer.chunks))
    extents, dtype = {name: tuple(one.shape) for name, one in live.items()}, trainer.chunks[0].config.params_dtype
    dither = Dither(trainer.shards, extents, dtype=dtype)
    with platform.running():
        trainer.optimizer.update(trainer.optimizer.gradient_norm(), is_last=True)
        counted = np.zeros(3, np.int64)
        for state in trainer.optimizer.states():
            weights, copies = live[state.name].data.view(-1)[state.start : state.stop], state.tensors[COPY]
            others = dither.rounded(copies, state.name, state.start), copies.to(dtype)
            counted += [len(copies), *(int((weights != one).sum()) for one in others)]
    trainer.close()
    return counted.tolist()


def clipped_norm(rank, world_size, url, *, folder, layout, extents, trains_critic=False, settings=None, **others):
    """Let the optimizer clip the gradient of `gradient_of`.

    Args:
        extents: those of every HF tensor, by name.
        trains_critic: the model is a critic.
        settings: of the optimizer, beside OPTIMIZER.

    Returns:
        The norm that is reported; and the least and the largest quotient of an element after clipping and before, of
        this rank.
    """
    if trains_critic:
        trainer = critic_scenarios.build(rank, world_size, url, folder, layout)
    else:
        optimizer = OPTIMIZER.model_copy(update=settings or {})
        trainer = scenarios.build(rank, world_size, url, folder, layout, optimizer=optimizer, **others)
    give_gradients(trainer, extents)
    optimizer = trainer.optimizer
    with platform.running():
        norm = optimizer.gradient_norm()
        mains = [main for inner in optimizer.megatron.chained_optimizers for main in inner.get_parameters()]
        clipped = [main.grad for main in mains]
        before = [gradient.double() for gradient in clipped]
        optimizer.update(norm, is_last=True)
        quotients = torch.cat([(new / old)[old != 0] for new, old in zip(clipped, before, strict=True)])
    trainer.close()
    return norm, float(quotients.min()), float(quotients.max())
