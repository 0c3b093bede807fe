"""A rank's parameters and gradients by their names, and the random generators of Python, NumPy, torch and Megatron."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
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
    parameters: Iterator[tuple[str, Any]] = trained_parameters(chunks)  # Megatron gives each a gradient of its own
    return {name: parameter.main_grad for name, parameter in parameters}


def named_parameters(chunks: Chunks) -> Iterator[tuple[str, Parameter]]:
    """The parameters without buffers, by the names of `local_parameters`."""
    for prefix, chunk in _prefixed(chunks):
        for name, parameter in chunk.named_parameters():
            yield prefix + name.replace("module.", ""), parameter


def trained_parameters(chunks: Chunks) -> Iterator[tuple[str, Parameter]]:
    """The parameters that have gradients, by the names of `local_parameters`: all, or the adapters."""
    return ((name, parameter) for name, parameter in named_parameters(chunks) if parameter.requires_grad)


def _prefixed(chunks: Chunks) -> Iterator[tuple[str, DistributedDataParallel]]:
    """Each model with what its parameters' names begin with."""
    prefixes = [f"chunk{number}." for number in range(len(chunks))] if len(chunks) > 1 else [""]
    return zip(prefixes, chunks, strict=True)


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
    generator = np.random.get_state()
    assert isinstance(generator, tuple), "the default form"
    kind, keys, *others = generator
    return (kind, keys.tolist(), *others)


def restore_random(generators: dict[str, Any]) -> None:
    """Restore the generators, without Megatron's and CUDA's if the states were written on the other kind of device.
    These then stay as at a start, like after a change of the mesh."""
    random.setstate(generators["python"])
    np.random.set_state(generators["numpy"])
    torch.set_rng_state(generators["torch"])
    if (generators["cuda"] is not None) == platform.HAS_CUDA:
        if platform.HAS_CUDA:
            torch.cuda.set_rng_state(generators["cuda"])
        get_cuda_rng_tracker().set_states(generators["megatron"])
