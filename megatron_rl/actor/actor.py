"""The policy's trainer: one of these lives in every trainer process, and all are called together.

Every public method is a collective: all ranks call it in the same order, and all return the same numbers or
raise the same error. Invariants (tests/dist): loss and gradient norm do not depend on the layout or on the
number of micro-batches; resume is bitwise; a step with a number that is not finite changes no weight.

Shape letters: T packed tokens of a micro-batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from megatron_rl.actor import checkpoint, platform, state
from megatron_rl.actor.agreement import Agreement
from megatron_rl.actor.model import build_model, uses_fused_layers
from megatron_rl.actor.optimizer import apply_gradients, build_optimizer, gradient_norm
from megatron_rl.actor.packing import Microbatch, TrainSample, pack
from megatron_rl.actor.spec import ActorSpec
from megatron_rl.actor.step import Schedule
from megatron_rl.algorithms.columns import PackedColumns
from megatron_rl.algorithms.objective import FirstPass, Metric, NotFiniteError, mismatch
from megatron_rl.layout import check_parameters, megatron_shards
from megatron_rl.types import Denominators, Metrics

log = logging.getLogger(__name__)

Minibatches = Sequence[Sequence[Sequence[TrainSample]]]
"""Indexed as [minibatch][microbatch][sample]."""


class MegatronActor:
    def __init__(self, spec: ActorSpec, *, rank: int, world_size: int, init_method: str):
        """Meet the other trainer processes at `init_method` (tcp://host:port or file://path) and build this
        rank's part of the model. Its weights mean nothing until they are loaded (weights.py, or `load`).

        Raises:
            ValueError: world_size is not what the parallel sizes need, or the model does not divide by them.
        """
        parallel = spec.policy.parallel
        self.spec, self.rank, self.mesh = spec, rank, parallel.mesh
        if world_size != self.mesh.world_size:
            raise ValueError(f"policy.parallel needs {self.mesh.world_size} ranks, there are {world_size}")
        self.fused_norms = uses_fused_layers(spec.model)
        """Whether the layers are Transformer Engine's, which hold norms inside the next linear layer, under other
        names."""
        self.shards = megatron_shards(spec.shape, self.mesh, rank, self.fused_norms)
        tensor, stage, _ = self.mesh.coordinates(rank)
        self._reports_metrics = tensor == 0 and stage == self.mesh.pipeline - 1
        """One rank of each data-parallel replica reports its metrics."""
        self._minibatches: list[list[Microbatch]] = []
        self._denominators: list[Denominators] = []
        self._at_start: list[FirstPass] = []
        """What the pass for logp_old gave for the first mini-batch's micro-batches, on the last pipeline stage."""
        self._reference: dict[str, Tensor] = {}
        """The reference policy's weights, kept on the CPU; empty where the objective needs none."""

        platform.start(rank, world_size, init_method)
        self.agreement = Agreement()
        with platform.running():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tensor,
                pipeline_model_parallel_size=parallel.pipeline,
                expert_model_parallel_size=self.mesh.expert,
                expert_tensor_parallel_size=self.mesh.expert_ways,
                distributed_timeout_minutes=int(platform.TIMEOUT.total_seconds() // 60),
                create_gloo_process_groups=False,
            )
            model_parallel_cuda_manual_seed(spec.seed)
            self.model = build_model(spec.shape, spec.model, parallel, stage)
            optimizer = spec.policy.optimizer
            self.optimizer, self.scheduler = build_optimizer(self.model, optimizer, spec.total_steps)
            self._schedule = Schedule(self.model, spec.shape, spec.temperature, spec.objective.needs.entropy)
        live = {name: tuple(parameter.shape) for name, parameter in self.parameters().items()}
        check_parameters(self.shards, live, "Megatron")
        layers = self._identity()["layers"]
        log.info("trainer rank %d of %d: %s layers on %s", rank, world_size, layers, platform.device())

    def parameters(self) -> dict[str, Tensor]:
        """This rank's live parameters by Megatron's names, those that `self.shards` speaks of."""
        return state.local_parameters(self.model)

    def weights_changed(self) -> None:
        """To be called after writing to `parameters()`: the optimizer's fp32 copies of bf16 follow."""
        with platform.running():
            self.optimizer.reload_model_params()

    def begin(self, minibatches: Minibatches, denominators: Sequence[Denominators], alignment: int) -> Metrics:
        """Take this data-parallel rank's own samples of a training step and compute what the objective needs of the
        policy and its reference at the step's start.

        Args:
            minibatches: each is one optimizer step. Every rank has the same number of micro-batches in a step;
                some may be empty.
            denominators: one for each mini-batch.
            alignment: every sequence is padded to a multiple of it. With sequence parallelism, TP must divide it.

        A step of one update needs no pass for logp_old (`Needs.logp_old`): `update` computes the same log-probs.

        Returns:
            The mismatch of trainer and engine over all ranks' action tokens (`objective.mismatch`), if logp_old is
            computed here. If not, nothing is returned, and the first update reports the mismatch.

        Raises:
            ValueError: a sample is malformed or holds a token outside the vocabulary (the error names it), or
                sequence parallelism does not allow the alignment.
        """
        assert len(minibatches) == len(denominators)
        with self.agreement.on_errors():
            self._check_alignment(alignment)
            packed = [[pack(samples, alignment) for samples in minibatch] for minibatch in minibatches]
            for batch in (batch for minibatch in packed for batch in minibatch):
                self._check_vocabulary(batch)
        self._minibatches = [[batch.to(platform.device()) for batch in minibatch] for minibatch in packed]
        self._denominators, self._at_start = list(denominators), []
        needs = self.spec.objective.needs
        if needs.logp_ref:
            with self._as_reference():
                self._keep("logp_ref_T", self._forward_all())
        if not needs.logp_old or (len(minibatches) == 1 and not needs.before_update):
            return {}
        passes = self._forward_all()
        self._at_start = passes[: len(self._minibatches[0])]
        self._keep("logp_old_T", passes)
        return self._describe_mismatch()

    def keep_reference(self) -> None:
        """Keep today's weights as those of the reference policy, if the objective needs one."""
        if self.spec.objective.needs.logp_ref:
            self._reference = {name: parameter.detach().cpu().clone() for name, parameter in self.parameters().items()}

    def update(self, minibatch: int, coefficients: Mapping[str, float]) -> Metrics:
        """One optimizer step on a minibatch given to `begin`.

        Args:
            coefficients: what the objective's terms are multiplied by; the same on all ranks.

        Returns:
            What the objective reports, and `loss`, `grad_norm` (before clipping) and `lr`.

        Raises:
            ValueError: a log-prob, the loss or the gradient is not finite, with the samples' names; or trainer and
                engine disagree about the log-probs at the step's start. No weight has changed.
        """
        microbatches, denominators = self._minibatches[minibatch], self._denominators[minibatch]
        columns = self._prepare(minibatch)
        problems: list[str] = []

        def loss(i: int, logp_T: Tensor, entropy_T: Tensor | None) -> tuple[Tensor, dict[str, Metric]]:
            batch = microbatches[i]
            if not batch.names:
                return logp_T.sum() * 0.0, {}
            try:
                return self.spec.objective(logp_T, entropy_T, columns[i], denominators, coefficients)
            except NotFiniteError as error:
                # The other ranks wait in the schedule: it is finished first, then all raise together.
                problems.append(f"sample {batch.names[error.sample]}: {error}")
                return logp_T.sum() * 0.0, {}

        with platform.running():
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            reports = self._schedule.run(microbatches, loss)
            metrics = self.agreement.reduce(reports if self._reports_metrics else [], problems)
            metrics = self.spec.objective.conclude(metrics, on_policy=minibatch == 0)  # raises on all ranks or on none
            grad_norm = gradient_norm(self.optimizer)
            if not math.isfinite(grad_norm):  # all ranks have the same norm
                self.agreement.require_none([self._describe_gradients(grad_norm, microbatches)])
            self.scheduler.step(1)
            apply_gradients(self.optimizer, grad_norm)
        return {**metrics, "grad_norm": grad_norm, "lr": self.optimizer.param_groups[0]["lr"]}

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write this training state and `extra` (rank 0's) so that the folder exists whole or not at all.

        Raises:
            ValueError: a rank could not write, for example because the disk is full; an older folder stays.
        """
        now = state.training_state(self.model, self.optimizer, self.scheduler)
        checkpoint.save(Path(folder), self._identity(), now, extra, self.agreement)

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore what `save` wrote and return its `extra`; the run goes on bit for bit (on a CPU).

        Raises:
            ValueError: the folder is missing or damaged, or another mesh or model wrote it.
        """
        saved, extra = checkpoint.load(Path(folder), self._identity(), self.agreement)
        state.restore(saved, self.model, self.optimizer, self.scheduler)
        return extra

    def close(self) -> None:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

    def _check_alignment(self, alignment: int) -> None:
        tensor = self.mesh.tensor
        if self.model.config.sequence_parallel and alignment % tensor:
            raise ValueError(
                f"alignment {alignment} is no multiple of policy.parallel.tensor ({tensor}), which sequence "
                f"parallelism needs; plan the micro-batches with alignment {tensor}"
            )

    def _check_vocabulary(self, batch: Microbatch) -> None:
        vocab_size = self.spec.shape.vocab_size
        wrong = ((batch.ids_T < 0) | (batch.ids_T >= vocab_size)).nonzero()
        if len(wrong):
            position = int(wrong[0])
            name = batch.names[int(batch.columns.sample_T[position])]
            raise ValueError(
                f"sample {name} has token {int(batch.ids_T[position])}, the vocabulary is {vocab_size}: "
                f"do engine and trainer use the same tokenizer?"
            )

    def _forward_all(self) -> list[FirstPass]:
        """Log-probs and entropies of all micro-batches under the present weights; the last pipeline stage alone has
        them."""
        return self._forward([batch for minibatch in self._minibatches for batch in minibatch])

    def _forward(self, microbatches: Sequence[Microbatch]) -> list[FirstPass]:
        def keep(i: int, logp_T: Tensor, entropy_T: Tensor | None) -> tuple[Tensor, FirstPass]:
            return logp_T.new_zeros(()), FirstPass(logp_T, entropy_T)

        with platform.running(), torch.no_grad():
            return self._schedule.run(microbatches, keep, forward_only=True)

    def _keep(self, column: str, passes: Sequence[FirstPass]) -> None:
        """Write log-probs into a column of all micro-batches, in their order."""
        remaining = iter(passes)
        if passes:
            self._minibatches = [
                [replace(b, columns=replace(b.columns, **{column: next(remaining).logp_T})) for b in minibatch]
                for minibatch in self._minibatches
            ]

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """The model has the reference's weights inside the block, and its own, bit for bit, after it. The tensors
        change places one by one, so that the device never holds more than one of them twice."""

        def exchange() -> None:
            with torch.no_grad():
                for name, parameter in self.parameters().items():
                    mine = parameter.detach().cpu().clone()
                    parameter.copy_(self._reference[name])
                    self._reference[name] = mine

        exchange()
        try:
            yield
        finally:
            exchange()

    def _prepare(self, minibatch: int) -> list[PackedColumns]:
        """The columns of this rank's micro-batches, with what the objective adds to them."""
        microbatches, objective = self._minibatches[minibatch], self.spec.objective
        first_pass = None
        if objective.needs.first_pass:
            # The weights of logp_old are those of the first update: its pass need not be made again.
            known = minibatch == 0 and objective.needs.logp_old
            first_pass = self._at_start if known else self._forward(microbatches)
        columns = [batch.columns for batch in microbatches]
        if not parallel_state.is_pipeline_last_stage():
            return columns

        def sum_over_ranks(x: Tensor) -> Tensor:
            dist.all_reduce(x, group=parallel_state.get_data_parallel_group())
            return x

        return objective.prepare(columns, first_pass, self._denominators[minibatch], sum_over_ranks)

    def _describe_mismatch(self) -> Metrics:
        num_tokens = sum(denominators.num_tokens for denominators in self._denominators)
        columns = [batch.columns for minibatch in self._minibatches for batch in minibatch if batch.names]
        reports = [mismatch(c.logp_old_T, c, num_tokens) for c in columns] if self._reports_metrics else []
        return self.agreement.reduce(reports)

    def _describe_gradients(self, grad_norm: float, microbatches: Sequence[Microbatch]) -> str:
        parameters = self.model.named_parameters()
        broken = [name for name, parameter in parameters if not parameter.main_grad.isfinite().all()]
        where = f"first in {broken[0].replace('module.', '')}" if broken else "in other ranks' parameters"
        names = [name for batch in microbatches for name in batch.names]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return (
            f"the gradient norm is {grad_norm}, {where}, with the samples {', '.join(names[:3])}{more}; no "
            f"weight was changed"
        )

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint and the actor that loads it must have in common."""
        return {
            "mesh": asdict(self.mesh),
            "shape": asdict(self.spec.shape),
            "dtype": self.spec.model.dtype,
            "layers": "Transformer Engine" if self.fused_norms else "local",
        }
