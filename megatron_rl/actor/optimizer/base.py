"""What all kinds of optimizer have in common: Megatron's optimizers, and the learning rate's schedule.

A kind is a subclass, which says how an update is done, what it keeps of a parameter, and what it needs to go on after a
resume. Megatron's optimizers are built for Adam, which every kind has at least for some parameters. With DP > 1 they
are distributed optimizers, whose state is split over the data-parallel ranks.

As in all of Megatron, one-dimensional parameters (norms, biases) are not decayed. The n-th update, counted from 1, has
the rate lr * n / w in a warm-up of w updates. After it the rate falls as in transformers: the first update has lr, and
the rate would reach lr * min_lr_ratio in the update after the run's last one, so none has a rate of 0. Invariant
(tests/ranks): the norms of gradient, parameters and update equal the whole model's norms in every layout.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_rl import spans
from megatron_rl.actor.megatron_settings import build
from megatron_rl.actor.optimizer.intervals import COPY, Interval, IntervalState, intervals
from megatron_rl.actor.optimizer.loss_scale import INITIAL, LossScale
from megatron_rl.actor.optimizer.norms import LARGEST_NORM, Norms, belongs_to_head, gradient_square
from megatron_rl.actor.optimizer.rounding import Dither
from megatron_rl.actor.state import named_parameters
from megatron_rl.config.policy import PolicyConfig

log = logging.getLogger(__name__)


class Optimizer(ABC):
    """The optimizer of a rank.

    Args:
        dither: how weights in bfloat16 or float16 are rounded; None: to the nearest number.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        policy: PolicyConfig,
        total_steps: int,
        dither: Dither | None = None,
    ) -> None:
        cfg = policy.optimizer
        rule = cfg.adam_rule
        ours = dict(
            optimizer="adam",
            decoupled_weight_decay=True,
            lr=cfg.lr,
            min_lr=cfg.lr * cfg.min_lr_ratio,
            weight_decay=cfg.weight_decay,
            adam_beta1=rule.betas[0],
            adam_beta2=rule.betas[1],
            adam_eps=rule.eps,
            clip_grad=cfg.clip_grad,
            bf16=chunks[0].config.bf16,
            fp16=chunks[0].config.fp16,
            hysteresis=1,  # each overflow halves the loss scale (LossScale)
            params_dtype=chunks[0].config.params_dtype,
            use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
        )
        self._chunks = chunks
        defaults = {"initial_loss_scale": INITIAL}
        settings = build(MegatronOptimizerConfig, "optimizer", ours, policy.megatron.optimizer, defaults)
        self.megatron = get_megatron_optimizer(settings, list(chunks), use_gloo_process_groups=False)
        self.loss_scale = LossScale.of(settings) if settings.fp16 else None
        """None for a model in another type than float16."""
        if self.loss_scale is not None:
            chunks[0].config.grad_scale_func = self.loss_scale.scaled
            for inner in self.megatron.chained_optimizers:
                inner.grad_scaler = None  # Megatron's own scale
        self._scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=cfg.lr,
            min_lr=cfg.lr * cfg.min_lr_ratio,
            lr_warmup_steps=cfg.warmup_steps,
            lr_decay_steps=max(total_steps, cfg.warmup_steps + 1),  # Megatron requires it to end after the warm-up
            lr_decay_style=cfg.schedule,
            start_wd=cfg.weight_decay,
            end_wd=cfg.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        self._decays_after = math.inf if cfg.schedule == "constant" else cfg.warmup_steps
        self.num_updates = 0
        self._names = {id(parameter): name for name, parameter in named_parameters(chunks)}
        self._dither = dither

    def _set_rate(self) -> None:
        """Let Megatron's schedule set the learning rate of the update `num_updates`."""
        self._scheduler.num_steps = self.num_updates - (self.num_updates > self._decays_after)
        self._scheduler.step(0)

    @property
    def lr(self) -> float:
        """The learning rate of the last update."""
        lr: float = self.megatron.param_groups[0]["lr"]
        return lr

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """Hand the summed gradients to Megatron's optimizers, and return their global L2 norm, which is equal on every
        rank. A multi-token head's gradients are not in it. Collective: every rank must call it. Megatron itself adds
        the squares in float32 (`norms.sum_of_squares`). The gradients of a model in float16 are divided by the loss
        scale first."""
        self.megatron.prepare_grads()
        if self.loss_scale is not None:
            gradients = [interval.main.grad for interval in self._intervals() if interval.main.grad is not None]
            if gradients:  # of a stage without adapters there are none
                torch._foreach_mul_(gradients, 1 / self.loss_scale.value)
        return self._gradient_norm(of_head=False)

    @torch.no_grad()
    def head_gradient_norm(self) -> float:
        """After `gradient_norm`: the same norm of the multi-token head's gradients; 0 without a head. Collective."""
        return self._gradient_norm(of_head=True)

    def _gradient_norm(self, of_head: bool) -> float:
        squares = [gradient_square(inner, of_head) for inner in self.megatron.chained_optimizers]
        return math.sqrt(sum(squares[1:], start=squares[0]))

    def _intervals(self) -> Iterator[Interval]:
        # Under expert parallelism Megatron has a separate optimizer for the experts.
        return (interval for inner in self.megatron.chained_optimizers for interval in intervals(inner))

    def lower_loss_scale(self, num_halvings: int) -> None:
        """Forget the gradients of a model in float16, which have overflowed, and halve the loss scale so often."""
        assert self.loss_scale is not None
        log.warning("gradients overflow float16 at the loss scale %g, and are computed again", self.loss_scale.value)
        for _ in range(num_halvings):
            self.loss_scale.halve()
        for interval in self._intervals():
            interval.main.grad = None

    def gradients(self) -> Iterator[tuple[str, int, Tensor]]:
        """After `gradient_norm`: the gradient of each interval that counts for the norm on this rank, with the
        parameter's local name and the start of the interval; float32, flat. It is no collective."""
        for inner in self.megatron.chained_optimizers:
            norms = Norms(inner)
            for interval in intervals(inner):
                if interval.main.grad is not None and norms.counts(interval):
                    yield self._names[id(interval.parameter)], interval.start, interval.main.grad.view(-1)

    @torch.no_grad()
    def update(self, grad_norm: float, is_last: bool, head_norm: float = 0.0) -> dict[str, float]:
        """Clip the gradients by the norm that `gradient_norm` returned, and update the weights. Megatron does both in
        one `step`; here they are separate, so that a gradient that is not finite or too large never reaches the
        weights.

        Args:
            head_norm: the norm that `head_gradient_norm` returned, by which the head's gradients are clipped.
            is_last: the weights are whole on every rank when this returns. Otherwise the next forward pass may gather
                them from the data-parallel ranks layer by layer (`overlap_param_gather`).

        Returns:
            `param_norm`, the global L2 norm of the parameters after the update; `update_ratio`, the norm of the update
            divided by it; and for a model in bfloat16 or float16 `update_changed`, the share of the weights that have
            other bits than before. They are equal on every rank.
        """
        assert grad_norm <= LARGEST_NORM and head_norm <= LARGEST_NORM
        self.num_updates += 1
        self._set_rate()
        if self.loss_scale is not None:
            self.loss_scale.count()
        clip, every = self.megatron.config.clip_grad, list(self._intervals())
        for of_head, norm in ((False, grad_norm), (True, head_norm)):
            clipped = [interval.main for interval in every if belongs_to_head(interval.parameter) == of_head]
            if clip > 0 and clipped:
                clip_grad_by_total_norm_fp32(clipped, max_norm=clip, total_norm=norm)
        norms = {id(inner): Norms(inner) for inner in self.megatron.chained_optimizers}
        with spans.span("optimizer"), self._rounding(norms):
            self._apply(norms)
        for interval in every:  # if the gradients are in bf16, these are copies in fp32
            interval.main.grad = None
        for chunk in self._chunks:
            if is_last and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        sums = [one.sums() for one in norms.values()]
        parameter_square, update_square, num_rounded, num_changed = sum(sums[1:], start=sums[0]).tolist()
        changed = {"update_changed": num_changed / num_rounded} if num_rounded else {}
        norm = math.sqrt(parameter_square)
        return {"param_norm": norm, "update_ratio": math.sqrt(update_square) / norm, **changed}

    @abstractmethod
    def _apply(self, norms: Mapping[int, Norms]) -> None:
        """Do an update with the clipped gradients.

        Args:
            norms: by the identity of Megatron's optimizers; it adds what it changes to them.
        """

    @contextmanager
    def _rounding(self, norms: Mapping[int, Norms]) -> Iterator[None]:
        """Inside the block Megatron's optimizers call `_write` for what they update, where they would round to the
        nearest number: after Adam's step, and before the data-parallel ranks gather the weights."""

        def write(inner: MegatronOptimizer) -> None:
            for interval in intervals(inner):
                if interval.has_copy:
                    self._write(interval, interval.start, interval.main.detach().view(-1), norms[id(inner)])

        rounding = [one for one in self.megatron.chained_optimizers if not isinstance(one, FP32Optimizer)]
        for inner in rounding:
            inner._copy_main_params_to_model_params = partial(write, inner)
        try:
            yield
        finally:
            for inner in rounding:  # otherwise the optimizer and its groups would hold each other for ever
                del inner._copy_main_params_to_model_params

    def _write(self, interval: Interval, start: int, copy_N: Tensor, norms: Norms) -> None:
        """Round a part of an interval's fp32 copy, which begins at `start` of the parameter, into the weights."""
        weights_N = interval.parameter.data.view(-1)[start : start + len(copy_N)]
        name = self._names[id(interval.parameter)]
        rounded_N = self._dither.rounded(copy_N, name, start) if self._dither else copy_N.to(weights_N.dtype)
        if norms.counts(interval):
            norms.count(weights_N, rounded_N)
        weights_N.copy_(rounded_N)

    @abstractmethod
    def _moments(self, inner: MegatronOptimizer, interval: Interval) -> dict[str, Tensor]:
        """[stop - start] each: what the kind keeps of an interval (`config.optimizer.moments`). What no update has
        touched yet is made, as zeros."""

    @abstractmethod
    def _resume_at(self, inner: MegatronOptimizer, interval: Interval, num_updates: int) -> None:
        """Set what else an update of the interval depends on, as after this number of updates."""

    def weights_changed(self) -> None:
        """Copy the model's weights into the optimizer's fp32 copies. Call it after anything but an update has changed
        them."""
        self.megatron.reload_model_params()

    def states(self) -> Iterator[IntervalState]:
        """The state of this rank. Moments that no update has touched yet are made, as zeros."""
        for inner in self.megatron.chained_optimizers:
            for interval in intervals(inner):
                tensors = self._moments(inner, interval)
                if interval.has_copy:
                    tensors[COPY] = interval.main.detach().view(-1)
                yield IntervalState(self._names[id(interval.parameter)], interval.start, interval.stop, tensors)

    def scale_state(self) -> dict[str, float] | None:
        return None if self.loss_scale is None else self.loss_scale.state()

    def resume_at(self, num_updates: int, scale: Mapping[str, float] | None) -> None:
        """Go on as after this number of updates, whose state has been written to `states()`. Learning rate and decay
        follow this run's configuration at this number.

        Args:
            scale: what `scale_state` returned then.
        """
        self.num_updates = num_updates
        if self.loss_scale is not None and scale is not None:
            self.loss_scale.restore(scale)
        self._set_rate()
        for inner in self.megatron.chained_optimizers:
            for interval in intervals(inner):
                self._resume_at(inner, interval, num_updates)

    def device_tensors(self) -> Iterator[Tensor]:
        """The optimizer's tensors on the rank's device. For an fp32 model they may be views of its weights."""
        for inner in self.megatron.chained_optimizers:
            yield from (main for group in inner.optimizer.param_groups for main in group["params"])
            for state in inner.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))
