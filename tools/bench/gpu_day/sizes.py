"""What the parts of `megatron-rl gpu-day` have in common: their results, sizes, models and processes."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.package_files import find_shipped
from megatron_rl.models import FAMILIES, read_shape
from megatron_rl.types import ModelShape

Number = int | float | str


@dataclass(frozen=True, slots=True)
class Found:
    """What a part has measured."""

    numbers: Mapping[str, Number]
    """The numbers by their names, which end with the unit."""
    problems: Sequence[str] = ()
    """What is wrong with the results, one sentence each; nothing if the part has passed."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Rates for the planner, by their names in planning/rates.py."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the parts are on a device."""

    model: Mapping[str, int]
    """The sizes of the small Qwen3 model that is compared and resumed, in the words of config.json."""
    num_rows: int
    """The rows of each of its batches."""
    longest: int
    """The tokens of the longest row of its batches."""
    logprobs: tuple[int, int, int]
    """T, V and H of the log-probs."""
    pushed: Mapping[str, int]
    """The sizes of the Qwen3 model of the parts `bridge` and `offload`."""
    layers: Mapping[str, int]
    """What replaces the sizes of Qwen3-32B in the part `layers`."""
    lengths: tuple[int, ...]
    """The lengths of the samples of its packed row, all equal, so that attention pads nothing."""


def _sizes(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocabulary: int
) -> dict[str, int]:
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
QWEN3_32B, QWEN3_30B_A3B = (Path("configs/model") / f"Qwen3-{size}.json" for size in ("32B", "30B-A3B"))
NUM_STEPS = 3
"""The training steps before the checkpoint of the part `resume`, and of the part `offload`."""
NUM_COMMUNICATORS = (1, 8, 32)
"""How many communicators the part `communicators` has when it measures."""
NUM_PUSHES = 6
"""The pushes of the part `bridge`; the first one is not timed."""
NUM_UPDATES = 4
"""The updates of the part `layers`; the first one is not timed."""


def hf_weights(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    """Standard normal numbers for every Hugging Face tensor of the model, float32."""
    random = torch.Generator().manual_seed(seed)
    sizes = FAMILIES[shape.family].hf_tensors(shape)
    return {name: torch.randn(size, generator=random) for name, size in sizes.items()}


def write_config(folder: Path, sizes: Mapping[str, Any], published: Path = QWEN3_32B) -> ModelShape:
    """Write a published config.json with other sizes."""
    folder.mkdir()
    config = json.loads(find_shipped(published).read_text()) | dict(sizes)
    (folder / "config.json").write_text(json.dumps(config))
    return read_shape(folder)


def write_model(
    folder: Path, sizes: Mapping[str, Any], published: Path = QWEN3_32B, dtype: torch.dtype = torch.float32
) -> ModelShape:
    """Write a random model whose activations keep their size from layer to layer. Its norms are not all 1, because ones
    would hide a norm that is not loaded."""
    from safetensors.torch import save_file

    shape = write_config(folder, sizes, published)
    weights = {
        name: (1 + 0.1 * tensor if tensor.ndim == 1 else tensor / math.sqrt(tensor.shape[1])).to(dtype)
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
def without_gpus() -> Iterator[None]:
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
