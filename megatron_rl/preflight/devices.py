"""Compares the devices of a run with what the installed torch was built for, without importing it."""

from __future__ import annotations

import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from megatron_rl.config.machine import GPU_KEYS
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig
from megatron_rl.models import FAMILIES
from megatron_rl.planning.nodes import READ_BYTES_PER_S, START_S, least_loading_seconds
from megatron_rl.planning.parameters import BYTES
from megatron_rl.types import LatentAttention, ModelShape, SoftmaxAttention


def has_cpu_torch() -> bool:
    """Whether the installed torch cannot use GPUs. False also if there is none."""
    spec = PathFinder.find_spec("torch")
    version = Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    return bool(version and version.is_file() and re.search(r"^cuda\b.*= None$", version.read_text(), re.MULTILINE))


def faults_of_device(config: BaseConfig) -> list[str]:
    """The faults of a run in this Python environment."""
    numbers = [f"cluster.{key} is {number:g}" for key in GPU_KEYS if (number := getattr(config.cluster, key))]
    if not numbers or not has_cpu_torch():
        return []
    return [
        f"the run uses GPUs ({', '.join(numbers)}), but torch in {sys.prefix} is a build for CPUs; `make gpu-env` "
        "installs the GPU packages, and .venv-gpu/bin/megatron-rl then starts or submits the run. To run on CPUs, set "
        "cluster.device to cpu"
    ]


CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The head dims of vLLM's attention on CPUs (0.32.0, `CPUAttentionBackend.get_supported_head_sizes`)."""


def faults_of_engine(config: BaseConfig, shape: ModelShape) -> list[str]:
    """The fault of a model that vLLM cannot compute, or computes wrongly. vLLM does not tell it when it starts."""
    if not isinstance(config, GrpoRunConfig) or config.rollout.replay or config.rollout.backend:
        return []
    on_cpus = not config.cluster.gpus_per_engine_rank
    if fault := FAMILIES[shape.family].engine_fault(shape, config.model.dtype, "cpu" if on_cpus else "cuda"):
        return [f"{config.model.path}: {fault}"]
    if not on_cpus:
        return []
    if config.rollout.speculative is not None and shape.has_linear_attention:
        return [
            f"rollout.speculative: {config.model.path} has linear attention, whose state would have wrong drafts in "
            "it: vLLM on CPUs keeps no earlier one; set it to null"
        ]
    if config.rollout.speculative is not None and isinstance(shape.attention, LatentAttention):
        return [
            f"rollout.speculative: {config.model.path} has latent attention, which vLLM on CPUs computes wrongly for "
            "several tokens of an answer at once: log-probs were off by up to 0.9; set it to null"
        ]
    heads = {block.head_dim for block in shape.attentions if isinstance(block, SoftmaxAttention)} - {*CPU_HEAD_DIMS}
    if not heads:
        return []
    known = ", ".join(map(str, CPU_HEAD_DIMS))
    return [
        f"{config.model.path} has the head dim {min(heads)}, and vLLM's attention on CPUs knows {known}; take a model "
        "with one of these, or run the engines on GPUs"
    ]


def faults_of_start_timeout(config: BaseConfig, shape: ModelShape) -> list[str]:
    """The fault of a run on GPUs that gives its processes less time than the shortest start that is estimated."""
    cluster = config.cluster
    num_bytes = FAMILIES[shape.family].num_parameters(shape) * BYTES[config.model.dtype]
    least_s = least_loading_seconds(config, num_bytes)
    if not cluster.gpus_per_trainer or cluster.start_timeout_s >= least_s:
        return []
    return [
        f"cluster.start_timeout_s is {cluster.start_timeout_s:g}, but a start is estimated to take {least_s:.0f} s: "
        f"{START_S:.0f} s of imports, the start of vLLM, and a node reads its part of {num_bytes / 1e9:,.0f} GB of "
        f"weights at {READ_BYTES_PER_S / 1e9:.0f} GB/s; raise it"
    ]
