"""What `megatron-rl gpu-day --node` measures on all GPUs of a node, part by part, or on CPUs over gloo.

The first parts need what `parts.py` needs. The last two start Ray, vLLM and, where it is installed, a trainer with
Transformer Engine's layers, on the weights of a real model.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from megatron_rl.layout import Engines
from megatron_rl.models import read_shape
from megatron_rl.tools.bench.compare_layouts import compare, random_rows, too_far
from megatron_rl.tools.bench.gpu_day.parts import push_between
from megatron_rl.tools.bench.gpu_day.sizes import QWEN3_30B_A3B, QWEN3_32B, SIZES, Found, Number, write_model
from megatron_rl.types import Mesh

LAYOUTS = {
    "dense": ["tp2", "pp2", "dp2", "pp2-vpp2", "tp2-pp2"],
    # Each rank has a part of every sequence. On GPUs this needs Transformer Engine's layers, and so bf16.
    "context": ["cp2", "tp2-cp2", "cp2-dp2"],
    "experts": ["dp2-ep2", "tp2-dp2-ep2", "tp2-ep2-etp1"],
}
NUM_STEPS = {"cuda": 20, "cpu": 2}
"""The training steps of the real model."""
SHOWN = ("reward/mean", "loss", "grad_norm", "mismatch/mean_abs", "time/total_s", "time/update_s", "time/sync_s")


@dataclass(frozen=True, slots=True)
class NodePart:
    purpose: str
    measure: Callable[[str, Path], Found]
    """Takes the device, `cuda` or `cpu`, and the folder of the real model."""
    limit_s: float
    """The longest time, in seconds, that the part may take on GPUs."""


def layouts(kind: str, dtype: str, device: str, model: Path) -> Found:
    """Loss and gradient of one batch in several layouts, against float64 (tools/bench/compare_layouts.py)."""
    sizes, folder = dict(SIZES[device].model), Path(tempfile.mkdtemp()) / "model"
    sizes["num_hidden_layers"] = 4
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": sizes["intermediate_size"]}
    published = QWEN3_30B_A3B if kind == "experts" else QWEN3_32B
    shape = write_model(folder, sizes | (experts if kind == "experts" else {}), published)
    rows = random_rows(shape.vocab_size, SIZES[device].num_rows, SIZES[device].longest, seed=0)
    one, *others = compare(folder, LAYOUTS[kind], rows, dtype)
    numbers: dict[str, Number] = {
        f"{found.layout}, {name}": value for found in (one, *others) for name, value in asdict(found).items()
    }
    return Found(numbers, [f"{problem}." for found in others for problem in too_far(found, one)])


def push(mesh: Mesh, engines: Engines, device: str, model: Path) -> Found:
    """A push of weights from GPUs to others through NCCL."""
    ranks = mesh.world_size + engines.num * engines.world_size
    if device == "cuda" and torch.cuda.device_count() < ranks:
        return Found({"note": f"not run: it needs {ranks} GPUs"})
    devices = [f"cuda:{rank}" for rank in range(ranks)] if device == "cuda" else ["cpu"] * ranks
    return push_between(devices, SIZES[device].pushed, mesh, engines, share_memory=False)


def train(overrides: Sequence[str], device: str, model: Path) -> Found:
    """Some steps of the real model by megatron_rl/commands/grpo.py: a trainer of two ranks, and engines of vLLM."""
    from megatron_rl.recipes.smollm2.task import write_rows

    folder = Path(tempfile.mkdtemp())
    write_rows(folder / "task", seed=0)
    axis = "data" if read_shape(model).attention.num_kv_heads % 2 else "tensor"
    on_device = ["cluster.device=gpu", "model.dtype=bfloat16"]
    command = [
        *(sys.executable, "-m", "megatron_rl.commands.grpo", "configs/run/smollm2_sums.yaml"),
        *(f"model.path={model}", f"run.folder={folder}", "run.name=run", f"run.steps={NUM_STEPS[device]}"),
        *(f"data.train={folder}/task/train.jsonl", f"data.eval={folder}/task/eval.jsonl"),
        *(f"policy.parallel.{axis}=2", "rollout.active_sampling=false", "algorithm.max_mismatch=null"),
        *(on_device if device == "cuda" else []),
        *overrides,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    if done.returncode:
        return Found({}, [f"The run ended with status {done.returncode}: {done.stdout.strip().splitlines()[-1]}"])
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "loss" in record]
    return Found(numbers_of(steps), problems_of(steps))


def numbers_of(steps: Sequence[Mapping[str, float]]) -> dict[str, Number]:
    """The first, the last and the mean value of what is looked at first."""
    numbers: dict[str, Number] = {"steps": len(steps)}
    for name in SHOWN:
        values = [step[name] for step in steps if name in step]
        if values:
            shown = {"first": values[0], "last": values[-1], "mean": sum(values) / len(values)}
            numbers |= {f"{name}, {which}": value for which, value in shown.items()}
    return numbers


def problems_of(steps: Sequence[Mapping[str, float]]) -> list[str]:
    found = [
        f"{name} is {step[name]} in step {number}."
        for number, step in enumerate(steps)
        for name in SHOWN
        if not math.isfinite(step.get(name, 0.0))
    ]
    return found if steps else ["No step has trained anything."]


NODE_PARTS = {
    "layouts over NCCL": NodePart(
        "compares layouts of a dense model with float64", partial(layouts, "dense", "float32"), 240
    ),
    "context parallelism": NodePart(
        "the same in bf16, with parts of sequences", partial(layouts, "context", "bfloat16"), 240
    ),
    "expert parallelism": NodePart("the same, of a mixture of experts", partial(layouts, "experts", "float32"), 240),
    "push over NCCL": NodePart("pushes weights from one GPU to another", partial(push, Mesh(), Engines()), 60),
    "push of several trainers": NodePart(
        "pushes from two stages to two engines of TP2: each engine rank takes from both trainers",
        partial(push, Mesh(pipeline=2), Engines(2, 2)),
        120,
    ),
    "real model": NodePart(
        "trains a real model, engines on GPUs of their own", partial(train, ["rollout.num_engines=2"]), 1200
    ),
    "real model, shared GPUs": NodePart(
        "trains it with engines on the trainers' GPUs",
        partial(train, ["rollout.num_engines=2", "cluster.colocate=true"]),
        1200,
    ),
}
"""The parts in the order of what they teach."""
