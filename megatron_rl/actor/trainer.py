"""What the trainers of policy and critic have in common: the model on its mesh, the optimizer, updates and checkpoints.
Every trainer process has one, a `MegatronActor` (actor.py) or a `MegatronCritic` (critic.py).

Its public methods are collectives: all ranks call them in the same order, and all return the same numbers or raise the
same error. Invariants (tests/ranks): loss and gradient norm do not depend on the layout or on the number of
micro-batches; a resumed run continues bit for bit; a step with a number that is not finite changes no weight.

Shape letters: T packed tokens of a micro-batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_rl.actor import checkpoint, platform, state
from megatron_rl.actor.adapters import Adapting
from megatron_rl.actor.agreement import Agreement, sum_over_data_ranks
from megatron_rl.actor.attention import can_share_prompts
from megatron_rl.actor.checkpoint import Identity, Saving
from megatron_rl.actor.context import ContextRank
from megatron_rl.actor.gradients import differentiate
from megatron_rl.actor.model import build_model, uses_fused_layers
from megatron_rl.actor.moe.router import set_auxiliary_losses, start_counting, total_load, update_biases
from megatron_rl.actor.multi_token import copy_embedding
from megatron_rl.actor.optimizer.build import build_optimizer
from megatron_rl.actor.optimizer.matrices import Place
from megatron_rl.actor.optimizer.norms import LARGEST_NORM
from megatron_rl.actor.overflow import describe_gradients
from megatron_rl.actor.packing import Microbatch, check_alignment, check_microbatch, multiplicity
from megatron_rl.actor.phases import PhasedMemory
from megatron_rl.actor.rows import EpochRows
from megatron_rl.actor.spec import ActorSpec
from megatron_rl.actor.step import Schedule
from megatron_rl.actor.tower import tower_of
from megatron_rl.actor.training_state import TrainingState
from megatron_rl.algorithms.columns import FirstPass, PackedColumns, with_support
from megatron_rl.algorithms.logprobs import Extra
from megatron_rl.algorithms.objective import Metric, NotFiniteError
from megatron_rl.algorithms.passes import REPEATED, STOPPED, Column
from megatron_rl.models import check_parameters, megatron_shards
from megatron_rl.models.peft import base_digest
from megatron_rl.types import Metrics, Phase, Share

log = logging.getLogger(__name__)


class MegatronTrainer:
    role = "trainer"
    """Its name in messages, and its key in `types.HOLDS`."""

    def __init__(self, spec: ActorSpec, *, rank: int, world_size: int, store: dist.Store):
        """Meet the other trainer processes over a store that all of them share, and build this rank's part of the
        model. The weights are random until they are loaded (weights.py, or `load`).

        Raises:
            ValueError: world_size is not what the parallel sizes need, or the model does not divide by them.
        """
        parallel = spec.policy.parallel
        self.spec, self.rank, self.mesh = spec, rank, parallel.mesh
        if world_size != self.mesh.world_size:
            raise ValueError(
                f"{self.role}: tensor x context x pipeline x data are {self.mesh.world_size} ranks, but there are "
                f"{world_size}; start as many ranks, or change the sizes"
            )
        self.fused_norms = uses_fused_layers(spec.model, spec.shape, parallel.context)
        """Whether the layers are Transformer Engine's. These hold each norm inside the next linear layer, so their
        parameters have other names."""
        self.shards = megatron_shards(spec.shape, self.mesh, rank, self.fused_norms)
        tensor, stage, data = self.mesh.coordinates(rank)
        is_first = tensor == 0 and self.mesh.context_rank(rank) == 0
        self.is_last_stage = stage == self.mesh.pipeline - 1
        """Whether this rank computes losses, and so needs the columns."""
        self.reports_metrics = is_first and self.is_last_stage
        """One rank of each data-parallel replica reports its metrics."""
        self.rows: EpochRows
        """What `take` was given."""
        self._at_start: list[list[FirstPass]] | None = None
        """The results of the pass for logp_old, `[mini-batch][micro-batch]`; empty if there was none, and None if an
        update has changed the weights since. Only the last pipeline stage has results."""
        self._saving: Saving | None = None
        """The checkpoint that is being written; None if there is none."""

        adapters = spec.shape.adapters
        self.adapting = Adapting(adapters, self.shards, spec.seed) if adapters else None

        platform.start(rank, world_size, store, spec.collective_timeout, ordered=parallel.tensor * parallel.context > 1)
        self.agreement = Agreement(spec.collective_timeout)
        with platform.running():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tensor,
                pipeline_model_parallel_size=parallel.pipeline,
                virtual_pipeline_model_parallel_size=parallel.virtual if parallel.virtual > 1 else None,
                context_parallel_size=parallel.context,
                expert_model_parallel_size=self.mesh.expert,
                expert_tensor_parallel_size=self.mesh.expert_ways,
                distributed_timeout_minutes=spec.collective_timeout / timedelta(minutes=1),
                create_gloo_process_groups=False,
            )
            model_parallel_cuda_manual_seed(spec.seed)
            self.chunks = build_model(spec.shape, spec.model, spec.policy, stage, self.adapting)
            place = Place(spec.shape, self.mesh, rank, self.fused_norms)
            self.optimizer = build_optimizer(self.chunks, spec.policy, spec.total_steps, place)
            self._state = TrainingState(self.chunks, self.optimizer, spec.shape, self.mesh, rank, self.fused_norms)
            self._memory = PhasedMemory(self.role, self.chunks, self.optimizer)
            context = ContextRank.of(self.mesh, rank)
            also = [one for one in get_args(Extra) if one in spec.objective.needs]
            more = also, context, spec.forbidden, tower_of(spec, stage, unwrap_model(self.chunks[0]))
            self.schedule = Schedule(self.chunks, spec.shape, spec.temperature, *more)
        live = {name: tuple(parameter.shape) for name, parameter in self.parameters().items()}
        check_parameters(self.shards, live, "Megatron")
        layers = "Transformer Engine's" if self.fused_norms else "local"
        log.info("trainer rank %d of %d: %s layers on %s", rank, world_size, layers, platform.device())

    def parameters(self) -> dict[str, Tensor]:
        """This rank's live parameters by Megatron's names, which are the local names of `self.shards`."""
        return state.local_parameters(self.chunks)

    def weights_changed(self) -> None:
        """Update the optimizer's fp32 copies of weights in two bytes. Call this after writing to `parameters()`."""
        with platform.running():
            self.optimizer.weights_changed()

    def enter(self, phase: Phase) -> None:
        """Give the memory of this rank's device that the phase does not need to the engine that shares the device, and
        take back what it needs. An actor begins in the phase `training`. It is no collective."""
        self._memory.enter(phase)

    def require(self, phase: Phase) -> None:
        """
        Raises:
            RuntimeError: this rank has given up what the phase needs.
        """
        self._memory.require(phase)

    def take(self, share: Share) -> None:
        """Keep the samples of an epoch that belong to this data-parallel rank, for its updates. The samples of a later
        epoch bring the columns that the first one has left (`columns`).

        Args:
            share: its tokens and columns are at hand. Every rank has the same number of micro-batches in a mini-batch;
                some may be empty. Its alignment must be a multiple of `policy.parallel`'s.

        Raises:
            ValueError: a sample is malformed (the error names it), or the alignment does not suit the layout.
        """
        self.require("training")
        with self.agreement.on_errors():
            check_alignment(share.alignment, self.spec.policy.parallel.alignment)
            can_share = can_share_prompts(self.spec.shape, self.fused_norms, self.mesh.context)
            self.rows = EpochRows(share, can_share, self.spec.shape.vision)
            for batch in self.rows:
                check_microbatch(batch, self.spec.shape)
        self.rows.to(platform.device())

    def columns(self, names: Sequence[Column]) -> dict[Column, dict[int, np.ndarray]]:
        """Columns of the samples that `take` was given, as numbers at the tokens of each sample by its index in the
        step (`packing.by_sample`). Only the rank that reports the replica's metrics has them; on others it is empty. It
        is no collective."""
        return {name: self.rows.numbers(name) for name in names} if self.reports_metrics else {}

    def update(self, minibatch: int, coefficients: Mapping[str, float], epoch: int = 0) -> Metrics:
        """Do one optimizer step on a mini-batch that `take` was given. The weights may be read after the last one.

        Args:
            minibatch: its index.
            epoch: the number of times that the step has trained on its samples.
            coefficients: the factors of the objective's terms, and `max_mismatch`, the bound of the mismatch at the
                step's start, if there is one; they are the same on all ranks.

        Returns:
            The objective's metrics, `loss`, `grad_norm` (before clipping), the metrics of `Optimizer.update`, and `lr`.
            For MoE models also the metrics of `describe_load`, `describe_replay` and `describe_auxiliary_losses` that
            apply; for a trained multi-token head also those of `HeadLoss`; the norms are without it. If the objective
            stops the step before this update, STOPPED stands in the place of the norms and `lr`. In float16 there are
            `loss_scale` and REPEATED: a gradient that overflows is computed again with a smaller loss scale.

        Raises:
            ValueError: a log-prob, the loss or the gradient is not finite, or the gradient is too large for float32
                (the error names samples); or trainer and engine disagree about the log-probs at the step's start. No
                weight has changed.
        """
        self.require("training")
        microbatches, denominators = self.rows.minibatches[minibatch], self.rows.denominators[minibatch]
        columns = self.prepared(minibatch)
        problems: list[str] = []

        def loss(i: int, logp_T: Tensor, *more: Tensor | None) -> tuple[Tensor, dict[str, Metric]]:
            batch = microbatches[i]
            if not batch.names:
                return logp_T.sum() * 0.0, {}
            try:
                own = with_support(columns[i], more[1])
                return self.spec.objective(logp_T, more[0], own, denominators, coefficients)
            except NotFiniteError as error:
                # Other ranks wait for this one in the schedule, so it must be finished before all raise together.
                problems.append(f"sample {batch.names[error.sample]}: {error}")
            except ValueError as error:  # of a loss of the user's own
                problems.append(str(error))
            return logp_T.sum() * 0.0, {}

        has_auxiliary_losses = self._prepare_auxiliary_losses(microbatches)
        scale, num_repeats = self.optimizer.loss_scale, 0
        with platform.running():
            while True:
                metrics, load_RE, head_loss = differentiate(self, microbatches, loss, problems, has_auxiliary_losses)
                bound = None if self._at_start is None else coefficients.get("max_mismatch", math.inf)
                metrics = self.spec.objective.conclude(metrics, bound)  # raises on all ranks or none
                if epoch and self.spec.objective.stops(metrics):
                    return metrics | {STOPPED: 1.0}
                grad_norm = self.optimizer.gradient_norm()
                head_norm = self.optimizer.head_gradient_norm() if head_loss else 0.0
                # A norm is equal on all ranks, so all of them go the same way. It may be NaN, which is below nothing.
                if not (too_large := [norm for norm in (grad_norm, head_norm) if not norm <= LARGEST_NORM]):
                    break
                if not scale or scale.is_lowest or not math.isfinite(metrics["loss"]):
                    self.agreement.require_none([describe_gradients(self, too_large[0], microbatches)])
                self.optimizer.lower_loss_scale(2**num_repeats)
                num_repeats += 1
            # The last stage's head needs the whole embedding after every update.
            is_last = minibatch == len(self.rows.minibatches) - 1 or head_loss is not None
            self._at_start = None
            in_force = {"loss_scale": scale.value, REPEATED: float(num_repeats)} if scale else {}
            norms = self.optimizer.update(grad_norm, is_last, head_norm)
            if head_loss:
                copy_embedding(self.chunks)
            if self.spec.policy.router_bias_update_rate and load_RE is not None:
                update_biases(self.chunks, load_RE, self.spec.policy.router_bias_update_rate)
        return {**metrics, "grad_norm": grad_norm, **norms, "lr": self.optimizer.lr, **in_force}

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Begin to write the training state and rank 0's `extra`, which must consist of JSON's types. The state is
        copied when this returns, so that training can go on; `finish_save` waits for the files.

        Raises:
            ValueError: the disk has too little space.
        """
        self.require("training")
        assert self._saving is None, "finish_save comes first"
        now = checkpoint.State(self.optimizer.num_updates, state.random_state(), extra, self.optimizer.scale_state())
        from_hub = checkpoint.FromHub(Path(self.spec.model.path), self.spec.multi_token)
        self._saving = Saving(Path(folder), self._identity(), self._state.parts(), now, from_hub, self.agreement)

    @property
    def is_saved(self) -> bool:
        """Whether `finish_save` need not wait for this rank. It is no collective."""
        return self._saving is None or self._saving.is_done

    def finish_save(self) -> None:
        """Wait until the folder that `save` began is complete and has its name. It is complete or absent.

        Raises:
            ValueError: a rank could not write, for example because the disk is full. An older folder is kept.
        """
        saving, self._saving = self._saving, None
        assert saving is not None
        saving.finish()

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore what `save` wrote, on any mesh, and return its `extra`. On the same mesh the run then continues bit
        for bit (on a CPU).

        Raises:
            ValueError: the folder is missing or damaged, or another model wrote it.
        """
        self.require("training")
        saved = checkpoint.load(Path(folder), self._identity(), self._state.targets(), self.shards, self.agreement)
        self.optimizer.resume_at(saved.num_updates, saved.loss_scale)
        if saved.random is not None:
            state.restore_random(saved.random)
        return saved.extra

    def snapshot(self) -> np.ndarray:
        """This rank's training state as bytes, which `restore` takes. It is no collective."""
        self.require("training")
        return self._state.snapshot()

    def restore(self, snapshot: np.ndarray) -> None:
        """Restore what `snapshot` returned on the same rank and mesh. The optimizer keeps the settings of this run."""
        self.require("training")
        self._state.restore(snapshot)

    def close(self) -> None:
        for chunk in self.chunks:
            for module in chunk.modules():
                if hasattr(module, "token_dispatcher"):
                    # Megatron keeps the last micro-batch's graph there. Its nodes hold the model, and that the process
                    # groups with their threads, in a circle that Python does not see.
                    module.token_dispatcher.probs = None
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

    def _forward(self, microbatches: Sequence[Microbatch], temperature: float | None = None) -> list[FirstPass]:
        """What a pass over some micro-batches with the present weights leaves. Only the last pipeline stage has it; on
        the others the list is empty.

        Args:
            temperature: None means the sampling temperature.
        """
        with platform.running(), torch.no_grad():
            return self.schedule.run(microbatches, None, forward_only=True, temperature=temperature)

    def prepared(self, minibatch: int) -> list[PackedColumns]:
        """The columns of this rank's micro-batches, with the columns that the objective adds."""
        microbatches, objective = self.rows.minibatches[minibatch], self.spec.objective
        first_pass = None
        if "logp" in objective.needs.statistics:
            first_pass = self._at_start[minibatch] if self._at_start else self._forward(microbatches)
        columns = [batch.columns for batch in microbatches]
        if not self.is_last_stage:
            return columns
        return objective.prepare(columns, first_pass, self.rows.denominators[minibatch], sum_over_data_ranks)

    def _prepare_auxiliary_losses(self, microbatches: Sequence[Microbatch]) -> bool:
        """Count what the routers' auxiliary losses of a mini-batch need. Returns whether there are such losses."""
        policy = self.spec.policy
        if not (policy.load_balancing_loss or policy.router_z_loss):
            return False
        num_tokens = torch.stack([multiplicity(batch).sum() for batch in microbatches]).sum()
        dist.all_reduce(num_tokens, group=parallel_state.get_data_parallel_group())
        load_RE = None
        if policy.load_balancing_loss:
            start_counting(self.chunks, with_gradients=False)
            self._forward(microbatches)
            load_RE = total_load(self.chunks)
        set_auxiliary_losses(self.chunks, policy, int(num_tokens), load_RE)
        return True

    def _identity(self) -> Identity:
        model, base = self.spec.model, ""
        if self.spec.shape.adapters is not None:
            with self.agreement.on_errors():
                base = base_digest(model.weights or model.path) if self.rank == 0 else ""
            base = self.agreement.gather(base)[0]
        return Identity(self.spec.shape, model.dtype, self.spec.policy.optimizer.kind, self.mesh, base)
