"""Reads and restores everything that the next training step of a rank depends on: the weights, the optimizer's state,
the position in the learning rate's schedule, and the random generators of Python, NumPy, torch and Megatron.

Invariant (tests/dist): a run that continues from a restored state equals, bit for bit, one that never stopped.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor
from torch.nn import Parameter

from megatron_rl.actor import platform

Chunks = Sequence[DistributedDataParallel]
"""The models of a rank, one for each virtual stage."""


def local_parameters(chunks: Chunks) -> dict[str, Tensor]:
    """The live parameters by GPTModel's names, without the prefixes of its wrappers (DDP, bf16). With virtual stages
    the number of the stage is in front. The bias of a router is a buffer of Megatron, and counts as a parameter."""
    parameters = {name: parameter.data for name, parameter in named_parameters(chunks)}
    for prefix, chunk in _prefixed(chunks):
        for name, buffer in chunk.named_buffers():
            if name.endswith("router.expert_bias"):
                parameters[prefix + name.replace("module.", "")] = buffer.data
    return parameters


def local_gradients(chunks: Chunks) -> dict[str, Tensor]:
    """The gradients of the last update by the names of the parameters. They are complete: with the distributed
    optimizer each data-parallel rank has only a part of their sums, so the parts are gathered here."""
    for chunk in chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            if buffer.ddp_config.use_distributed_optimizer:
                for bucket in buffer.buckets:
                    parts = list(bucket.grad_data.chunk(buffer.data_parallel_world_size))
                    mine = parts[buffer.data_parallel_group.rank()].clone()
                    dist.all_gather(parts, mine, group=buffer.data_parallel_group)
    return {name: parameter.main_grad for name, parameter in named_parameters(chunks)}


def named_parameters(chunks: Chunks) -> Iterator[tuple[str, Parameter]]:
    """The parameters that are trained, by the names of `local_parameters`."""
    for prefix, chunk in _prefixed(chunks):
        for name, parameter in chunk.named_parameters():
            yield prefix + name.replace("module.", ""), parameter


def _prefixed(chunks: Chunks) -> Iterator[tuple[str, DistributedDataParallel]]:
    """Each model with what its parameters' names begin with."""
    prefixes = [f"chunk{number}." for number in range(len(chunks))] if len(chunks) > 1 else [""]
    return zip(prefixes, chunks, strict=True)


def training_state(chunks: Chunks, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler) -> dict[str, Any]:
    return {
        "model": local_parameters(chunks),
        "optimizer": [inner.state_dict() for inner in _inner(optimizer)],
        "main_parameters": [parameter.detach() for parameter in _main_parameters(chunks, optimizer)],
        "num_updates": scheduler.num_steps,
        "random": random_state(),
    }


def random_state() -> dict[str, Any]:
    """The states of all random generators."""
    return {
        "python": random.getstate(),
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if platform.HAS_CUDA else None,
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def _numpy_state() -> tuple[Any, ...]:
    """The state of NumPy's generator, with a list in the place of the array: a safe reader of files takes no arrays."""
    kind, keys, *others = np.random.get_state()
    return (kind, keys.tolist(), *others)


@torch.no_grad()
def restore(
    state: dict[str, Any],
    chunks: Chunks,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> None:
    for name, parameter in local_parameters(chunks).items():
        parameter.copy_(state["model"][name])
    for inner, saved in zip(_inner(optimizer), state["optimizer"], strict=True):
        mine = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in inner.param_groups]
        inner.load_state_dict(saved)
        for group, settings in zip(inner.param_groups, mine, strict=True):
            group.update(settings)  # keep this run's learning rate, betas and decay, and only restore the moments
    for parameter, saved in zip(_main_parameters(chunks, optimizer), state["main_parameters"], strict=True):
        parameter.copy_(saved)
    restore_schedule(scheduler, state["num_updates"])
    restore_random(state["random"])


def restore_schedule(scheduler: OptimizerParamScheduler, num_updates: int) -> None:
    scheduler.num_steps = num_updates
    scheduler.step(0)  # sets the learning rate and decay that this run's configuration has at that step


def restore_random(generators: dict[str, Any]) -> None:
    random.setstate(generators["python"])
    np.random.set_state(generators["numpy"])
    torch.set_rng_state(generators["torch"])
    if platform.HAS_CUDA:
        torch.cuda.set_rng_state(generators["cuda"])
    get_cuda_rng_tracker().set_states(generators["megatron"])


def _inner(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers that hold the state. Their state is saved as it is in memory, because Megatron's own
    checkpoint of a distributed optimizer fails with torch's AdamW, which keeps a step for each parameter."""
    return [chained.optimizer for chained in optimizer.chained_optimizers]


def optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """The optimizer's parameters and their state. The parameters may be views of the model's weights."""
    for inner in _inner(optimizer):
        yield from (parameter for group in inner.param_groups for parameter in group["params"])
        for values in inner.state.values():
            yield from (value for value in values.values() if isinstance(value, Tensor))


def _main_parameters(chunks: Chunks, optimizer: MegatronOptimizer) -> list[Tensor]:
    """The optimizer's fp32 copies of the weights. They exist only for bf16 weights."""
    if not chunks[0].config.bf16:
        return []
    return [p for inner in _inner(optimizer) for group in inner.param_groups for p in group["params"]]
