"""The parts of `megatron-rl gpu-day` that compare and time the kernels of attention and linear attention.

On a CPU, which has neither FlashAttention's nor flash-linear-attention's kernels, other code takes their places, so
that all of the rest is rehearsed.

Shape letters: T packed tokens, N query heads, G key-value heads, D head size, V value heads of linear attention.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_rl.tools.bench.gpu_day.sizes import Found, Number

if TYPE_CHECKING:
    from megatron_rl.actor.attention import AttentionPlan
    from megatron_rl.actor.packing import SharedPrompts


@dataclass(frozen=True, slots=True)
class KernelSizes:
    heads: tuple[int, int, int]
    """N, G and D of a rank."""
    lengths: tuple[int, ...]
    """The sequences of the row that is compared."""
    window: int
    num_rows: int
    """The rows of the part `ragged rows`, with `row_tokens` tokens each at most."""
    row_tokens: int
    median: int
    """The median length of their sequences, which are log-normal."""
    multiple: int
    """One of the ways pads lengths to multiples of this number."""
    masked: Mapping[str, tuple[int, int, int, int]]
    """Queries, keys, heads and head size of calls with a mask."""
    delta: tuple[int, int, int, int]
    """T, key heads, V, and the size of keys and values of linear attention."""


KERNEL_SIZES = {
    "cuda": KernelSizes(
        heads=(16, 2, 128),
        lengths=(700, 33, 1, 4096, 129, 2000),
        window=1024,
        num_rows=30,
        row_tokens=16_384,
        median=1024,
        multiple=256,
        masked={
            "a window of OLMo 3": (4096, 8191, 5, 128),
            "a row of gpt-oss with sinks": (17_408, 17_409, 8, 72),
        },
        delta=(17_408, 4, 8, 128),
    ),
    "cpu": KernelSizes(
        heads=(4, 2, 16),
        lengths=(20, 3, 1, 40, 7),
        window=8,
        num_rows=3,
        row_tokens=128,
        median=16,
        multiple=8,
        masked={"a window": (8, 15, 2, 16), "a row with sinks": (24, 25, 2, 24)},
        delta=(160, 2, 4, 16),
    ),
}
KERNEL_BOUND = 5e-2
"""The largest relative difference, in norm, of a result in bf16 from the same computed in fp32. Roundings of 2^-9 give
1e-3 to 4e-3, and 2e-2 in the gradient of sinks, whose terms cancel; a wrong mask gives 1."""
BACKENDS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


def seconds_of(work: Callable[[], object], device: str, repeats: int = 5) -> float:
    """The median time of a call, after one that is not timed."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_bytes(work: Callable[[], object], device: str) -> int:
    """What a call allocates on the GPU at most; 0 on a CPU."""
    if device == "cpu":
        work()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def attention(device: str) -> Found:
    """One call for a packed row in bf16 against padded calls in fp32: outputs and gradients, with windows, sinks and
    shared prompts."""
    from megatron_rl.actor.packing import SharedPrompts

    sizes = KERNEL_SIZES[device]
    lengths = torch.tensor(sizes.lengths)
    start, shared = torch.zeros_like(lengths), torch.zeros_like(lengths)
    shared[2:4] = sizes.lengths[0] - 1  # two sequences see nearly all of the first one
    prompts = SharedPrompts(start, shared)
    cases = {
        "all earlier tokens": (None, False, None),
        "a window": (sizes.window, False, None),
        "sinks": (None, True, None),
        "a window and sinks": (sizes.window, True, None),
        "shared prompts": (None, False, prompts),
        "shared prompts, a window and sinks": (sizes.window, True, prompts),
    }
    numbers: dict[str, Number] = {}
    problems = []
    for name, (window, has_sinks, of_prompts) in cases.items():
        leaves = _leaves(int(lengths.sum()), sizes.heads, device, has_sinks)
        found = _outputs(leaves, one_call(lengths, window, of_prompts, device))
        exact = _outputs([x.detach().float().requires_grad_() for x in leaves], _padded(lengths, window, of_prompts))
        for what, got, want in zip(("output", "query", "key", "value", "sinks"), found, exact, strict=False):
            difference = float((got.float() - want).norm() / want.norm())
            numbers[f"{name}, {what if what == 'output' else f'gradient of {what}'}"] = difference
            if not difference <= KERNEL_BOUND:
                problems.append(
                    f"With {name} {what} differs by {difference:.1e}, and at most {KERNEL_BOUND} is rounding."
                )
    return Found(numbers, problems)


def one_call(lengths: Tensor, window: int | None, prompts: SharedPrompts | None, device: str) -> AttentionPlan:
    """The plan of one kernel call; of padded calls on a CPU, which has no such kernel."""
    from megatron_rl.actor.attention import AttentionPlan
    from megatron_rl.actor.varlen import plan_varlen

    if device == "cpu":
        return _padded(lengths, window, prompts)
    nothing = torch.empty(0)
    return AttentionPlan(nothing, nothing, varlen=plan_varlen(lengths, window, prompts))


def _padded(lengths: Tensor, window: int | None = None, prompts: SharedPrompts | None = None) -> AttentionPlan:
    from megatron_rl.actor.attention import plan_attention

    return plan_attention(lengths, 2, 1e4, window=window, shared=prompts)


def _leaves(num_tokens: int, heads: tuple[int, int, int], device: str, has_sinks: bool = False) -> list[Tensor]:
    """Query, key, value and perhaps sinks, bf16."""
    random = torch.Generator(device).manual_seed(0)
    shapes = [[num_tokens, count, heads[2]] for count in (heads[0], heads[1], heads[1])]
    shapes += [[heads[0]]] if has_sinks else []
    made = [torch.randn(shape, generator=random, device=device) for shape in shapes]
    return [x.bfloat16().requires_grad_() for x in made]


def _outputs(leaves: Sequence[Tensor], plan: AttentionPlan) -> list[Tensor]:
    """The output and the gradients of the leaves."""
    from megatron_rl.actor.attention import attend

    query, key, value, *sinks = leaves
    out = attend(query, key, value, plan, sink_N=sinks[0] if sinks else None)
    weight = torch.linspace(-1, 1, out.shape[1], device=out.device, dtype=out.dtype).expand_as(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def ragged(device: str) -> Found:
    """Rows whose lengths never repeat, forward and backward, in three ways. The first row may build kernels."""
    sizes, random = KERNEL_SIZES[device], np.random.default_rng(0)
    rows = [_log_normal(sizes, random) for _ in range(sizes.num_rows)]
    ways: dict[str, Callable[[Tensor], AttentionPlan]] = {
        "one call for a row": lambda lengths: one_call(lengths, None, None, device),
        "padded calls": _padded,
        f"padded calls, lengths in multiples of {sizes.multiple}": _padded,
    }
    numbers: dict[str, Number] = {"rows": len(rows), "tokens": sum(int(row.sum()) for row in rows)}
    for name, plan_of in ways.items():
        times, reserved = [], 0
        if device == "cuda":
            torch.cuda.empty_cache()
        for row in rows:
            lengths = -(-row // sizes.multiple) * sizes.multiple if "multiples" in name else row
            leaves, plan = _leaves(int(lengths.sum()), sizes.heads, device), plan_of(lengths)
            synchronize(device)
            start = time.perf_counter()
            _outputs(leaves, plan)
            synchronize(device)
            times.append(time.perf_counter() - start)
        if device == "cuda":
            reserved = torch.cuda.memory_reserved()
        numbers |= {
            f"{name}: first row, seconds": times[0],
            f"{name}: median of the others, seconds": statistics.median(times[1:]),
            f"{name}: slowest of the others, seconds": max(times[1:]),
            f"{name}: memory that torch holds, bytes": reserved,
        }
    return Found(numbers)


def _log_normal(sizes: KernelSizes, random: np.random.Generator) -> Tensor:
    """The lengths of a row's sequences."""
    lengths: list[int] = []
    while True:
        length = min(1 + int(random.lognormal(math.log(sizes.median), 1.0)), sizes.row_tokens // 2)
        if sum(lengths) + length > sizes.row_tokens:
            return torch.tensor(lengths)
        lengths.append(length)


def masks(device: str) -> Found:
    """Calls with a mask, forward and backward, by each backend of torch's attention, and by the one that is taken."""
    from megatron_rl.actor.dot_product import dot_product_attention

    numbers: dict[str, Number] = {}
    for name, (queries, keys, heads, head_dim) in KERNEL_SIZES[device].masked.items():
        shapes = [(1, heads, length, head_dim) for length in (queries, keys, keys)]
        query, key, value = leaves = [torch.randn(shape, device=device).bfloat16().requires_grad_() for shape in shapes]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)

        def taken() -> None:
            out = dot_product_attention(query, key, value, mask)
            torch.autograd.grad(out, leaves, out)

        def by(backend: SDPBackend) -> None:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            torch.autograd.grad(out, leaves, out)

        numbers |= {f"{name}, taken, seconds": seconds_of(taken, device, 3)}
        numbers |= {f"{name}, taken, bytes": peak_bytes(taken, device)}
        for backend in BACKENDS:
            label = backend.name.lower().removesuffix("_attention")
            try:
                numbers |= {f"{name}, {label}, seconds": seconds_of(lambda: by(backend), device, 3)}
                numbers |= {f"{name}, {label}, bytes": peak_bytes(lambda: by(backend), device)}
            except RuntimeError as error:  # also out of memory
                numbers |= {f"{name}, {label}": str(error).split("\n")[0]}
    return Found(numbers)


def delta_rule(device: str) -> Found:
    """Linear attention and its convolution by kernels against the loop in fp32: values, gradients, time and memory."""
    from megatron_rl.actor import delta_net
    from megatron_rl.actor.delta_net import causal_convolution, gated_delta_rule, plan_delta

    num_tokens, num_keys, num_values, size = KERNEL_SIZES[device].delta
    if device == "cuda" and not delta_net.HAS_KERNELS:
        return Found({"note": "flash-linear-attention is not installed (fla-core), so nothing was compared"})
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device)

    row = [
        *(normal(num_tokens, heads, size).bfloat16() for heads in (num_keys, num_keys, num_values)),
        -normal(num_tokens, num_values).square(),
        normal(num_tokens, num_values).sigmoid().bfloat16(),
    ]
    channels = [normal(num_tokens, 4 * size).bfloat16(), normal(4 * size, 4).bfloat16()]
    plan = plan_delta(torch.tensor([num_tokens // 2, 1, num_tokens - num_tokens // 2 - 1]))
    numbers: dict[str, Number] = {"tokens": num_tokens}
    problems = []
    functions: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "rule": (gated_delta_rule, row),
        "convolution": (causal_convolution, channels),
    }
    for name, (function, given) in functions.items():

        def run(leaves: Sequence[Tensor]) -> list[Tensor]:
            out = function(*leaves, plan)
            return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

        own = [x.clone().requires_grad_() for x in given]
        found = run(own)
        numbers |= {f"{name}, seconds": seconds_of(lambda: run(own), device, 3)}
        numbers |= {f"{name}, bytes": peak_bytes(lambda: run(own), device)}
        kernels, delta_net.HAS_KERNELS = delta_net.HAS_KERNELS, False
        exact = [x.detach().float().requires_grad_() for x in given]
        wanted = run(exact)
        numbers |= {f"{name}, loop in fp32, seconds": seconds_of(lambda: run(exact), device, 1)}
        numbers |= {f"{name}, loop in fp32, bytes": peak_bytes(lambda: run(exact), device)}
        delta_net.HAS_KERNELS = kernels
        worst = max(float((x.float() - y).norm() / y.norm()) for x, y in zip(found, wanted, strict=True))
        numbers |= {f"{name}, largest difference": worst}
        if not worst <= KERNEL_BOUND:
            problems.append(f"The {name} differs from the loop by {worst:.1e}; at most {KERNEL_BOUND} is rounding.")
    return Found(numbers, problems)
