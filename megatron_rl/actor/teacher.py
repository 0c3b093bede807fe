"""A frozen teacher on the policy's ranks: a second model of any family and size, split as the policy is.

Its weights are in the nodes' memory, and on the devices while it computes. Invariants (tests/ranks): its log-probs do
not depend on the layout; a teacher with the policy's weights gives the policy's log-probs to the bit, because the same
code computes both.

Shape letters: T packed tokens of a micro-batch, K tokens at each position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.actor import platform
from megatron_rl.actor.attention import can_share_prompts
from megatron_rl.actor.model import build_model, uses_fused_layers
from megatron_rl.actor.packing import Microbatch
from megatron_rl.actor.step import Schedule
from megatron_rl.actor.trainer import MegatronTrainer
from megatron_rl.actor.weights import load_weights
from megatron_rl.config.policy import ModelConfig, PolicyConfig
from megatron_rl.models import megatron_shards, read_shape


class FrozenTeacher(MegatronTrainer):
    """The teacher's part of a rank. It has no optimizer and no state to save.

    Args:
        policy: the trainer of the rank, which has joined the groups of ranks.
        model: the teacher's folder.

    Raises:
        ValueError: the folder holds no model that the policy's mesh divides.
    """

    role = "teacher"

    def __init__(self, policy: MegatronTrainer, model: ModelConfig) -> None:
        shape, parallel, own = read_shape(model.path), policy.spec.policy.parallel, policy.spec.policy
        if shape.num_layers != policy.spec.shape.num_layers:
            parallel = parallel.model_copy(update={"layers": None})
        settings = PolicyConfig(parallel=parallel, optimizer=own.optimizer, megatron=own.megatron)
        self.spec = replace(policy.spec, shape=shape, model=model, policy=settings, teacher=None)
        self.rank, self.mesh, self.agreement = policy.rank, parallel.mesh, policy.agreement
        self.fused_norms = uses_fused_layers(model, shape, parallel.context)
        self.shards = megatron_shards(shape, self.mesh, self.rank, self.fused_norms)
        policys = policy.spec.shape, policy.fused_norms, self.mesh.context
        if can_share_prompts(*policys) and not can_share_prompts(shape, self.fused_norms, self.mesh.context):
            raise ValueError(
                f"{model.path}: the policy's rows hold the prompt of several answers once, and the teacher's layers "
                "cannot read it so; set algorithm.distillation.by to engine"
            )
        _, stage, _ = self.mesh.coordinates(self.rank)
        with platform.running():
            self.chunks = build_model(shape, model, settings, stage, is_frozen=True)
            for chunk in self.chunks:  # Megatron multiplies frozen weights in another way, with other rounding
                chunk.requires_grad_(True)
            context = policy.schedule.context
            self.schedule = Schedule(self.chunks, shape, self.spec.temperature, (), context, self.spec.forbidden)
        load_weights(self, model.weights or model.path)
        self._host = {name: weight.detach().cpu() for name, weight in self.parameters().items()}
        self._leave()

    def weights_changed(self) -> None:
        """There are no other copies of its weights."""

    def log_probs(self, rows: Sequence[Microbatch]) -> list[Tensor]:
        """The log-probs of the sampled tokens, [T] of each row, or of the row's support, [T, K]. Only the last pipeline
        stage has them; on the others the list is empty."""

        def keep(i: int, logp_T: Tensor, _: Tensor | None, support_TK: Tensor | None) -> tuple[Tensor, Tensor]:
            return logp_T.new_zeros(()), logp_T if support_TK is None else support_TK

        rows = [replace(row, routes=None) for row in rows]
        with self._on_device(), platform.running(), torch.no_grad():
            found: list[Tensor] = self.schedule.run(rows, keep, forward_only=True)
        return found

    def top(self, rows: Sequence[Microbatch], k: int) -> list[Tensor]:
        """Its most probable tokens; see `Schedule.top`."""
        with self._on_device():
            return self.schedule.top([replace(row, routes=None) for row in rows], k)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        for name, weight in self.parameters().items():
            weight.data = self._host[name].to(platform.device(), non_blocking=True)
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        for name, weight in self.parameters().items():
            weight.data = self._host[name]
