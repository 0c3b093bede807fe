"""What a run takes from the machine: its GPUs, the data type that its CPU multiplies fast, and its cores."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megatron_rl.config.cluster import ClusterConfig
from megatron_rl.config.policy import ModelConfig
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig

Config = TypeVar("Config", bound=BaseConfig)

DEVICES = Path("/dev")
GPU_KEYS = ("gpus_per_trainer", "gpus_per_engine_rank")
"""The keys of `cluster` that `cluster.device` gives values to."""
CPU = Path("/proc/cpuinfo")
BF16_UNITS = ("amx_bf16", "avx512_bf16")
"""The names of the units in Linux' list of a processor's features."""


def count_gpus() -> int:
    """The number of NVIDIA GPUs that a process of this machine may use: they have device files, and
    CUDA_VISIBLE_DEVICES, if it is set, names them. No library is needed."""
    num_files = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in DEVICES.glob("nvidia*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not num_files:
        return num_files
    names = [name.strip() for name in visible.split(",")]
    return sum(name not in ("", "-1", "NoDevFiles") for name in names)


def with_device(given: Mapping[str, Any], has_gpus: Callable[[], object]) -> Mapping[str, Any]:
    """The keys of a run, with `cluster.gpus_per_trainer` and `cluster.gpus_per_engine_rank` as `cluster.device` says.
    Where they stay out, they are 0.

    Args:
        given: the merged keys, which are not validated yet.
        has_gpus: whether the machines of the run have GPUs. It is called only if the answer matters.
    """
    cluster = given.get("cluster", {})
    if not isinstance(cluster, Mapping):
        return given
    device, left_out = cluster.get("device", "auto"), [key for key in GPU_KEYS if key not in cluster]
    if device == "gpu" or (device == "auto" and len(left_out) == len(GPU_KEYS) and has_gpus()):
        return {**given, "cluster": {**cluster, **dict.fromkeys(left_out, 1)}}
    return given


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


def num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_of_ranks(config: BaseConfig, cores: int) -> int:
    """The number of threads of each trainer rank and each engine rank on a machine with this number of cores.
    OMP_NUM_THREADS in the shell, or in `cluster.environment`, has precedence.

    Trainers and engines that take turns (`rollout.max_lag: 0`) share out all cores among themselves in turn: 1 trainer
    rank and 1 engine on 2 cores have 2 threads each. With a lag both compute at the same time, so each has 1. On GPUs,
    and in a Ray that is running already, whose nodes are other machines, it is 1.
    """
    cluster = config.cluster
    if cluster.gpus_per_trainer or cluster.gpus_per_engine_rank or cluster.ray_address is not None:
        return 1
    num_trainers, num_engines = config.policy.parallel.mesh.world_size, 0
    if isinstance(config, GrpoRunConfig):
        num_trainers = config.num_trainer_ranks
        num_engines = config.rollout.num_engines * config.rollout.engine_ranks
        if config.rollout.max_lag:
            return max(1, cores // (num_trainers + num_engines))
    return max(1, cores // max(num_trainers, num_engines))


def start_in_turn(cluster: ClusterConfig, num_ranks: int, cores: int) -> bool:
    """Whether each trainer rank on this machine imports its libraries before the next one starts: if the processes that
    start (the ranks, an engine and a verifier) are more than the cores. At the same time the ranks would take the cores
    from the engine, whose start takes longest: the demo's took 24.4 s on two
    cores, and 20.2 s in turn."""
    on_cpus = not (cluster.gpus_per_trainer or cluster.gpus_per_engine_rank)
    return on_cpus and cluster.ray_address is None and cores < num_ranks + 2
