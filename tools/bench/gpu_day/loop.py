"""What `megatron-rl gpu-day --loop` measures: the whole loop, trainer and engine on one GPU in turns, or on CPUs
through the same code.

Each part that trains is a run of `megatron-rl grpo` in a process of its own. Its folder in the record keeps metrics and
logs, and no weights. `predicted` is what the planner (`planning/`) computes for an H100 with the lengths that the
answers had; on a CPU this shows no more than that the comparison works.

A run that is killed or stopped must repeat the numbers of an undisturbed one. On a CPU they are equal to the bit. On a
GPU kernels may round otherwise from run to run, and a token that is sampled otherwise changes all that follows, so
their differences are told there and only the steps, the statuses and the checkpoints are judged.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from megatron_rl.commands.defaults import read_config
from megatron_rl.commands.gpus import total_bytes, visible_ids
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.planning.engine import RESERVED_BYTES
from megatron_rl.planning.gpu import PHASES
from megatron_rl.planning.memory import RunMemory, run_memory
from megatron_rl.planning.shapes import planned_shape
from megatron_rl.planning.step import expected_tokens, step_seconds
from megatron_rl.recipes.smollm2.task import write_rows
from megatron_rl.tools.bench.chaos import check, numbers
from megatron_rl.tools.bench.gpu_day.answers import EAGER, GRAPHS, NUM_PROMPTS, same_answers
from megatron_rl.tools.bench.gpu_day.node import problems_of
from megatron_rl.tools.bench.gpu_day.sizes import Found, Number, write_model
from megatron_rl.tools.bench.run_process import (
    IS_STEP,
    ROOT,
    RunProcess,
    ended,
    faults_of_stop,
    finished,
    kill,
    wait_until,
)

QWEN3_1_7B = Path("configs/model/Qwen3-1.7B.json")
SERVED = {"architectures": ["Qwen3ForCausalLM"]}
"""What vLLM needs to know, and a plan does not."""
NEEDED = ("ray", "vllm", "transformers", "megatron")
"""The modules without which no part can start."""
FIRST_STEPS = 2
"""The steps that are shown apart, because kernels are chosen in them."""
KEPT_SHARE = 0.85
"""The share of a part's time after which its run is ended, so that its numbers so far can be told."""


@dataclass(frozen=True, slots=True)
class LoopSizes:
    """How large the parts are on a device."""

    device: tuple[str, ...]
    """Overrides of the configuration for all runs."""
    sums: tuple[str, ...]
    """Overrides for the real model's runs."""
    save_every: int
    kill_after: int
    """The steps that are finished, and saved up to the last checkpoint, when everything is killed."""
    stop_in: int
    """The step whose answers are under way when the run is asked to stop."""
    layers: Mapping[str, int]
    """What replaces the sizes of Qwen3-1.7B."""
    long: tuple[str, ...]
    """Overrides for the runs of the random model."""


NOISE = "{kind: function, path: 'megatron_rl.recipes.tiny.rewards:noise'}"
LOOP_SIZES = {
    "cuda": LoopSizes(
        device=(
            *("cluster.device=gpu", "cluster.gpus_per_trainer=1", "cluster.gpus_per_engine_rank=1"),
            "model.dtype=bfloat16",
        ),
        sums=("run.steps=24", f"rollout.vllm={json.dumps(EAGER)}"),
        save_every=5,
        kill_after=8,
        stop_in=16,
        layers={},
        long=(
            *("run.steps=4", "rollout.prompts_per_step=32", "rollout.samples_per_prompt=8"),
            *("rollout.max_response_tokens=1024", "balance.max_tokens_per_microbatch=8192"),
            f"rollout.vllm={json.dumps(GRAPHS)}",
        ),
    ),
    "cpu": LoopSizes(
        device=("cluster.device=cpu", "model.dtype=float32"),
        sums=(
            *("run.steps=3", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=4", "eval.num_prompts=2"),
            # Longer answers, so that a signal finds them under way; with the noise every model learns something.
            "rollout.max_response_tokens=96",
            f"rewards=[{{kind: exact_answer, answer: last_number}}, {NOISE}]",
        ),
        save_every=1,
        kill_after=1,
        stop_in=2,
        layers={
            **{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
            **{"head_dim": 32, "intermediate_size": 96},
        },
        long=(
            *("run.steps=2", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=4"),
            "rollout.max_response_tokens=24",
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class LoopPlace:
    """Where a part works, and until when."""

    device: str
    """`cuda` or `cpu`."""
    model: Path
    """The folder of the real model."""
    folder: Path
    """The part's folder in the record. The folders of other parts are next to it."""
    ends_at: float
    """When the part must have ended, in seconds of `time.monotonic`."""

    @property
    def sizes(self) -> LoopSizes:
        return LOOP_SIZES[self.device]

    def sums(self) -> list[str]:
        """The configuration of the real model on one-digit sums, whose rows are written first."""
        task = self.folder / "task"
        write_rows(task, seed=0)
        return [
            str(ROOT / "configs/run/smollm2_sums.yaml"),
            *(f"model.path={self.model}", f"data.train={task}/train.jsonl", f"data.eval={task}/eval.jsonl"),
            # Shared GPUs have no engines while trainers train, and bf16 has a larger mismatch than the recipe allows.
            *("cluster.colocate=true", "rollout.active_sampling=false", "algorithm.max_mismatch=null"),
            *self.sizes.device,
            *self.sizes.sums,
            f"checkpoint.every={self.sizes.save_every}",
        ]


@dataclass(frozen=True, slots=True)
class LoopPart:
    purpose: str
    measure: Callable[[LoopPlace], Found]
    limit_s: float
    """The longest time, in seconds, that the part may take on a GPU."""


def measure_loop(part: LoopPart, device: str, model: Path, folder: Path, limit_s: float) -> Found:
    """What a part's process does.

    Args:
        folder: the part's, in the record.
        limit_s: the longest time, in seconds, that the part may take.
    """
    if missing := missing_packages(device):
        return Found({}, [missing])
    place = LoopPlace(device, model.absolute(), folder.absolute(), time.monotonic() + KEPT_SHARE * limit_s)
    try:
        return part.measure(place)
    finally:
        for name in ("checkpoints", "hf"):
            for path in place.folder.glob(f"runs/*/{name}"):
                shutil.rmtree(path)
        shutil.rmtree(place.folder / "model", ignore_errors=True)


def missing_packages(device: str) -> str:
    """Which packages are not installed, and what installs them; empty if none is missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if not missing:
        return ""
    make, folder = ("make gpu-env", ".venv-gpu") if device == "cuda" else ("make setup", ".venv")
    return (
        f"{' and '.join(missing)} cannot be imported in {sys.prefix}, and the loop needs them: `{make}` installs all "
        f"packages into {folder}, and {folder}/bin/python then starts this command."
    )


def real_model(place: LoopPlace) -> Found:
    """The real model on sums, from the first step to the last."""
    run = RunProcess(place.folder, "run", place.sums())
    run.start()
    problem = finished(run, place.ends_at)
    return Found(numbers_of(run, place), problems(run, problem))


def stopped_and_resumed(place: LoopPlace) -> Found:
    """The run of `real_model` again: killed with all its processes, resumed, stopped by SIGUSR1 while answers are under
    way, and resumed. Without the part before there is first an undisturbed run."""
    configuration, sizes = place.sums(), place.sizes
    steps = read_config(GrpoRunConfig, configuration).run.steps
    whole = RunProcess(place.folder.parent / REAL_MODEL, "run", [])
    if whole.num_done() < steps:
        whole = RunProcess(place.folder, "undisturbed", configuration)
        whole.start()
        if problem := finished(whole, place.ends_at):
            return Found({}, [problem])
    run = RunProcess(place.folder, "disturbed", configuration)
    run.start()
    if not wait_until(run, lambda: run.num_done() >= sizes.kill_after and run.saved > 0, place.ends_at):
        return Found({}, [finished(run, place.ends_at) or "The run ended before it was killed."])
    killed_at, started = run.num_done(), time.monotonic()
    kill(run)
    log, words = run.run_folder / "logs" / "engine_0.log", f"version {sizes.stop_in}: answering"
    before = log.read_text().count(words)  # a start goes on writing the log
    run.start()
    if not wait_until(run, lambda: log.read_text().count(words) > before, place.ends_at):
        return Found({}, [finished(run, place.ends_at) or "The resumed run ended before it was stopped."])
    assert run.process is not None, "it was started"
    run.process.send_signal(signal.SIGUSR1)
    status = ended(run, place.ends_at)
    faults = faults_of_stop(status, run.saved, run.num_done(), run.log.read_text())
    run.start()
    problem = finished(run, place.ends_at)
    found: dict[str, Number] = {
        "steps that were finished when everything was killed": killed_at,
        "status after SIGUSR1": "none" if status is None else status,
        "from the kill to the end, seconds": time.monotonic() - started,
        **differences(whole.records, run.records),
    }
    if problem or place.device == "cuda":  # see the module
        done = f"The run has {run.num_done()} of {steps} steps." if run.num_done() != steps else ""
        return Found(found, [one for one in (*faults, problem, done) if one])
    num_samples = next(int(record[IS_STEP]) for record in whole.records if IS_STEP in record)
    checks = check(whole.records, run.records, steps, num_samples)
    return Found(found, [*faults, *(f"This does not hold: {what}." for what, holds in checks.items() if not holds)])


def answers(place: LoopPlace) -> Found:
    """Tokens at temperature 0 with and without CUDA graphs (answers.py)."""
    from megatron_rl.commands.grpo import read_prompts
    from megatron_rl.data.tokenizer import open_tokenizer

    config = read_config(GrpoRunConfig, place.sums())
    stream = read_prompts(config, open_tokenizer(config.model.path)).train
    return same_answers(config, [prompt for _, prompt in stream.take(NUM_PROMPTS)], place.device)


def long_answers(place: LoopPlace) -> Found:
    """A random model of the shape of Qwen3-1.7B, whose answers nearly all have the largest length."""
    folder = place.folder / "model"
    own = json.loads((place.model / "config.json").read_text())
    published = json.loads((ROOT / QWEN3_1_7B).read_text())
    tokens = {name: own[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in own}
    # The tokenizer is the real model's. Rows without a token are never sampled.
    vocabulary = max(own["vocab_size"], 0 if place.sizes.layers else published["vocab_size"])
    on_gpu = place.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    write_model(folder, {**SERVED, **place.sizes.layers, **tokens, "vocab_size": vocabulary}, QWEN3_1_7B, dtype)
    for path in place.model.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    configuration = [
        *place.sums(),
        *(f"model.path={folder}", "data.eval=null", f"rewards=[{NOISE}]", "checkpoint.every=0"),
        *place.sizes.long,
    ]
    if on_gpu and (found := planned(configuration)[1].problems):
        return Found({}, [f"By the planner it does not fit: {problem}." for problem in found])
    run = RunProcess(place.folder, "run", configuration)
    run.start()
    problem = finished(run, place.ends_at)
    return Found(numbers_of(run, place), problems(run, problem))


def planned(configuration: Sequence[str]) -> tuple[GrpoRunConfig, RunMemory]:
    """The run on a GPU, and its memory by the planner."""
    on_gpu = [*configuration, *LOOP_SIZES["cuda"].device]
    if (total := total_bytes(visible_ids()[:1] or ["0"])) is not None:
        on_gpu.append(f"cluster.gpu_memory_gb={(total - RESERVED_BYTES) // 1e9:g}")
    config = read_config(GrpoRunConfig, on_gpu, planning=True)
    return config, run_memory(config, planned_shape(config))


def numbers_of(run: RunProcess, place: LoopPlace) -> dict[str, Number]:
    """What a run has measured, and what the planner predicts for it; nothing if no step is finished."""
    records = run.records
    steps = [record for record in records if IS_STEP in record]
    if not steps:
        return {"steps": 0}
    config, memory = planned(run.arguments)
    step = step_seconds(config, planned_shape(config), memory.engine, expected_tokens(config))
    later = steps[FIRST_STEPS:] or steps[-1:]

    def mean(*names: str) -> float:
        return sum(float(record.get(name, 0.0)) for record in later for name in names) / len(later)

    pairs = {
        "step, seconds": (step.total, mean("time/total_s")),
        "generation, seconds": (step.generation, mean("time/generate_s")),
        "passes and updates, seconds": (step.training, mean("time/logprobs_s", "time/update_s")),
        "push, seconds": (step.push, mean("time/sync_s")),
        "mean answer, tokens": (None, mean("length/response_mean")),
    }
    found: dict[str, Number] = {"steps": len(steps), "predictions": f"for an H100; this is {place.device}"}
    for name, (predicted, measured) in pairs.items():
        found |= {} if predicted is None else {f"{name}, predicted": predicted}
        found[f"{name}, measured"] = measured
    [gpu] = memory.gpus
    found |= {f"memory {phase}, bytes, predicted": size for phase, size in zip(PHASES, gpu.totals, strict=True)}
    return found | measured_numbers(records)


def measured_numbers(records: Sequence[Mapping[str, Any]]) -> dict[str, Number]:
    """The metrics of a run that are looked at first, by their own names (docs/metrics.md)."""
    steps = [record for record in records if IS_STEP in record]
    first, later = steps[:1], steps[FIRST_STEPS:] or steps[-1:]
    found: dict[str, Number] = {}
    accuracy = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]
    if accuracy:
        found |= {"held-out accuracy, before": accuracy[0], "held-out accuracy, after": accuracy[-1]}
    for name, how in {"mismatch/mean_abs": "mean", "mismatch/max_abs": "largest"}.items():
        if values := [record[name] for record in steps if name in record]:
            found[f"{name}, {how}"] = max(values) if how == "largest" else sum(values) / len(values)
    for name in sorted({name for record in steps for name in record}):
        if name.startswith("memory/"):
            found[f"{name}, largest"] = max(record[name] for record in steps if name in record)
        elif name.startswith("time/") or name in ("rollout/tokens_per_s", "perf/tokens_per_s", "perf/mfu"):
            for which, some in (("first step", first), ("mean of later steps", later)):
                if values := [record[name] for record in some if name in record]:
                    found[f"{name}, {which}"] = sum(values) / len(values)
    return found


def problems(run: RunProcess, problem: str) -> list[str]:
    """What is wrong with a run, and with the numbers of its steps."""
    steps = [record for record in run.records if "loss" in record]
    return [problem, *(problems_of(steps) if steps else [])] if problem else problems_of(steps)


def differences(whole: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> dict[str, Number]:
    """How far loss, gradient norm and mean reward of two runs are apart."""
    pairs = list(zip(numbers(whole), numbers(other), strict=False))
    relative = [
        abs(x - y) / max(abs(x), abs(y))
        for one, another in pairs
        for x, y in zip(one[1:], another[1:], strict=True)
        if x is not None and y is not None and x != y
    ]
    return {
        f"steps with equal loss, gradient norm and reward, of {len(pairs)}": sum(x == y for x, y in pairs),
        "largest relative difference of these": max(relative, default=0.0),
    }


REAL_MODEL = "real model"
LOOP_PARTS = {
    REAL_MODEL: LoopPart("trains a real model, trainer and engine on one GPU in turns", real_model, 160),
    "real model, stopped and resumed": LoopPart(
        "kills the same run, resumes it, stops it while answers are under way, and resumes it", stopped_and_resumed, 300
    ),
    "same answers": LoopPart("compares tokens with and without CUDA graphs, before and after a push", answers, 130),
    "1.7B shape": LoopPart("trains a random model on 256 answers of 1,024 tokens a step", long_answers, 300),
}
"""The parts in their order. All deadlines together are below fifteen minutes."""
