"""Compares the devices of a run with what the installed torch was built for, without importing it."""

from __future__ import annotations

import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from megatron_rl.config.machine import GPU_KEYS
from megatron_rl.config.schema import BaseConfig


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
        "installs the GPU packages, and .venv-gpu/bin/python then starts the run. To run on CPUs, set cluster.device "
        "to cpu"
    ]
