"""What the configuration takes from the machine: the data type in which its CPU multiplies matrices quickly."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from megatron_rl.config.policy import ModelConfig
from megatron_rl.config.schema import BaseConfig

Config = TypeVar("Config", bound=BaseConfig)

CPU = Path("/proc/cpuinfo")
BF16_UNITS = ("amx_bf16", "avx512_bf16")
"""The names of the units in Linux' list of a processor's features."""


def has_bf16_units() -> bool:
    """Whether this machine's CPU has units that multiply matrices of bfloat16. Without them a product in bfloat16 takes
    much longer than one in float32."""
    features = CPU.read_text() if CPU.exists() else ""
    return any(unit in features for unit in BF16_UNITS)


def with_data_types(config: Config) -> Config:
    """The configuration with data types in the place of `auto`: bfloat16 on GPUs and on CPUs with units for it, float32
    on other CPUs. A data type that was chosen here is not among the model's `model_fields_set`."""
    on_cpu = config.cluster.gpus_per_trainer == 0
    chosen = "float32" if on_cpu and not has_bf16_units() else "bfloat16"

    def settled(model: ModelConfig) -> ModelConfig:
        if model.dtype != "auto":
            return model
        return ModelConfig.model_construct(model.model_fields_set - {"dtype"}, **dict(model) | {"dtype": chosen})

    changes: dict[str, object] = {"model": settled(config.model)}
    critic = getattr(config, "critic", None)
    if critic is not None and critic.model is not None:
        changes["critic"] = critic.model_copy(update={"model": settled(critic.model)})
    return config.model_copy(update=changes)
