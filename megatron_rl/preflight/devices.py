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
from megatron_rl.types import ModelShape, SoftmaxAttention
from megatron_rl.types.mamba import SquaredReluMixture


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
    mixture = shape.mixture
    if config.model.dtype == "float16" and shape.family in ("glm4_moe", "glm4_moe_lite") and mixture:
        # 0.32.0: `MoERunner` divides the shared experts' output by the factor, and these layers do not compensate it.
        if mixture.scaling_factor != 1 and mixture.shared_ffn_size:
            return [
                f"model.dtype is float16, in which vLLM adds up the experts of {shape.family} with another factor than "
                f"routed_scaling_factor {mixture.scaling_factor:g}; set it to bfloat16"
            ]
    if config.cluster.gpus_per_engine_rank:
        return []
    path, instead = config.model.path, "run the engines on GPUs"
    if config.rollout.speculative is not None and shape.has_linear_attention:
        return [
            f"rollout.speculative: {path} has linear attention, whose state would have wrong drafts in it: vLLM on "
            "CPUs keeps no earlier one; set it to null"
        ]
    if shape.family == "minimax_m2":  # 0.32.0: `CPURouter` asserts softmax for routers without groups
        return [f"{path} is a minimax_m2, and vLLM on CPUs has no sigmoid router without groups of experts; {instead}"]
    if any(isinstance(mlp, SquaredReluMixture) for mlp in shape.mlps):  # 0.32.0: its layer asserts gated experts
        return [f"{path} has experts with a squared ReLU, and vLLM on CPUs computes only gated experts; {instead}"]
    if shape.family.startswith("qwen3_5") and not PathFinder.find_spec("torchvision"):  # beside its class for images
        return [f"vLLM's class for a {shape.family} needs torchvision, which the packages for CPUs lack; {instead}"]
    if shape.has_delta_rule and config.model.dtype != "bfloat16":
        return [
            f"model.dtype is {config.model.dtype}, and vLLM's gated delta rule on CPUs computes in bfloat16 alone; set "
            f"it to bfloat16, or {instead}"
        ]
    heads = {block.head_dim for block in shape.attentions if isinstance(block, SoftmaxAttention)} - {*CPU_HEAD_DIMS}
    if not heads:
        return []
    known = ", ".join(map(str, CPU_HEAD_DIMS))
    return [
        f"{path} has the head dim {min(heads)}, and vLLM's attention on CPUs knows {known}; take a model with one of "
        f"these, or {instead}"
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
