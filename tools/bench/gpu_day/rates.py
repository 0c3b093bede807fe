"""Two parts of `megatron-rl gpu-day`: rates of one GPU for the planner (planning/rates.py), and small checks.

Shares are of an H100's data sheet (balance/hardware.py). On a CPU the numbers mean nothing.
"""

from __future__ import annotations

import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_rl.balance.hardware import PEAK_FLOPS
from megatron_rl.bridge.checksum import checksum
from megatron_rl.tools.bench.gpu_day.kernels import seconds_of, synchronize
from megatron_rl.tools.bench.gpu_day.sizes import Found, Number

PRODUCTS = {
    "Qwen3-32B TP4, q, k and v": (2560, 5120),
    "Qwen3-32B TP4, up": (12_800, 5120),
    "Qwen3-32B TP4, down": (5120, 6400),
    "Qwen3-32B TP8, up": (6400, 5120),
    "Qwen3-235B TP4, q, k and v": (2560, 4096),
    "Qwen3-8B, up": (24_576, 4096),
    "Qwen3-32B TP4, output layer": (37_984, 5120),
}
"""Rows and columns of weights on a rank."""
TOKENS = (2048, 8192, 32_768)
EXPERTS = ((4, 1), (16, 1), (16, 5))
"""Experts, and how many times as many tokens the first one gets as each other."""
EXPERT_SIZES = (4096, 1536, 32_768)
"""Hidden size, the expert's width, and tokens."""
ATTENTION = (2048, 8192, 32_768)
ANSWERS = (16, 64, 256)
ANSWER_TOKENS = 2048


def rates(device: str) -> Found:
    """Products, experts, attention, a decoding step, copies, and the memory of a process."""
    numbers: dict[str, Number] = {}
    if device == "cuda":
        torch.ones(1, device=device)
        synchronize(device)
        free, total = torch.cuda.mem_get_info()
        numbers["context of a process, bytes"] = total - free - torch.cuda.memory_reserved()
    products = _products(device, numbers)
    _experts(device, numbers)
    _attention(device, numbers)
    _decoding(device, numbers)
    host = _copies(device, numbers)
    # What kernels read is no rate of the planner, whose `bandwidth` has all that vLLM does between two tokens.
    return Found(numbers, rates={"products": products, "host_bytes_per_s": host})


def _small(size: int, device: str) -> int:
    """A size on a GPU; a 64th of it on a CPU."""
    return size if device == "cuda" else max(8, size // 64)


def _random(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(shape, device=device).bfloat16()


def _products(device: str, numbers: dict[str, Number]) -> float:
    """Returns the median share of the peak."""
    shares = []
    for name, sizes in PRODUCTS.items():
        rows, columns = (_small(size, device) for size in sizes)
        weight = _random(rows, columns, device=device)
        for count in TOKENS:
            tokens = _small(count, device)
            x = _random(tokens, columns, device=device)
            flops = 2 * tokens * rows * columns / seconds_of(lambda: x @ weight.t(), device)
            numbers[f"{name}, {tokens:,} tokens, TFLOP/s"] = flops / 1e12
            shares.append(flops / PEAK_FLOPS)
    return statistics.median(shares)


def _experts(device: str, numbers: dict[str, Number]) -> None:
    hidden, width, num_tokens = (_small(size, device) for size in EXPERT_SIZES)
    x = _random(num_tokens, hidden, device=device)
    for count, skew in EXPERTS:
        weight = _random(count, hidden, 2 * width, device=device)
        share = torch.ones(count)
        share[0] = skew
        ends = (num_tokens * share.cumsum(0) / share.sum()).int()
        ends[-1] = num_tokens
        seconds = seconds_of(lambda: torch._grouped_mm(x, weight, offs=ends.to(device)), device)
        flops = 4 * num_tokens * hidden * width / seconds
        numbers[f"{count} experts, the first with {skew} times the tokens, TFLOP/s"] = flops / 1e12


def _attention(device: str, numbers: dict[str, Number]) -> None:
    """Causal, forward and backward, 16 heads of 128, by two backends; on a CPU by torch's choice."""
    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION}
    for count in ATTENTION:
        length = _small(count, device)
        query, key, value = leaves = [_random(1, 16, length, 128, device=device).requires_grad_() for _ in range(3)]
        for name, backend in backends.items() if device == "cuda" else [("torch", SDPBackend.FLASH_ATTENTION)]:

            def both() -> None:
                with sdpa_kernel(backend):
                    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
                torch.autograd.grad(out, leaves, out)

            flops = 3.5 * 2 * length * length * 128 * 16 / seconds_of(both, device, 3)
            numbers[f"attention of {length:,} tokens, {name}, TFLOP/s"] = flops / 1e12


def _decoding(device: str, numbers: dict[str, Number]) -> None:
    """A token of each answer through a layer of Qwen3-32B at TP4: its weights, and keys and values of all answers."""
    hidden, heads, length = _small(5120, device), 16, _small(ANSWER_TOKENS, device)
    widths = [_small(size, device) for size in (2560, 12_800, 6400)]
    weights = [_random(width, hidden, device=device) for width in widths]
    for answers in ANSWERS:
        x = _random(answers, hidden, device=device)
        query = _random(answers, heads, 1, 128, device=device)
        key, value = (_random(answers, 2, length, 128, device=device) for _ in range(2))

        def step() -> None:
            for weight in weights:
                x @ weight.t()
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

        num_bytes = 2 * (sum(weight.numel() for weight in weights) + key.numel() + value.numel())
        numbers[f"a layer's decoding step of {answers} answers, GB/s"] = num_bytes / seconds_of(step, device) / 1e9


def _copies(device: str, numbers: dict[str, Number]) -> float:
    """Returns the slower rate between pinned memory and the GPU, in bytes per second."""
    num_bytes = 2**30 if device == "cuda" else 2**20
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
    here, there = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    found = {
        "to the GPU": num_bytes / seconds_of(lambda: here.copy_(host, non_blocking=True), device),
        "from the GPU": num_bytes / seconds_of(lambda: host.copy_(here, non_blocking=True), device),
    }
    numbers |= {f"pinned copy {way}, GB/s": rate / 1e9 for way, rate in found.items()}
    pageable = torch.empty(num_bytes, dtype=torch.uint8)
    numbers["pageable copy to the GPU, GB/s"] = num_bytes / seconds_of(lambda: here.copy_(pageable), device) / 1e9
    copied = 2 * num_bytes / seconds_of(lambda: there.copy_(here), device)
    numbers["copy on the GPU, read and written, GB/s"] = copied / 1e9
    return min(found.values())


def small_checks(device: str) -> Found:
    """The product of bf16 matrices with a result in fp32, into given memory, of a transposed weight; and checksums."""
    tokens, rows, columns = (_small(size, device) for size in (16_384, 37_984, 5120))
    x, weight = _random(tokens, columns, device=device), _random(rows, columns, device=device)
    out = torch.empty(tokens, rows, device=device)

    def product() -> None:
        if device == "cuda":
            torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        else:  # CPUs have no such product
            torch.mm(x.float(), weight.t().float(), out=out)

    flops = 2 * tokens * rows * columns / seconds_of(product, device)
    exact = x[:64].double() @ weight.t().double()
    error = float((out[:64].double() - exact).norm() / exact.norm())
    data = torch.arange(2**28 if device == "cuda" else 2**16, dtype=torch.int32, device=device).view(torch.uint8)
    summed = data.numel() / seconds_of(lambda: checksum(data), device)
    numbers: dict[str, Number] = {
        "product in fp32, TFLOP/s": flops / 1e12,
        "product in fp32, relative error": error,
        "checksum, GB/s": summed / 1e9,
    }
    problems = [] if checksum(data) == checksum(data.cpu()) else ["A checksum differs from the CPU's."]
    if not error <= 1e-5:
        problems.append(f"The product in fp32 differs by {error:.1e}, and at most 1e-5 is rounding.")
    return Found(numbers, problems)
