"""Builds the optimizer of the kind that the configuration names."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel

from megatron_rl.actor import platform
from megatron_rl.actor.optimizer.adam import AdamOptimizer
from megatron_rl.actor.optimizer.base import Optimizer
from megatron_rl.actor.optimizer.matrices import Place
from megatron_rl.actor.optimizer.muon import MuonOptimizer
from megatron_rl.actor.optimizer.rounding import Dither
from megatron_rl.actor.optimizer.streaming import StreamedAdam
from megatron_rl.actor.state import named_parameters
from megatron_rl.config.optimizer import MuonConfig
from megatron_rl.config.policy import PolicyConfig
from megatron_rl.models import megatron_shards


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], policy: PolicyConfig, total_steps: int, place: Place
) -> Optimizer:
    """Build the optimizer of this rank, as `policy.optimizer` says. Collective: every rank must call it.

    Args:
        chunks: one model for each virtual stage.
        total_steps: the optimizer steps of the run, for the learning rate's schedule.
        place: the model, and this rank's part of it.

    Raises:
        ValueError: a setting of `policy.megatron.optimizer` is unknown or refused.
    """
    dither = None
    config = chunks[0].config
    if (config.bf16 or config.fp16) and policy.optimizer.rounding == "dithered":
        live = {name: tuple(parameter.shape) for name, parameter in named_parameters(chunks)}
        dither = Dither(megatron_shards(*place), live, platform.device(), config.params_dtype)
    if isinstance(policy.optimizer, MuonConfig):
        return MuonOptimizer(chunks, policy, total_steps, place, dither)
    kind = StreamedAdam if policy.optimizer.is_streamed else AdamOptimizer
    return kind(chunks, policy, total_steps, dither)
