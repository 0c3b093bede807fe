"""The parts of `megatron-rl gpu-day` that train on one GPU: layers of Qwen3-32B's shape, a resumed checkpoint, an
offloaded optimizer state."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_rl.balance import training_flops
from megatron_rl.balance.hardware import PEAK_FLOPS
from megatron_rl.config.optimizer import AdamConfig
from megatron_rl.config.policy import ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.models import read_shape
from megatron_rl.planning.activations import layer_bytes
from megatron_rl.planning.parameters import rank_parameters
from megatron_rl.planning.trainer import trainer_memory
from megatron_rl.tools.bench.compare_layouts import deal_rows, random_rows, rows_of_lengths
from megatron_rl.tools.bench.gpu_day.sizes import (
    NUM_STEPS,
    NUM_UPDATES,
    SIZES,
    Found,
    all_at_once,
    write_config,
    write_model,
)
from megatron_rl.types import Mesh, ModelShape, Share

if TYPE_CHECKING:
    from megatron_rl.actor.actor import MegatronActor

FILLED = 0.9
"""The share of a card's memory that the part `layers` fills, by the planner's estimate."""


def layers(recompute: str, device: str) -> Found:
    """An update of a few layers of Qwen3-32B's shape: memory, time and FLOPs, against planning/trainer.py.

    The memory is what torch has allocated. On a CPU nobody counts it.
    """
    sizes, folder = SIZES[device], Path(tempfile.mkdtemp()) / "model"
    shape = write_config(folder, sizes.layers)
    model = ModelConfig(path=folder, dtype="bfloat16", layers="local", recompute=recompute)
    card = torch.cuda.mem_get_info()[1] if device == "cuda" else math.inf
    lengths = lengths_that_fit(shape, model, sizes.lengths, FILLED * card)
    actor = build_actor(folder, model)
    rows = rows_of_lengths(shape.vocab_size, lengths, np.random.default_rng(0))
    [share] = deal_rows(folder, ParallelConfig(), rows, 1)
    actor.begin(share, {})

    marks: dict[str, Mark] = {}
    """The marks of the latest update, by their names."""

    def marker(name: str) -> Callable[..., None]:
        def mark(*unused: object) -> None:
            marks[name] = Mark.now(device)

        return mark

    [decoder] = (module for name, module in actor.chunks[0].named_modules() if name.endswith(".decoder"))
    decoder.register_forward_pre_hook(marker("first layer"))
    decoder.final_layernorm.register_forward_pre_hook(marker("last norm"))
    [chained] = actor.optimizer.megatron.chained_optimizers
    chained.optimizer.register_step_pre_hook(marker("optimizer"))
    passes_s, updates_s = [], []
    for number in range(NUM_UPDATES):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = Mark.now(device)
        metrics = actor.update(0, {})
        end = Mark.now(device)
        if number:  # the first update allocates, and chooses kernels
            passes_s.append(marks["optimizer"].time_s - begin.time_s)
            updates_s.append(end.time_s - begin.time_s)
    actor.close()

    num_tokens = sum(lengths)
    num_parts = num_tokens * shape.num_layers
    # The first layer's input is there before the layers, and the last layer's output after them: one for the other.
    kept = (marks["last norm"].held_bytes - marks["first layer"].held_bytes) / num_parts
    kept_predicted = {
        "none": layer_bytes(shape, ParallelConfig(), shape.layers[0], 2, fused=False),
        "full": 2.0 * shape.hidden_size,  # the layer's input
    }[recompute]
    peak = marks["optimizer"].peak_bytes
    predicted = trainer_memory(shape, model, PolicyConfig(), num_tokens, on_gpus=device == "cuda")
    done, needed = (float(training_flops(np.array(lengths), shape, how).sum()) for how in (recompute, "none"))
    numbers = {
        "layers": shape.num_layers,
        "samples": len(lengths),
        "tokens": num_tokens,
        "loss": metrics["loss"],
        "kept by a layer, predicted, bytes a token": kept_predicted,
        "peak of the passes, predicted, bytes": predicted.totals[0],
        **{f"of this, {name}, bytes": values[0] for name, values in predicted.parts.items()},
        "forward and backward pass, seconds": min(passes_s),
        "update with the optimizer's step, seconds": min(updates_s),
        "passes with their recomputation, TFLOP/s": done / min(passes_s) / 1e12,
    }
    if device == "cuda":
        numbers |= {
            "kept by a layer, bytes a token": kept,
            "kept by a layer, measured / predicted": kept / kept_predicted,
            "peak of the passes, bytes": peak,
            "peak of the passes, measured / predicted": peak / predicted.totals[0],
            "peak of the update with the optimizer's step, bytes": end.peak_bytes,
            f"MFU of the passes, of {PEAK_FLOPS / 1e12:.0f} TFLOP/s": needed / min(passes_s) / PEAK_FLOPS,
        }
    return Found(numbers, rates={"dense": done / min(passes_s) / PEAK_FLOPS})


def lengths_that_fit(
    shape: ModelShape, model: ModelConfig, lengths: tuple[int, ...], num_bytes: float
) -> tuple[int, ...]:
    """The first samples that fit into the memory together by the planner's estimate; at least one."""
    fitting = (
        count
        for count in range(len(lengths), 1, -1)
        if trainer_memory(shape, model, PolicyConfig(), sum(lengths[:count]), on_gpus=True).totals[0] <= num_bytes
    )
    return lengths[: next(fitting, 1)]


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of an update."""

    time_s: float
    held_bytes: int
    """What torch has allocated on the GPU; 0 on a CPU."""
    peak_bytes: int
    """The largest of it so far."""

    @classmethod
    def now(cls, device: str) -> Mark:
        if device == "cpu":
            return cls(time.perf_counter(), 0, 0)
        torch.cuda.synchronize()
        return cls(time.perf_counter(), torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())


def build_actor(folder: Path, model: ModelConfig, offload: bool = False) -> MegatronActor:
    """A trainer of one rank, with random weights."""
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.spec import ActorSpec
    from megatron_rl.algorithms import SupervisedObjective
    from megatron_rl.bridge.join import host_store

    optimizer = AdamConfig(lr=1e-3, warmup_steps=2, schedule="cosine", min_lr_ratio=0.1, offload=offload)
    spec = ActorSpec(
        shape=read_shape(folder),
        model=model,
        policy=PolicyConfig(optimizer=optimizer),
        objective=SupervisedObjective(),
        temperature=1.0,
        total_steps=2 * NUM_STEPS,
        seed=0,
    )
    return MegatronActor(spec, rank=0, world_size=1, store=host_store("127.0.0.1"))


def resume(device: str) -> Found:
    """The step after a checkpoint, in the process that has written it and in a new one. Both must give the same bits.

    Some of PyTorch's kernels on a GPU add numbers in any order. Here it takes kernels with a fixed order.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    sizes, work = SIZES[device], Path(tempfile.mkdtemp())
    folder, checkpoint = work / "model", work / "checkpoint"
    shape = write_model(folder, sizes.model)
    shares = []
    for step in range(NUM_STEPS + 1):
        rows = random_rows(shape.vocab_size, sizes.num_rows, sizes.longest, seed=step)
        shares += deal_rows(folder, ParallelConfig(), rows, 1)
    saved = _train_and_save(folder, shares, checkpoint)
    [resumed] = all_at_once([(_resume, (folder, shares[-1], checkpoint))])
    numbers = {
        "loss of the next step": saved["loss"],
        "loss of the next step, resumed": resumed["loss"],
        "gradient norm of the next step": saved["grad_norm"],
        "gradient norm of the next step, resumed": resumed["grad_norm"],
        "checkpoint, bytes": sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()),
        "saving, seconds": saved["seconds"],
        "loading, seconds": resumed["seconds"],
    }
    same = {"loss", "grad_norm", "param_norm", "update_ratio", "lr", "digest"}
    assert same <= saved.keys() and same <= resumed.keys()
    differing = sorted(name for name in same if saved[name] != resumed[name])
    return Found(numbers, [f"{name} of the next step has other bits after the resume." for name in differing])


def _train_and_save(folder: Path, shares: Sequence[Share], checkpoint: Path) -> dict[str, Any]:
    from megatron_rl.actor.weights import load_weights

    torch.use_deterministic_algorithms(True, warn_only=True)
    actor = build_actor(folder, ModelConfig(path=folder, dtype="bfloat16", layers="local"))
    load_weights(actor, folder)
    for share in shares[:-1]:
        actor.begin(share, {})
        actor.update(0, {})
    start = time.perf_counter()
    actor.save(checkpoint, {})
    actor.finish_save()
    seconds = time.perf_counter() - start
    return _next_step(actor, shares[-1]) | {"seconds": seconds}


def _resume(folder: Path, share: Share, checkpoint: Path) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    actor = build_actor(folder, ModelConfig(path=folder, dtype="bfloat16", layers="local"))
    start = time.perf_counter()
    actor.load(checkpoint)
    seconds = time.perf_counter() - start
    return _next_step(actor, share) | {"seconds": seconds}


def _next_step(actor: MegatronActor, share: Share) -> dict[str, Any]:
    """The metrics of an update, and a digest of the weights after it."""
    actor.begin(share, {})
    metrics = actor.update(0, {})
    digest = hashlib.sha256()
    for name, parameter in sorted(actor.parameters().items()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().view(torch.uint8).numpy().tobytes())
    actor.close()
    return {**metrics, "digest": digest.hexdigest()}


def offload(device: str) -> Found:
    """Updates with the optimizer's state in the host's memory, and with all of it on the device. Both must give the
    same bits, and the device must hold less by the bytes of the state."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    sizes, folder = SIZES[device], Path(tempfile.mkdtemp()) / "model"
    shape = write_model(folder, sizes.pushed)
    shares = []
    for step in range(NUM_STEPS):
        rows = random_rows(shape.vocab_size, sizes.num_rows, sizes.longest, seed=step)
        shares += deal_rows(folder, ParallelConfig(), rows, 1)
    [kept] = all_at_once([(_updates, (folder, shares, False, device))])
    [offloaded] = all_at_once([(_updates, (folder, shares, True, device))])
    state = rank_parameters(shape, Mesh(), 0).state_bytes(Mesh(), "bfloat16")
    numbers = {
        "optimizer state, bytes": state,
        "optimizer's step, seconds": kept["seconds"],
        "optimizer's step, offloaded, seconds": offloaded["seconds"],
        "traffic of both directions / time of the offloaded step, bytes a second": 2 * state / offloaded["seconds"],
    }
    problems = [
        f"{name} of the last update has other bits where the state is offloaded."
        for name in ("loss", "grad_norm", "digest")
        if kept[name] != offloaded[name]
    ]
    if device == "cuda":
        freed = kept["held"] - offloaded["held"]
        numbers |= {"held after an update, bytes": kept["held"], "freed by offloading, bytes": freed}
        if freed < 0.99 * state:
            problems.append(f"Offloading has freed {freed:,} bytes of the GPU, but the state has {state:,.0f}.")
    return Found(numbers, problems)


def _updates(folder: Path, shares: Sequence[Share], offload: bool, device: str) -> dict[str, Any]:
    """The last of some updates, the time of its optimizer's step, and what the device held then."""
    from megatron_rl.actor.weights import load_weights

    torch.use_deterministic_algorithms(True, warn_only=True)
    actor = build_actor(folder, ModelConfig(path=folder, dtype="bfloat16", layers="local"), offload)
    load_weights(actor, folder)
    optimizer: Any = actor.optimizer  # this one gets another method
    update, marks = actor.optimizer.update, []

    def timed_update(*arguments: Any) -> dict[str, float]:
        begin = Mark.now(device)
        norms = update(*arguments)
        marks.append((begin, Mark.now(device)))
        return norms

    optimizer.update = timed_update
    for share in shares[:-1]:
        actor.begin(share, {})
        actor.update(0, {})
    found = _next_step(actor, shares[-1])
    begin, end = marks[-1]
    return found | {"seconds": end.time_s - begin.time_s, "held": end.held_bytes}
