"""The gradient of a mini-batch, and the metrics that come with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_rl.actor.moe.router import (
    describe_auxiliary_losses,
    describe_load,
    describe_replay,
    start_counting,
    total_load,
    total_replay,
)
from megatron_rl.actor.multi_token import HeadLoss
from megatron_rl.actor.overflow import reduce_or_locate
from megatron_rl.actor.packing import Microbatch
from megatron_rl.actor.step import MicrobatchLoss
from megatron_rl.algorithms.objective import Metric
from megatron_rl.types import Metrics

if TYPE_CHECKING:
    from megatron_rl.actor.trainer import MegatronTrainer


def differentiate(
    trainer: MegatronTrainer,
    microbatches: Sequence[Microbatch],
    loss: MicrobatchLoss,
    problems: list[str],
    has_auxiliary_losses: bool,
) -> tuple[Metrics, Tensor | None, HeadLoss | None]:
    """Compute the gradient of a mini-batch, in place of an earlier one. Collective: every rank must call it.

    Args:
        problems: where `loss` writes what it finds; it is empty.
        has_auxiliary_losses: whether the routers have losses of their own, whose shares of experts are known.

    Returns:
        The metrics; the load of the experts, if there are any; and the loss of a multi-token head, if one is trained.

    Raises:
        ValueError: a log-prob or the loss is not finite.
    """
    for chunk in trainer.chunks:
        chunk.zero_grad_buffer()
    trainer.optimizer.megatron.zero_grad()
    start_counting(trainer.chunks)
    head_loss = HeadLoss.of(microbatches, trainer.spec.num_likeliest) if trainer.spec.shape.multi_token else None
    results = trainer.schedule.run(microbatches, loss, head_loss=head_loss)
    reports = results if trainer.reports_metrics else []
    if head_loss and trainer.reports_metrics:
        reports = [*reports, *head_loss.reports]
    load_RE = total_load(trainer.chunks)
    if load_RE is not None:
        reports = [*reports, *_describe_experts(trainer, load_RE)]
    if has_auxiliary_losses:
        reports = [*reports, describe_auxiliary_losses(trainer.chunks)]
    return reduce_or_locate(trainer, reports, problems, microbatches), load_RE, head_loss


def _describe_experts(trainer: MegatronTrainer, load_RE: Tensor) -> list[dict[str, Metric]]:
    """The metrics of the experts of this pipeline stage, which one of its ranks reports. All its ranks call this
    together."""
    num_mixtures = trainer.spec.shape.num_mixtures
    reports = [describe_load(load_RE, num_mixtures)]
    if trainer.spec.policy.routing_replay:
        reports.append(describe_replay(total_replay(trainer.chunks), load_RE, num_mixtures))
    tensor, _, data = trainer.mesh.coordinates(trainer.rank)
    is_first_of_stage = tensor == data == trainer.mesh.context_rank(trainer.rank) == 0
    return reports if is_first_of_stage else []
