"""What tools/gpu_day.py measures, part by part. Each part runs in a process of its own, on a GPU or on a CPU.

The numbers of a part are written down whatever they are. A part fails if a result is wrong: `Found.problems` says what
was expected, and why. Times, memory and rates are never judged.

Shape letters: T packed tokens, V rows of the output layer, H hidden size.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import platform
import shutil
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from megatron_rl.balance import training_flops
from megatron_rl.balance.hardware import PEAK_FLOPS
from megatron_rl.config.policy import ModelConfig, OptimizerConfig, ParallelConfig, PolicyConfig
from megatron_rl.config.shipped import find_shipped
from megatron_rl.layout import FAMILIES, Engines, Shard, megatron_shards, read_shape, slices, vllm_shards
from megatron_rl.layout.shards import local_extents
from megatron_rl.planning.activations import layer_bytes
from megatron_rl.planning.parameters import rank_parameters
from megatron_rl.planning.trainer import trainer_memory
from megatron_rl.planning.transfer import COMMUNICATOR_BYTES
from megatron_rl.tools import bench_logprobs
from megatron_rl.tools.compare_layouts import (
    Difference,
    deal_rows,
    difference,
    random_rows,
    rows_of_lengths,
    run_layout,
    train_once,
)
from megatron_rl.tools.doctor import look
from megatron_rl.types import Mesh, ModelShape, Share

Number = int | float | str


@dataclass(frozen=True, slots=True)
class Found:
    """What a part has measured."""

    numbers: Mapping[str, Number]
    """By their names, which end with the unit."""
    problems: Sequence[str] = ()
    """What is wrong with the results, one sentence each; nothing if the part has passed."""


@dataclass(frozen=True, slots=True)
class Part:
    purpose: str
    measure: Callable[[str], Found]
    """Takes the device, `cuda` or `cpu`."""
    limit_s: float
    """The longest time, in seconds, that the part may take on a GPU."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of this project's documents that says that something has not been run."""

    part: str
    """The part of PARTS that runs it, if it passes on a GPU."""
    file: str
    quote: str
    """The words of the line."""
    now: str
    """What of the line has run then, and what remains."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the parts are on a device."""

    model: Mapping[str, int]
    """The sizes of the small Qwen3 model that is compared and resumed, in the words of config.json."""
    num_rows: int
    longest: int
    """The tokens of the longest row of its batches."""
    logprobs: tuple[int, int, int]
    """T, V and H of the log-probs."""
    pushed: Mapping[str, int]
    """The sizes of the Qwen3 model that the bridge pushes."""
    layers: Mapping[str, int]
    """What replaces the sizes of Qwen3-32B in the part `layers`."""
    lengths: tuple[int, ...]
    """The lengths of the samples of its packed row, all equal, so that attention pads nothing."""


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocabulary: int) -> dict:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
    }


SIZES = {
    "cuda": Sizes(
        model=_sizes(4, 512, 8, 4, 64, 1536, 8192),
        num_rows=48,
        longest=128,
        logprobs=(16_384, 37_984, 5120),  # the rows of Qwen3-32B's output layer on a rank of TP4
        pushed=_sizes(4, 2048, 16, 8, 128, 8192, 32_000),
        layers={"num_hidden_layers": 4},
        lengths=(2048,) * 8,
    ),
    "cpu": Sizes(
        model=_sizes(2, 32, 4, 2, 16, 48, 96),
        num_rows=12,
        longest=24,
        logprobs=(256, 4096, 16),
        pushed=_sizes(2, 32, 4, 2, 16, 64, 40),
        layers=_sizes(4, 32, 4, 2, 16, 48, 96),
        lengths=(48,) * 8,
    ),
}
QWEN3_32B = Path("configs/model/Qwen3-32B.json")
NUM_STEPS = 3
"""The training steps before the checkpoint of the part `resume`."""
NUM_COMMUNICATORS = (1, 8, 32)
NUM_PUSHES = 6
NUM_UPDATES = 4
"""The updates of the part `layers`; the first one is not timed."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest relative differences from the CPU in fp32."""

    loss: float
    norm: float
    gradient: float


BOUNDS = {
    # Sums of thousands of products in another order differ by about 1e-6 of their terms, which is what layouts on one
    # kind of device are held to (1e-5); the GPU's exponential and its division have other roundings on top.
    "float32": Bounds(1e-5, 1e-5, 1e-4),
    # A number of bf16 has 8 bits: each of the tens of roundings on the way to an element of a gradient is up to 4e-3.
    # On a CPU the largest difference is 0.04. Loss and norm are sums over many elements, whose roundings cancel.
    "bfloat16": Bounds(1e-3, 1e-2, 1e-1),
}
LOGPROB_BOUND = {
    # The plain way rounds logits of up to about 8 to bf16 twice, by up to 0.016 each time.
    "cuda": 0.05,
    "cpu": 1e-4,  # fp32 sums of thousands of terms in another order
}


def hf_weights(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    """Standard normal numbers for every Hugging Face tensor of the model, float32."""
    random = torch.Generator().manual_seed(seed)
    sizes = FAMILIES[shape.family].hf_tensors(shape)
    return {name: torch.randn(size, generator=random) for name, size in sizes.items()}


def cut(shards: Iterable[Shard], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One rank's parameters, by their local names."""
    local = {name: torch.zeros(size) for name, size in local_extents(shards).items()}
    for shard in shards:
        target = local[shard.local_name][slices(shard.local_box)]
        target.copy_(weights[shard.hf_name][slices(shard.hf_box)].view(target.shape))
    return local


def write_config(folder: Path, sizes: Mapping[str, int]) -> ModelShape:
    """Write the config.json of Qwen3-32B with other sizes."""
    folder.mkdir()
    config = json.loads(find_shipped(QWEN3_32B).read_text()) | dict(sizes)
    (folder / "config.json").write_text(json.dumps(config))
    return read_shape(folder)


def write_model(folder: Path, sizes: Mapping[str, int]) -> ModelShape:
    """Write a random model whose activations keep their size from layer to layer. Its norms are not all 1, because ones
    would hide a norm that is not loaded."""
    from safetensors.torch import save_file

    shape = write_config(folder, sizes)
    weights = {
        name: 1 + 0.1 * tensor if tensor.ndim == 1 else tensor / math.sqrt(tensor.shape[1])
        for name, tensor in hf_weights(shape, seed=0).items()
    }
    save_file(weights, folder / "model.safetensors")
    return shape


def all_at_once(calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """What the calls return, each in a process of its own. The first error is raised."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(calls), mp_context=context, max_tasks_per_child=1) as processes:
        futures = [processes.submit(function, *arguments) for function, arguments in calls]
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()
        return [future.result() for future in futures]


@contextmanager
def without_gpus():
    """Processes that start inside the block see no GPU."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def machine(device: str) -> Found:
    """What the numbers belong to."""
    here = look()
    numbers: dict[str, Number] = {
        "python": platform.python_version(),
        **{name: version for name, version in here.versions.items() if version},
        "cpus": here.num_cpus,
        "memory, bytes": here.memory_bytes,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        numbers |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "gpu memory, bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": _driver(),
        }
    return Found(numbers)


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    if shutil.which(asked[0]):
        return subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return f"unknown, because there is no {asked[0]}"


def layouts(device: str) -> Found:
    """Loss and gradient of one batch on one rank, in fp32 and in bf16, against those of a CPU in fp32."""
    from megatron_rl.bridge.join import host_store

    sizes, folder, one = SIZES[device], Path(tempfile.mkdtemp()) / "model", ParallelConfig()
    shape = write_model(folder, sizes.model)
    rows = random_rows(shape.vocab_size, sizes.num_rows, sizes.longest, seed=0)
    models = {dtype: ModelConfig(path=folder, dtype=dtype, layers="local") for dtype in BOUNDS}
    with without_gpus():
        on_cpu = run_layout(folder, models["float32"], one, rows, 1)
    shares, policy = deal_rows(folder, one, rows, 1), PolicyConfig(parallel=one)
    differences = [
        difference(dtype, train_once(0, host_store("127.0.0.1"), folder, model, policy, shares), on_cpu)
        for dtype, model in models.items()
    ]
    numbers = {f"{one.layout}, {name}": value for one in differences for name, value in asdict(one).items()}
    return Found(
        {"loss on a CPU, float32": on_cpu[0], "grad_norm on a CPU, float32": on_cpu[1], **numbers},
        [problem for one in differences for problem in judged(one, BOUNDS[one.layout])],
    )


def judged(found: Difference, bounds: Bounds) -> list[str]:
    """What differs too much."""
    rows = [
        ("the loss", found.loss_difference, bounds.loss),
        ("the gradient norm", found.norm_difference, bounds.norm),
        (f"the gradient of {found.tensor}", found.gradient_difference, bounds.gradient),
    ]
    return [
        f"In {found.layout} {what} differs from the CPU's in fp32 by {value:.1e}, and at most {bound:.0e} is rounding."
        for what, value, bound in rows
        if not value <= bound  # a NaN is a problem too
    ]


def logprobs(device: str) -> Found:
    """Log-probs in chunks against those of whole logits, forward and backward (tools/bench_logprobs.py)."""
    tokens, vocabulary, hidden = SIZES[device].logprobs
    threads = torch.get_num_threads()
    report = bench_logprobs.compare(
        Namespace(tokens=tokens, vocabulary=vocabulary, hidden=hidden, device=device, threads=threads, repeats=3)
    )
    found, bound = report["largest_difference"], LOGPROB_BOUND[device]
    problem = f"A log-prob in chunks differs from the plain one by {found:.1e}, and at most {bound} is rounding."
    return Found(report, [] if found <= bound else [problem])


def bridge(device: str) -> Found:
    """A push between two processes: through CUDA IPC on one GPU, through shared memory on a CPU."""
    one = "cuda:0" if device == "cuda" else device
    return push_between(one, one, SIZES[device].pushed)


def push_between(trainer: str, engine: str, sizes: Mapping[str, int]) -> Found:
    """A push from a process on the device `trainer` to one on the device `engine`."""
    from megatron_rl.bridge.join import host_store
    from megatron_rl.bridge.setup import BridgeSetup

    shape = write_config(Path(tempfile.mkdtemp()) / "model", sizes)
    store = host_store("127.0.0.1")
    setup = BridgeSetup(shape, Mesh(), False, Engines(), "bfloat16", "127.0.0.1", store.port, timeout_s=30.0)
    pushes, wrong = all_at_once([(_push, (setup, trainer)), (_receive, (setup, engine))])
    first_s, *others_s = (push["seconds"] for push in pushes)
    num_bytes = pushes[0]["bytes"]
    numbers = {
        "bytes": num_bytes,
        "first push, which is verified, seconds": first_s,
        f"best of {len(others_s)} more pushes, seconds": min(others_s),
        "GB/s": num_bytes / min(others_s) / 1e9,
        "tensors with other bits": len(wrong),
    }
    return Found(numbers, [f"The engine holds other bits than were sent, in {name}." for name in wrong])


def _push(setup, device: str) -> list[dict[str, float]]:
    from megatron_rl.bridge.sender import BridgeSender

    if device != "cpu":
        torch.cuda.set_device(device)
    weights = cut(megatron_shards(setup.shape, setup.mesh, 0), hf_weights(setup.shape, 0))
    sender = BridgeSender(setup, 0, {name: t.to(device, torch.bfloat16) for name, t in weights.items()})
    pushes = [sender.push(version) for version in range(NUM_PUSHES)]
    sender.close()
    return pushes


def _receive(setup, device: str) -> list[str]:
    """The names of the tensors that differ from what vLLM would have loaded."""
    from megatron_rl.bridge.intake import Intake, Parameters

    if device != "cpu":
        torch.cuda.set_device(device)
    expected = cut(vllm_shards(setup.shape, 1, 0), hf_weights(setup.shape, 0))
    live = {name: torch.zeros(t.shape, dtype=torch.bfloat16, device=device) for name, t in expected.items()}
    intake = Intake(setup, 0, 0, Parameters(live), next(iter(live.values())).device)
    for version in range(NUM_PUSHES):
        intake.receive(version)
    return [name for name, t in expected.items() if not torch.equal(live[name].cpu(), t.bfloat16())]


def communicators(device: str) -> Found:
    """The memory of communicators of one rank each. NCCL joins no two ranks on one GPU, and a communicator of one rank
    has no buffers for others, so this is the least that a communicator takes."""
    import torch.distributed as dist

    from megatron_rl.bridge.join import host_store

    store = host_store("127.0.0.1")
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    one = torch.ones(1, device=device)
    before, groups, held = _used_bytes(device), [], {}
    for number in NUM_COMMUNICATORS:
        while len(groups) < number:
            groups.append(dist.new_group([0]))
            dist.all_reduce(one, group=groups[-1])  # a communicator begins with its first collective
        assert one.item() == 1
        held[number] = _used_bytes(device) - before
    dist.destroy_process_group()
    first, *_, last = NUM_COMMUNICATORS
    return Found(
        {
            **{f"communicators of one rank: {number}, bytes": size for number, size in held.items()},
            "each one after the first, bytes": (held[last] - held[first]) / (last - first),
            "taken for one of several ranks (planning/transfer.py), bytes": COMMUNICATOR_BYTES,
            "note": "one rank each, because NCCL joins no two ranks on one GPU; buffers between ranks are not in it",
        }
    )


def _used_bytes(device: str) -> int:
    """What is taken of the whole GPU, or of the machine's memory by this process."""
    if device == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free
    return bench_logprobs.memory(device, "VmRSS")


def layers(recompute: str, device: str) -> Found:
    """An update of a few layers of Qwen3-32B's shape: memory, time and FLOPs, against planning/trainer.py.

    The memory is what torch has allocated. On a CPU nobody counts it.
    """
    sizes, folder = SIZES[device], Path(tempfile.mkdtemp()) / "model"
    shape = write_config(folder, sizes.layers)
    model = ModelConfig(path=folder, dtype="bfloat16", layers="local", recompute=recompute)
    actor = build_actor(folder, model)
    rows = rows_of_lengths(shape.vocab_size, sizes.lengths, np.random.default_rng(0))
    [share] = deal_rows(folder, ParallelConfig(), rows, 1)
    actor.begin(share, {})

    marks: dict[str, Mark] = {}
    """Of the latest update, by their names."""

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

    num_tokens = sum(sizes.lengths)
    num_parts = num_tokens * shape.num_layers
    # The first layer's input is there before the layers, and the last layer's output after them: one for the other.
    kept = (marks["last norm"].held_bytes - marks["first layer"].held_bytes) / num_parts
    kept_predicted = {
        "none": layer_bytes(shape, ParallelConfig(), 0, 2, fused=False),
        "full": 2.0 * shape.hidden_size,  # the layer's input
    }[recompute]
    peak = marks["optimizer"].peak_bytes
    predicted = trainer_memory(shape, model, ParallelConfig(), num_tokens, on_gpus=device == "cuda")
    done, needed = (float(training_flops(np.array(sizes.lengths), shape, how).sum()) for how in (recompute, "none"))
    numbers = {
        "layers": shape.num_layers,
        "samples": len(sizes.lengths),
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
    return Found(numbers)


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


def build_actor(folder: Path, model: ModelConfig, offload: bool = False):
    """A trainer of one rank, with random weights."""
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.spec import ActorSpec
    from megatron_rl.algorithms import SupervisedObjective
    from megatron_rl.bridge.join import host_store

    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=2, schedule="cosine", min_lr_ratio=0.1, offload=offload)
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

    Some of PyTorch's kernels on a GPU add numbers in any order. Here it takes those that do not.
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


def _next_step(actor, share: Share) -> dict[str, Any]:
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
        "both directions together, offloaded, bytes a second": 2 * state / offloaded["seconds"],
    }
    problems = [
        f"{name} of the last update has other bits where the state is offloaded."
        for name in ("loss", "grad_norm", "digest")
        if kept[name] != offloaded[name]
    ]
    if device == "cuda":
        freed = kept["held"] - offloaded["held"]
        numbers |= {"held after an update, bytes": kept["held"], "less of it, offloaded, bytes": freed}
        if freed < 0.99 * state:
            problems.append(f"Offloading has freed {freed:,} bytes of the GPU, but the state has {state:,.0f}.")
    return Found(numbers, problems)


def _updates(folder: Path, shares: Sequence[Share], offload: bool, device: str) -> dict[str, Any]:
    """The last of some updates, the time of its optimizer's step, and what the device held then."""
    from megatron_rl.actor.weights import load_weights

    torch.use_deterministic_algorithms(True, warn_only=True)
    actor = build_actor(folder, ModelConfig(path=folder, dtype="bfloat16", layers="local"), offload)
    load_weights(actor, folder)
    update, marks = actor.optimizer.update, []

    def timed_update(*arguments: Any) -> tuple[float, float]:
        begin = Mark.now(device)
        norms = update(*arguments)
        marks.append((begin, Mark.now(device)))
        return norms

    actor.optimizer.update = timed_update
    for share in shares[:-1]:
        actor.begin(share, {})
        actor.update(0, {})
    found = _next_step(actor, shares[-1])
    begin, end = marks[-1]
    return found | {"seconds": end.time_s - begin.time_s, "held": end.held_bytes}


PARTS = {
    "machine": Part("names the hardware and the versions", machine, 20),
    "layouts": Part("compares loss and gradient with a CPU's", layouts, 80),
    "logprobs": Part("compares log-probs in chunks with those of whole logits", logprobs, 50),
    "bridge": Part("pushes weights from one process of the device to another", bridge, 60),
    "communicators": Part("measures the memory of communicators of one rank", communicators, 40),
    **{
        f"layers, recompute {mode}": Part("measures updates of Qwen3-32B's layers in bf16", partial(layers, mode), 55)
        for mode in get_args(ModelConfig.model_fields["recompute"].annotation)
    },
    "resume": Part("resumes a checkpoint in a new process, bit for bit", resume, 75),
    "offload": Part("updates with the optimizer's state in the host's memory, bit for bit", offload, 40),
}
"""The parts in their order. All deadlines together are below eight minutes."""

LINES = (
    Line(
        "layouts",
        "README.md",
        "**every GPU path**: written, not run",
        "The trainer has run on one GPU with Megatron's own layers. Transformer Engine's layers, vLLM and several GPUs "
        "remain.",
    ),
    Line(
        "layouts",
        "megatron_rl/actor/README.md",
        "NCCL, Transformer Engine's layers and more than 4 ranks have not been run.",
        "NCCL has run with one rank. NCCL between ranks, Transformer Engine's layers and more than 4 ranks remain.",
    ),
    Line(
        "logprobs",
        "megatron_rl/algorithms/README.md",
        "It was not run on a GPU.",
        "It has run on a GPU, and nothing remains.",
    ),
    Line(
        "offload",
        "README.md",
        "moments in bf16 (`policy.optimizer.moments`) | on GPUs not run |",
        "The offloaded state has run on one GPU. Moments in bf16 remain.",
    ),
    Line(
        "offload",
        "megatron_rl/actor/README.md",
        "It has not been run on a GPU.",
        "It has run on one GPU.",
    ),
    Line("bridge", "README.md", "| NCCL and CUDA IPC |", "CUDA IPC has run, without vLLM. NCCL remains."),
    Line(
        "bridge",
        "megatron_rl/bridge/README.md",
        "NCCL, CUDA IPC: not run.",
        "CUDA IPC has run, without vLLM. NCCL remains.",
    ),
    Line(
        "layers, recompute full",
        "recipes/olmo3_32b/RECORD.md",
        "on GPUs they have not run",
        "Megatron's own layers have run on a GPU in bf16, with Qwen3's norms. OLMo's norms and windows, and rows of "
        "34,816 tokens, remain.",
    ),
)
"""What the parts run of the documents' lists of what has not been run. The tests hold that the lines are there."""
