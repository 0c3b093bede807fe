"""Adam with decoupled weight decay through Megatron's optimizers, and the learning rate's schedule.

With DP > 1 this is Megatron's distributed optimizer, whose state is split over the data-parallel ranks. As in all of
Megatron, one-dimensional parameters (norms, biases) are not decayed. The n-th update, counted from 1, uses the
schedule's n-th value: a warm-up of w steps begins with lr / w and reaches lr at step w, and the run's last step uses
lr * min_lr_ratio. Invariants (tests/dist): an update equals that of torch.optim.AdamW on the whole model; the norms of
parameters and update are those of the whole model in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron_rl.actor import platform
from megatron_rl.actor.switches import build
from megatron_rl.config.policy import PolicyConfig


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], policy: PolicyConfig, total_steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    cfg = policy.optimizer
    ours = dict(
        optimizer="adam",
        decoupled_weight_decay=True,
        lr=cfg.lr,
        min_lr=cfg.lr * cfg.min_lr_ratio,
        weight_decay=cfg.weight_decay,
        adam_beta1=cfg.betas[0],
        adam_beta2=cfg.betas[1],
        adam_eps=cfg.eps,
        clip_grad=cfg.clip_grad,
        bf16=chunks[0].config.bf16,
        params_dtype=chunks[0].config.params_dtype,
        use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(
        build(MegatronOptimizerConfig, "optimizer", ours, policy.megatron.optimizer),
        list(chunks),
        use_gloo_process_groups=False,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=cfg.lr,
        min_lr=cfg.lr * cfg.min_lr_ratio,
        lr_warmup_steps=cfg.warmup_steps,
        lr_decay_steps=max(total_steps, cfg.warmup_steps + 1),  # Megatron requires the decay to end after the warm-up
        lr_decay_style=cfg.schedule,
        start_wd=cfg.weight_decay,
        end_wd=cfg.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


@torch.no_grad()
def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Pass the summed gradients to the optimizer and return their global L2 norm, which is equal on every rank."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


@torch.no_grad()
def apply_gradients(optimizer: MegatronOptimizer, grad_norm: float) -> None:
    """Clip the gradients by the norm that `gradient_norm` returned, and update the weights. Megatron does both in one
    `step`; here they are separate, so that a gradient with a norm that is not finite never reaches the weights."""
    assert math.isfinite(grad_norm)
    clip = optimizer.config.clip_grad
    # Under expert parallelism Megatron has a separate optimizer for the experts.
    parameters = [p for chained in optimizer.chained_optimizers for p in chained.get_parameters()]
    if clip > 0 and parameters:
        clip_grad_by_total_norm_fp32(parameters, max_norm=clip, total_norm=grad_norm)
    succeeded = optimizer.step_with_ready_grads()
    assert succeeded, "Megatron skips a step only because of loss scaling, which is not used"


@torch.no_grad()
def parameter_norms(optimizer: MegatronOptimizer) -> tuple[float, float]:
    """The global L2 norms of the parameters and of the last update, which are equal on every rank.

    No copy of the weights is needed, because Adam's moments m and v give the update again. The n-th update with the
    learning rate a and the decay w changed the parameters p into q (Loshchilov and Hutter 2019, arXiv:1711.05101):

        q = p - a w p - s  with  s = a / (1 - b1^n) m / (sqrt(v / (1 - b2^n)) + eps),

    so that p = (q + s) / (1 - a w). Each rank adds up the parameters whose state it has.
    """
    totals = [0.0, 0.0]
    for chained in optimizer.chained_optimizers:
        inner, tensor_group = chained.optimizer, getattr(chained, "tp_group", None)
        sums = torch.zeros(2, dtype=torch.float64, device=platform.device())
        for group in inner.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                state = inner.state[parameter]
                # Tied embeddings, and what the tensor-parallel ranks all hold, count once.
                counts = param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(
                    parameter, tensor_group
                )
                if not counts or not state:
                    continue
                number = float(state.get("step", group.get("step")))  # Apex counts the updates of a group
                deviation = (state["exp_avg_sq"] / (1 - beta2**number)).sqrt_().add_(group["eps"])
                step = (state["exp_avg"] / deviation).mul_(rate / (1 - beta1**number))
                decay = rate * group["weight_decay"]
                if decay:
                    step.add_((parameter + step).mul_(decay / (1 - decay)))
                for i, tensor in enumerate((parameter, step)):
                    sums[i] += torch.linalg.vector_norm(tensor, dtype=torch.float32).double() ** 2
        dist.all_reduce(sums, group=chained.get_grad_stats_parallel_group())
        totals = [total + more for total, more in zip(totals, sums.tolist(), strict=True)]
    return math.sqrt(totals[0]), math.sqrt(totals[1])
