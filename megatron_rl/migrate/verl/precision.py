"""The meaning of verl's settings of numbers' types: of the engine, of the trainer's layers, weights and sums."""

from __future__ import annotations

from typing import Any

from megatron_rl.migrate.verl.fields import DTYPES
from megatron_rl.migrate.verl.settings import ACTOR, ROLLOUT, Meaning, Settings

SAME_TYPE = Meaning("implied", {}, "computed in bfloat16, added in float32")
DTYPE_OF = {"dp": "fsdp_config.dtype", "megatron": "megatron.dtype", "torchtitan": "torchtitan.dtype"}
"""verl's engines -> the actor's key of the type that its layers compute in. VeOmni has none."""


def dtype(settings: Settings, key: str, value: Any) -> Meaning:
    """The type of the engine's weights, which is the trainer's too."""
    ours = DTYPES.get(value)
    if ours is None:
        return Meaning("refused", {}, "weights are bfloat16 or float32 here; choose one of them")
    theirs = trained_in(settings)
    if ours != theirs and theirs in DTYPES:  # another one is refused by its own key
        why = f"trainer and engine have one type here, and verl's trainer computes in {theirs}; give both the same"
        return Meaning("refused", {}, why)
    return Meaning("used", {"model.dtype": ours})


def trained_in(settings: Settings) -> str:
    """The type of the numbers that verl's trainer computes with, by our names."""
    value = settings[f"{ACTOR}.{DTYPE_OF[settings.engine]}"] if settings.engine in DTYPE_OF else None
    return DTYPES.get(value or "bfloat16", str(value))


def trainer_dtype(settings: Settings, key: str, value: Any) -> Meaning:
    ours = DTYPES.get(value)
    if ours is None:
        return Meaning("refused", {}, "training computes in bfloat16 or float32 here; choose one of them")
    if ours != DTYPES.get(settings[f"{ROLLOUT}.dtype"]):
        why = f"trainer and engine have one type here; give {ROLLOUT}.dtype the same value"
        return Meaning("refused", {}, why)
    return Meaning("implied", {}, f"model.dtype is {ours}")


def weights_dtype(settings: Settings, key: str, value: Any) -> Meaning:
    """The type of the weights that verl's optimizer changes; here it has its own in float32."""
    ours = DTYPES.get(value)
    if ours == "float32" or (ours == "bfloat16" and ".ref." in key):
        return Meaning("implied", {}, "the optimizer's weights are float32")
    if ours is None:
        return Meaning("refused", {}, "the optimizer's weights are float32 here; remove the key")
    why = "the optimizer's own weights stay float32, so that small updates are not rounded away as in verl"
    return Meaning("mapped", {"model.dtype": "bfloat16"}, why)


def reduced_in(settings: Settings, key: str, value: Any) -> Meaning:
    """The types of FSDP's mixed precision."""
    name, ours = key.rpartition(".")[2], DTYPES.get(value)
    is_critic = key.startswith("critic.")
    if name == "reduce_dtype" and ours == "bfloat16" and not (is_critic and not settings.has_critic):
        owner = "critic" if is_critic else "policy"
        return Meaning("mapped", {f"{owner}.optimizer.gradients": "bfloat16"}) if ".ref." not in key else SAME_TYPE
    usual = {"param_dtype": "bfloat16", "output_dtype": "bfloat16"}.get(name, "float32")
    if ours == usual or ".ref." in key and ours is not None:
        return SAME_TYPE
    return Meaning("refused", {}, f"it is {usual} here; remove the key")
