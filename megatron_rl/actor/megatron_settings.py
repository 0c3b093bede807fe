"""Megatron-Core's own settings, given by the user under `policy.megatron` in addition to the project's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

REFUSED = {
    "average_in_collective": "gradients are sums here, and the denominators are in the weights of the samples",
    "use_megatron_fsdp": "the weights are split as policy.parallel says",
    "use_custom_fsdp": "the weights are split as policy.parallel says",
    "num_distributed_optimizer_instances": "checkpoints split the optimizer's state over all data-parallel ranks",
    "loss_scale": "the loss scale of float16 is dynamic; a min_loss_scale equal to initial_loss_scale keeps it",
    "use_precision_aware_optimizer": "policy.optimizer.moments does it, with every Adam and in every layout",
    "optimizer_cpu_offload": "policy.optimizer.offload does it, with every Adam and in every layout",
    **dict.fromkeys(
        ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "main_params_dtype", "store_param_remainders"),
        "it belongs to Megatron's precision-aware optimizer; policy.optimizer.moments is in its place",
    ),
    **dict.fromkeys(
        ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "use_torch_optimizer_for_cpu_offload"),
        "it belongs to Megatron's offloaded optimizer; policy.optimizer.offload is in its place",
    ),
    **dict.fromkeys(
        (
            *("muon_momentum", "muon_split_qkv", "muon_use_nesterov", "muon_scale_mode", "muon_fp32_matmul_prec"),
            *("muon_num_ns_steps", "muon_tp_mode", "muon_extra_scale_factor"),
        ),
        "it belongs to Megatron's Muon; policy.optimizer of kind muon is in its place",
    ),
    "moe_z_loss_coeff": "Megatron's depends on the micro-batches; policy.router_z_loss does not",
    "moe_expert_capacity_factor": "the engine drops no token, so the trainer must not either",
    "moe_pad_expert_input_to_capacity": "the engine drops no token, so the trainer must not either",
}
"""What must not be set, and why."""

Config = TypeVar("Config")


def build(
    kind: type[Config],
    section: str,
    ours: Mapping[str, Any],
    switches: Mapping[str, Any],
    defaults: Mapping[str, Any] = {},
) -> Config:
    """Megatron's dataclass `kind` with the project's fields and the user's.

    Args:
        section: the section of `policy.megatron`, for the error.
        ours: the fields that the project sets.
        switches: the fields that the user sets.
        defaults: the fields whose defaults here differ from Megatron's.

    Raises:
        ValueError: there is no such field, or it must not be set, or Megatron refuses the value.
    """
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in switches:
        key = f"policy.megatron.{section}.{name}"
        if name not in known:
            nearest = get_close_matches(name, known, 1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise ValueError(f"{key}: Megatron-Core's {kind.__name__} has no such field{hint}")
        if name in ours:
            raise ValueError(f"{key} is set by this project, to {ours[name]!r}; leave it out")
        if name in REFUSED:
            raise ValueError(f"{key} must not be set: {REFUSED[name]}")
    try:
        return kind(**{**defaults, **ours, **switches})
    except (ValueError, TypeError, AssertionError) as error:
        if not switches:
            raise
        raise ValueError(f"Megatron-Core refuses policy.megatron.{section} {dict(switches)}: {error}") from error
