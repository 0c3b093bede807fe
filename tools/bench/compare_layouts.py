"""Compare the trainer's numbers between layouts: loss, gradient norm and the whole gradient of one batch.

The reference is one process that computes in float64 (`float64.py`, with twice the memory). One process with one
micro-batch shows how far rounding alone moves the numbers from it. Every layout runs with several micro-batches over
gloo (or NCCL, one GPU a rank), and may be FACTOR times as far away. The difference of a
tensor's gradient is the largest absolute difference of an element, divided by the largest absolute element of the
reference.

No fixed number would do, because rounding grows with depth and with the sharpness of attention: in fp32 one process
was 4e-6 from float64 over 2 layers, and 3e-5 to 1e-4 over 30.

A layout is written as axes with their sizes: tp, pp, vpp (virtual stages), cp, ep, etp (ranks of each expert) and dp,
and `@3,1` gives the number of layers of each part of the pipeline.
"""

from __future__ import annotations

import multiprocessing
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.config.balance import BalanceConfig
from megatron_rl.config.optimizer import AdamConfig
from megatron_rl.config.policy import ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.models import FAMILIES, read_shape
from megatron_rl.types import Credit, Share, StepBatch, Tokens, TrainingRow

if TYPE_CHECKING:
    import torch.distributed as dist

    from megatron_rl.actor.actor import MegatronActor

AXES = {
    "tp": "tensor",
    "pp": "pipeline",
    "vpp": "virtual",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "dp": "data",
}
NUM_MICROBATCHES = 3
FACTOR = 3.0
"""How many times as far from float64 as one process a layout may be. The same sums in another order were 0.5 to 1.5
times as far over all families (tests/ranks); a gradient that lacks a term is thousands of times as far."""
ONE_PROCESS = "one process"


@dataclass(frozen=True, slots=True)
class Difference:
    """A layout's numbers, and their relative differences from a reference's."""

    layout: str
    loss: float
    loss_difference: float
    grad_norm: float
    norm_difference: float
    gradient_difference: float
    """The largest difference of a tensor's gradient."""
    tensor: str
    """The HF name of the tensor with the largest difference."""


def parse_layout(text: str) -> ParallelConfig:
    """
    Raises:
        ValueError: the text is no layout.
    """
    axes, _, layers = text.partition("@")
    fields: dict[str, Any] = {}
    for axis in axes.split("-"):
        match = re.fullmatch(r"([a-z]+)([1-9]\d*)", axis)
        if match is None or match[1] not in AXES:
            raise ValueError(
                f"{text!r} is no layout: write axes with sizes, such as tp2-pp2; the axes are {', '.join(AXES)}"
            )
        fields[AXES[match[1]]] = int(match[2])
    if layers:
        fields["layers"] = tuple(map(int, layers.split(",")))
    return ParallelConfig(**fields)


def random_rows(vocab_size: int, num_rows: int, longest: int, seed: int) -> list[Tokens]:
    """Rows of random tokens. The first token of each is no action. Their lengths lie between 2 and `longest`."""
    rng = np.random.default_rng(seed)
    return rows_of_lengths(vocab_size, rng.integers(2, longest, num_rows, endpoint=True), rng)


def rows_of_lengths(vocab_size: int, lengths: Iterable[int], rng: np.random.Generator) -> list[Tokens]:
    """Rows of random tokens of these lengths. The first token of each row is no action."""
    rows = []
    for length in lengths:
        mask = np.arange(length) > 0
        ids = rng.integers(0, vocab_size, length).astype(np.int32)
        rows.append(Tokens(ids, mask, np.zeros(length, np.float32), np.where(mask, 0, -1).astype(np.int32)))
    return rows


Result = tuple[float, float, dict[str, np.ndarray]]
"""Loss, gradient norm and the gradient by HF names."""


def train_once(
    rank: int,
    store: dist.Store,
    folder: Path,
    model: ModelConfig,
    policy: PolicyConfig,
    shares: list[Share],
    exact: bool = False,
) -> Result:
    """Load the model, do one update with `shares`, the shares of all data-parallel ranks, and return its numbers. Every
    rank calls this. The gradient is whole on rank 0 and empty on the others.

    Args:
        exact: compute in float64 in place of float32. The gradient is float64, too.
    """
    if exact:
        from megatron_rl.tools.bench.float64 import Float32MeansFloat64

        with Float32MeansFloat64():
            return train_once(rank, store, folder, model, policy, shares)
    from megatron_rl.actor.weights import gather_gradient

    actor = loaded_actor(rank, store, folder, model, policy)
    actor.begin(shares[policy.parallel.mesh.coordinates(rank)[2]], {})
    metrics = actor.update(0, {})
    gradient = {name: tensor.numpy() for name, tensor in gather_gradient(actor).items()}
    actor.close()
    return metrics["loss"], metrics["grad_norm"], gradient


def loaded_actor(rank: int, store: dist.Store, folder: Path, model: ModelConfig, policy: PolicyConfig) -> MegatronActor:
    """The actor of a rank with the model's weights, and the adapters that the policy starts with."""
    from megatron_rl.actor.actor import MegatronActor
    from megatron_rl.actor.adapter_folders import load_adapters
    from megatron_rl.actor.spec import ActorSpec
    from megatron_rl.actor.weights import load_weights
    from megatron_rl.algorithms import SupervisedObjective

    unclipped = AdamConfig(clip_grad=0.0)  # clipping would scale the gradient
    spec = ActorSpec(
        shape=policy.adapted(read_shape(folder)),
        model=model,
        policy=policy.model_copy(update={"optimizer": unclipped}),
        objective=SupervisedObjective(),
        temperature=1.0,
        total_steps=1,
        seed=0,
        pictures=str(folder / "images"),
    )
    actor = MegatronActor(spec, rank=rank, world_size=policy.parallel.mesh.world_size, store=store)
    load_weights(actor, model.weights or folder)
    if policy.lora and policy.lora.start:
        load_adapters(actor, policy.lora.start)
    return actor


def _in_process(rank: int, url: str, world_size: int, results: Any, *arguments: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store, *_ = next(dist.rendezvous(url, rank, world_size))
    result = train_once(rank, store, *arguments)
    if rank == 0:
        results.put(result)


def run_layout(
    folder: Path,
    model: ModelConfig,
    parallel: ParallelConfig,
    rows: Sequence[Tokens],
    num_microbatches: int,
    exact: bool = False,
) -> Result:
    """The numbers of the batch in a layout, with one process for each rank.

    Args:
        exact: compute in float64 in place of float32.

    Raises:
        ValueError: a rank failed; its error is on the terminal.
    """
    shares, world_size = deal_rows(folder, parallel, rows, num_microbatches), parallel.mesh.world_size
    processes = multiprocessing.get_context("spawn")
    results = processes.SimpleQueue()
    with tempfile.TemporaryDirectory() as temporary:
        policy = PolicyConfig(parallel=parallel)
        arguments = f"file://{temporary}/store", world_size, results, folder, model, policy, shares, exact
        ranks = [
            processes.Process(target=_in_process, args=(rank, *arguments), daemon=True) for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        while results.empty():
            if any(process.exitcode for process in ranks):
                for process in ranks:
                    process.terminate()
                raise ValueError(f"a rank of the layout {parallel.mesh} failed; its error is above")
            ranks[0].join(0.05)
        found: Result = results.get()
        for process in ranks:
            process.join()
    return found


def deal_rows(folder: Path, parallel: ParallelConfig, rows: Sequence[Tokens], num_microbatches: int) -> list[Share]:
    """The rows as one mini-batch, distributed over the data-parallel ranks in about this number of micro-batches."""
    from megatron_rl.algorithms.aggregation import loss_weights
    from megatron_rl.balance import plan_microbatches
    from megatron_rl.balance.packing import padded
    from megatron_rl.loop.shares import deal

    batch = StepBatch.of_rows([TrainingRow(f"row {i}", (row,), (0.0,)) for i, row in enumerate(rows)], version=0)
    sizes = padded(batch.lengths, parallel.alignment)
    cap = max(int(sizes.max()), -(-int(sizes.sum()) // (num_microbatches * parallel.data)))
    plan = plan_microbatches(
        batch,
        np.ones(len(rows), bool),
        read_shape(folder),
        parallel,
        BalanceConfig(max_tokens_per_microbatch=cap),
    )
    weights = loss_weights(batch, plan, "token-mean")
    return deal(batch, plan, parallel.data, weights, Credit(np.ones(len(rows)), np.ones(len(rows), bool)))


def compare(folder: Path, layouts: Sequence[str], rows: Sequence[Tokens], dtype: str = "float32") -> list[Difference]:
    """Run the reference, one process and all layouts.

    Returns:
        The differences of one process (ONE_PROCESS) and of each layout from float64.

    Raises:
        ValueError: a layout does not suit the model, or a rank failed.
    """
    shape, model = read_shape(folder), ModelConfig(path=folder, dtype=dtype)
    parsed = {text: parse_layout(text) for text in layouts}
    for parallel in parsed.values():
        FAMILIES[shape.family].check_mesh(shape, parallel.mesh)
    exact = run_layout(folder, ModelConfig(path=folder, dtype="float32"), ParallelConfig(), rows, 1, exact=True)
    one = difference(ONE_PROCESS, run_layout(folder, model, ParallelConfig(), rows, 1), exact)
    return [
        one,
        *(
            difference(text, run_layout(folder, model, parallel, rows, NUM_MICROBATCHES), exact)
            for text, parallel in parsed.items()
        ),
    ]


def too_far(found: Difference, one: Difference) -> list[str]:
    """What of a layout is farther from float64 than rounding explains.

    The gradient's bound holds for all: a norm is no farther than the worst of its tensors, and a loss is a sum
    of less rounded numbers.
    """
    differences = {
        "loss": found.loss_difference,
        "gradient norm": found.norm_difference,
        f"gradient of {found.tensor}": found.gradient_difference,
    }
    bound = FACTOR * one.gradient_difference
    return [
        f"{found.layout}: the {name} is {value:.1e} from float64, and at most {bound:.1e} is rounding, which is "
        f"{FACTOR:g} times the {one.gradient_difference:.1e} of one process"
        for name, value in differences.items()
        if not value <= bound  # or NaN
    ]


def difference(layout: str, found: Result, expected: Result) -> Difference:
    assert found[2].keys() == expected[2].keys()
    off = {name: relative(tensor, expected[2][name]) for name, tensor in found[2].items()}
    worst = max(off, key=lambda name: off[name])
    return Difference(
        layout=layout,
        loss=found[0],
        loss_difference=abs(found[0] - expected[0]) / abs(expected[0]),
        grad_norm=found[1],
        norm_difference=abs(found[1] - expected[1]) / expected[1],
        gradient_difference=off[worst],
        tensor=worst,
    )


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference of an element, divided by the largest expected element."""
    largest = float(np.abs(expected).max())
    return float(np.abs(found - expected).max()) / (largest or 1.0)
