"""What `megatron-rl gpu-day` measures, part by part. Each part runs in a process of its own, on a GPU or on a CPU.

The numbers of a part are always written down. A part fails if a result is wrong: `Found.problems` says what
was expected, and why. Times, memory and rates are never judged.

Shape letters: T packed tokens, V rows of the output layer, H hidden size.
"""

from __future__ import annotations

import itertools
import platform
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from megatron_rl.commands.doctor import look
from megatron_rl.commands.gpus import driver
from megatron_rl.config.policy import ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.layout import Engines
from megatron_rl.models import Shard, megatron_shards, slices, vllm_shards
from megatron_rl.models.shards import local_extents
from megatron_rl.planning.transfer import COMMUNICATOR_BYTES
from megatron_rl.tools.bench.compare_layouts import (
    Difference,
    deal_rows,
    difference,
    random_rows,
    run_layout,
    train_once,
)
from megatron_rl.tools.bench.gpu_day.kernels import attention, delta_rule, masks, ragged
from megatron_rl.tools.bench.gpu_day.rates import rates, small_checks
from megatron_rl.tools.bench.gpu_day.sizes import (
    NUM_COMMUNICATORS,
    NUM_PUSHES,
    SIZES,
    Found,
    Number,
    all_at_once,
    hf_weights,
    without_gpus,
    write_config,
    write_model,
)
from megatron_rl.tools.bench.gpu_day.training import layers, offload, resume
from megatron_rl.tools.bench.logprobs import compare as compare_logprobs
from megatron_rl.tools.bench.logprobs import memory
from megatron_rl.types import Mesh

if TYPE_CHECKING:
    from megatron_rl.bridge.setup import BridgeSetup


@dataclass(frozen=True, slots=True)
class GpuPart:
    purpose: str
    measure: Callable[[str], Found]
    """Takes the device, `cuda` or `cpu`."""
    limit_s: float
    """The longest time, in seconds, that the part may take on a GPU."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest relative differences from the CPU in fp32."""

    loss: float
    norm: float
    gradient: float


BOUNDS = {
    # Sums of thousands of products in another order differ by about 1e-6 of their terms; the GPU's exponential and its
    # division have other roundings on top.
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


def cut(shards: Iterable[Shard], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One rank's parameters, by their local names."""
    local = {name: torch.zeros(size) for name, size in local_extents(shards).items()}
    for shard in shards:
        target = local[shard.local_name][slices(shard.local_box)]
        target.copy_(weights[shard.hf_name][slices(shard.hf_box)].view(target.shape))
    return local


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
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # it has no types
        numbers |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "gpu memory, bytes": properties.total_memory,
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, nccl)),
            "driver": driver() or "unknown, because nvidia-smi does not answer",
        }
    return Found(numbers)


def layouts(device: str) -> Found:
    """Loss and gradient of one batch on one rank, in fp32 and in bf16, against a CPU in fp32."""
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
    """Log-probs in chunks against log-probs of whole logits, forward and backward (tools/bench/logprobs.py)."""
    tokens, vocabulary, hidden = SIZES[device].logprobs
    threads = torch.get_num_threads()
    report = compare_logprobs(
        Namespace(tokens=tokens, vocabulary=vocabulary, hidden=hidden, device=device, threads=threads, repeats=3)
    )
    found, bound = report["largest_difference"], LOGPROB_BOUND[device]
    problem = f"A log-prob in chunks differs from the plain one by {found:.1e}, and at most {bound} is rounding."
    return Found(report, [] if found <= bound else [problem])


def bridge(device: str) -> Found:
    """A push between two processes: through CUDA IPC on one GPU, through shared memory on a CPU."""
    one = "cuda:0" if device == "cuda" else device
    return push_between([one, one], SIZES[device].pushed)


def push_between(
    devices: Sequence[str],
    sizes: Mapping[str, int],
    mesh: Mesh = Mesh(),
    engines: Engines = Engines(),
    share_memory: bool = True,
) -> Found:
    """Pushes between processes.

    Args:
        devices: one for each rank, trainers first.
        share_memory: engines read the memory of trainers on their node. Otherwise all bytes pass over NCCL (gloo).
    """
    from megatron_rl.bridge.join import host_store
    from megatron_rl.bridge.setup import BridgeSetup

    shape = write_config(Path(tempfile.mkdtemp()) / "model", sizes)
    store, host = host_store("127.0.0.1"), "127.0.0.1"
    setup = BridgeSetup(
        shape, mesh, False, engines, "bfloat16", host, store.port, timeout_s=30.0, share_memory=share_memory
    )
    ends = [
        (_push if rank < mesh.world_size else _receive, (setup, rank, device)) for rank, device in enumerate(devices)
    ]
    results = all_at_once(ends)
    pushes, wrong = results[: mesh.world_size], list(itertools.chain.from_iterable(results[mesh.world_size :]))
    first_s, *others_s = (max(push["seconds"] for push in rank) for rank in zip(*pushes, strict=True))
    num_bytes = sum(push[0]["bytes"] for push in pushes)
    numbers = {
        "bytes": num_bytes,
        "first push, which is verified, seconds": first_s,
        f"best of {len(others_s)} more pushes, seconds": min(others_s),
        "GB/s": num_bytes / min(others_s) / 1e9,
        "tensors with other bits": len(wrong),
    }
    return Found(numbers, [f"An engine holds other bits than were sent, in {name}." for name in wrong])


def _push(setup: BridgeSetup, rank: int, device: str) -> list[dict[str, float]]:
    from megatron_rl.bridge.sender import BridgeSender

    if device != "cpu":
        torch.cuda.set_device(device)
    weights = cut(megatron_shards(setup.shape, setup.mesh, rank), hf_weights(setup.shape, 0))
    sender = BridgeSender(setup, rank, {name: t.to(device, torch.bfloat16) for name, t in weights.items()})
    pushes = [sender.push(version) for version in range(NUM_PUSHES)]
    sender.close()
    return pushes


def _receive(setup: BridgeSetup, rank: int, device: str) -> list[str]:
    """The names of the tensors that differ from what vLLM would have loaded."""
    from megatron_rl.bridge.intake import Intake, Parameters

    if device != "cpu":
        torch.cuda.set_device(device)
    engine, within = divmod(rank - setup.mesh.world_size, setup.engines.world_size)
    expected = cut(vllm_shards(setup.shape, setup.engines.tensor, within), hf_weights(setup.shape, 0))
    live = {name: torch.zeros(t.shape, dtype=torch.bfloat16, device=device) for name, t in expected.items()}
    intake = Intake(setup, engine, within, Parameters(live), next(iter(live.values())).device)
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
    groups: list[dist.ProcessGroup] = []
    before, held = _used_bytes(device), {}
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
    return memory(device, "VmRSS")


PARTS = {
    "machine": GpuPart("names the hardware and the versions", machine, 20),
    "layouts": GpuPart("compares loss and gradient with a CPU's", layouts, 80),
    "logprobs": GpuPart("compares log-probs in chunks with those of whole logits", logprobs, 50),
    "bridge": GpuPart("pushes weights from one process of the device to another", bridge, 60),
    "communicators": GpuPart("measures the memory of communicators of one rank", communicators, 40),
    **{
        f"layers, recompute {mode}": GpuPart(
            "measures updates of Qwen3-32B's layers in bf16", partial(layers, mode), 55
        )
        for mode in get_args(ModelConfig.model_fields["recompute"].annotation)
    },
    "resume": GpuPart("resumes a checkpoint in a new process, bit for bit", resume, 75),
    "offload": GpuPart("updates with the optimizer's state in the host's memory, bit for bit", offload, 60),
    "attention": GpuPart("compares attention in one call for a row with padded calls in fp32", attention, 50),
    "ragged rows": GpuPart("times attention of rows whose lengths never repeat", ragged, 70),
    "masks": GpuPart("times attention with masks by each backend", masks, 50),
    "rates": GpuPart("measures rates for the planner", rates, 70),
    "delta rule": GpuPart("compares linear attention's kernels with the loop", delta_rule, 60),
    "small checks": GpuPart("checks products in fp32 and checksums", small_checks, 30),
}
"""The parts in their order. All deadlines together are below fifteen minutes."""
