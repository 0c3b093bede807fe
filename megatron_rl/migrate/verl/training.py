"""The meaning of verl's settings of the trainer's computation: optimizers, mixtures of experts, the types of numbers.

verl's engines read keys of their own for a schedule and for its last rate; a field of Megatron-Core's that changes what
is trained is mapped, or its row in keys.yaml refuses it.
"""

from __future__ import annotations

from typing import Any

from megatron_rl.migrate.verl.machine import num_steps
from megatron_rl.migrate.verl.settings import ACTOR, Meaning, Settings, implied, mapped, owner_of, refused, used

DTYPES = {
    **dict.fromkeys(("fp32", "float32", "torch.float32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "torch.float16"), "float16"),
}
SAME_TYPE = implied("computed in model.dtype, added in float32")
DTYPE_OF = {"dp": "fsdp_config.dtype", "megatron": "megatron.dtype", "torchtitan": "torchtitan.dtype"}
"""verl's engines -> the actor's key of the type that its layers compute in. VeOmni has none."""
SCHEDULES = {
    "dp": ("lr_scheduler_type", "warmup_style"),
    "megatron": ("lr_decay_style",),
    "veomni": ("lr_scheduler_type",),
    "torchtitan": ("decay_type",),
}
"""verl's engines -> their keys of the schedule of the learning rate."""
LOWEST = ("min_lr_ratio", "min_lr", "lr_min", "min_lr_factor")
"""The engines' keys of the rate at the end of the schedule."""
BALANCED = ("aux_loss", "global_aux_loss", None)
"""Kinds of Megatron's load balancing whose coefficient policy.load_balancing_loss is."""
MEGATRONS_RATE = 0.001
"""Megatron-Core's own moe_router_bias_update_rate, where a router's bias is switched on."""


def warmup(settings: Settings, key: str, value: Any) -> Meaning:
    """The number of steps, or their share. verl counts training steps, and we count optimizer steps."""
    owner, prefix = owner_of(key), key.rpartition(".")[0]
    steps, ratio = settings[f"{prefix}.lr_warmup_steps"], settings[f"{prefix}.lr_warmup_steps_ratio"]
    has_steps = steps is not None and steps > 0
    if has_steps and settings.engine == "veomni":
        has_steps = False
        if not key.endswith("ratio"):
            return implied("verl's VeOmni trainer does not read it, but lr_warmup_steps_ratio")
    if not has_steps and not ratio:
        return implied("no warm-up is the default")
    if key.endswith("ratio") == has_steps:
        return implied(f"verl reads {'lr_warmup_steps' if has_steps else 'lr_warmup_steps_ratio'} instead")
    if not has_steps:
        total = num_steps(settings)
        if total is None:
            return refused(f"it is {ratio} x the training steps, which the number of rows says; give --rows N")
        steps = int(ratio * total)
    each = settings.optimizer_steps(ACTOR if owner == "policy" else "critic")
    why = f"{steps} training steps x {each} optimizer steps"
    return mapped({f"{owner}.optimizer.warmup_steps": steps * each}, why)


def clip_grad(settings: Settings, key: str, value: Any) -> Meaning:
    prefix = "critic" if owner_of(key) == "critic" else ACTOR
    if key == f"{prefix}.grad_clip" and (settings.engine != "dp" or f"{prefix}.optim.clip_grad" in settings):
        return implied(f"verl's {settings.trainer} trainer reads {prefix}.optim.clip_grad")
    return used({f"{owner_of(key)}.optimizer.clip_grad": value})


def schedule(settings: Settings, key: str, value: Any) -> Meaning:
    """The names of the schedule: `lr_scheduler_type`, `warmup_style`, `lr_decay_style` and `decay_type`."""
    read = SCHEDULES[settings.engine]
    if key.rpartition(".")[2] not in read:
        return implied(f"verl's {settings.trainer} trainer does not read it, but {read[0]}")
    if key not in settings and value in (None, "constant"):
        return implied("the rate is constant by default")
    if value not in ("constant", "linear", "cosine"):
        return refused("the schedules here are constant, linear and cosine")
    owner, prefix = owner_of(key), key.rpartition(".")[0]
    to: dict[str, Any] = {f"{owner}.optimizer.schedule": value}
    if value != "constant" and all(settings[f"{prefix}.{name}"] is None for name in LOWEST):
        to[f"{owner}.optimizer.min_lr_ratio"] = 0.0
    return used(to)


def lowest_rate(settings: Settings, key: str, value: Any) -> Meaning:
    """The names in LOWEST; those without `ratio` or `factor` are rates. A constant rate has none."""
    prefix = key.rpartition(".")[0]
    kinds = {settings[f"{prefix}.{name}"] for name in SCHEDULES[settings.engine]}
    if not kinds & {"linear", "cosine"}:
        return implied("the learning rate is constant")
    rate = value if key.endswith(("ratio", "factor")) else value / settings[f"{prefix}.lr"]
    return mapped({f"{owner_of(key)}.optimizer.min_lr_ratio": rate})


def of_muon(settings: Settings, key: str, value: Any) -> Meaning:
    if "muon" not in str(settings[f"{key.partition('optim.')[0]}optim.optimizer"]):
        return implied("the optimizer is not Muon")
    return refused("policy.optimizer has no such key; megatron-rl config prints its keys")


def balancing(settings: Settings, key: str, value: Any) -> Meaning:
    prefix = key.rpartition(".")[0]
    kind, coefficient = settings[f"{prefix}.moe_router_load_balancing_type"], settings[f"{prefix}.moe_aux_loss_coeff"]
    if kind == "none" or not coefficient:
        return implied("no load is balanced by a loss")
    if kind not in BALANCED:
        return refused(f"policy.load_balancing_loss counts all tokens of a mini-batch, which {kind} does not")
    return used({"policy.load_balancing_loss": coefficient})


def router_bias(settings: Settings, key: str, value: Any) -> Meaning:
    if key.endswith("enable_expert_bias") and not value:
        return refused("the model's family says whether its routers have a bias; remove the key")
    rate = settings[f"{key.rpartition('.')[0]}.moe_router_bias_update_rate"]
    return used({"policy.router_bias_update_rate": MEGATRONS_RATE if rate is None else rate})


def routing(settings: Settings, key: str, value: Any) -> Meaning:
    """The replay of the choice of experts. R2 is the trainer's own choice, R3 the engine's."""
    if value in (None, False, "disabled"):
        return implied("no choice is replayed by default")
    modes = [settings[f"{ACTOR}.{place}router_replay.mode"] for place in ("", "megatron.", "veomni.")]
    if value == "R2" or "R2" in modes:
        return refused("experts are replayed from the engine only; policy.routing_replay is R3")
    return used({"policy.routing_replay": True})


def dtype(settings: Settings, key: str, value: Any) -> Meaning:
    """The type of the engine's weights, which is the trainer's too."""
    ours, theirs = DTYPES.get(value), trained_in(settings)
    if ours is None:
        return refused("weights are bfloat16, float16 or float32 here; choose one of them")
    if ours != theirs and theirs in DTYPES and key in settings.given:  # otherwise the trainer's key is refused
        why = f"trainer and engine have one type here, and verl's trainer computes in {theirs}; give both the same"
        return refused(why)
    return used({"model.dtype": ours})


def trained_in(settings: Settings) -> str:
    """The compute dtype of verl's trainer, by our names."""
    value = settings[f"{ACTOR}.{DTYPE_OF[settings.engine]}"] if settings.engine in DTYPE_OF else None
    return DTYPES.get(value or "bfloat16", str(value))


def trainer_dtype(settings: Settings, key: str, value: Any) -> Meaning:
    ours, engines = DTYPES.get(value), "actor_rollout_ref.rollout.dtype"
    if ours is None:
        return refused("training computes in bfloat16, float16 or float32 here; choose one of them")
    if ours != DTYPES.get(settings[engines]):
        return refused(f"trainer and engine have one type here; give {engines} the same value")
    return implied(f"model.dtype is {ours}")


def weights_dtype(settings: Settings, key: str, value: Any) -> Meaning:
    """The type of the weights that verl's optimizer changes; here it has its own in float32."""
    ours = DTYPES.get(value)
    if ours == "float32" or (ours is not None and ".ref." in key):
        return implied("the optimizer's weights are float32")
    if ours is None:
        return refused("the optimizer's weights are float32 here; remove the key")
    return mapped(
        {"model.dtype": ours},
        "the optimizer's own weights stay float32, so that small updates are not rounded away as in verl",
    )


def mixed(settings: Settings, key: str, value: Any) -> Meaning:
    """The types of FSDP's mixed precision."""
    name, ours = key.rpartition(".")[2], DTYPES.get(value)
    usual = trained_in(settings) if name in ("param_dtype", "output_dtype") else "float32"
    if ours == usual or (".ref." in key and ours is not None):
        return SAME_TYPE
    if name == "reduce_dtype" and ours == "bfloat16":
        return mapped({f"{owner_of(key)}.optimizer.gradients": "bfloat16"})
    return refused(f"it is {usual} here; remove the key")
