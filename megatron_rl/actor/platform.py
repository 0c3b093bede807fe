"""Runs Megatron-Core on CUDA with NCCL, or on a plain CPU with gloo. No other file changes Megatron for the CPU.

Megatron-Core's source uses "cuda" literally. Without a CUDA device a torch function mode maps `device="cuda"` to the
CPU, in this thread and inside the block `running()`. `start` replaces the few functions that a function mode cannot
see, and functions that need what gloo lacks. With CUDA it only clears Megatron's mark of Transformer Engine if this is
not installed. Invariant (tests/unit/actor): a tensor that Megatron's code creates on "cuda" is on the CPU inside the
block, and is still an error outside it.

The CUDA path (NCCL, Transformer Engine's layers) has not been run.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from megatron_rl import processes

if TYPE_CHECKING:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

HAS_CUDA = torch.cuda.is_available()
HAS_TRANSFORMER_ENGINE = HAS_CUDA and importlib.util.find_spec("transformer_engine") is not None
"""Transformer Engine's layers run in bf16; an fp32 model uses Megatron's own layers (model.py)."""


class _CudaMeansCpu(TorchFunctionMode):
    """Maps Megatron's uses of CUDA to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron recognises dtypes by strings such as "torch.cuda.FloatTensor".
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs and "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **(kwargs or {}))


@contextmanager
def importing() -> Iterator[None]:
    """The block in which a process imports Megatron-Core.

    At import Megatron gives activations and parts of its experts to `torch.compile`. Without CUDA they stay as they
    are: the import of the compiler takes half of the CPU seconds that Megatron's takes, and a program on a CPU would
    need a C++ compiler.
    """
    if HAS_CUDA:
        yield
        return
    compiler = torch.compile
    torch.compile = lambda model=None, **options: model or (lambda function: function)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiler


def running() -> AbstractContextManager[object]:
    """The block inside which all of Megatron's code must run."""
    return nullcontext() if HAS_CUDA else _CudaMeansCpu()


def start(
    rank: int, world_size: int, store: dist.Store, timeout: timedelta = timedelta(minutes=10), *, ordered: bool = False
) -> None:
    """Join the trainer's process group over a store that all ranks share, and prepare torch and Megatron for this
    platform.

    Args:
        timeout: of every collective of the group. A rank whose neighbour died fails after it instead of waiting for
            ever.
        ordered: whether tensor or context parallelism relies on the order of launches. Their collectives are to begin
            before the product that they overlap with, which Megatron-Core promises on Hopper with one hardware queue
            alone (tensor_parallel/layers.py). Without them one queue would only keep the exchange of experts and the
            reduction of gradients from overlapping.
    """
    from megatron.core.transformer import multi_latent_attention

    if not HAS_TRANSFORMER_ENGINE:  # Megatron has mocks in its place, which latent attention takes for the library
        multi_latent_attention.HAVE_TE = False
    if HAS_CUDA:
        if ordered:  # CUDA reads this when it starts
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        _replace_cuda_functions()
    dist.init_process_group(
        backend="nccl" if HAS_CUDA else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def _replace_cuda_functions() -> None:
    """Replace the functions that a function mode cannot see, because they take no tensor."""
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer import optimizer as mixed_precision
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    # Megatron warns if the CPU's generator changes inside a region of the CUDA generator. Here they are the same one.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    cuda: Any = torch.cuda  # its functions get other types
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda device=None: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    random._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=None, graph_safe=False: torch.set_rng_state(state)
    collectives: Any = dist  # theirs have no types
    collectives.all_gather, collectives.reduce_scatter = _all_gather, _reduce_scatter
    # Where Transformer Engine or Apex is installed, Megatron takes their kernels, which run on GPUs alone.
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    for module in (mixed_precision, clip_grads):
        module.multi_tensor_applier = utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
    # Megatron reads this name, which it imports from Transformer Engine, and only checks whether it is None.
    moe_utils.te_general_gemm = None
    # Megatron copies the numbers of tokens to the CPU on a separate stream. Here they are already on the CPU.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _splits_to_numpy


_EQUAL_ALL_GATHER, _EQUAL_REDUCE_SCATTER = dist.all_gather, dist.reduce_scatter


def _all_gather(
    parts: list[torch.Tensor], own: torch.Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """An all-gather that, like NCCL's, allows parts of different sizes. Experts that are split over TP need it, because
    their ranks have different numbers of tokens."""
    if len({part.shape for part in parts}) == 1:
        work: dist.Work | None = _EQUAL_ALL_GATHER(parts, own, group, async_op)
        return work
    assert group is not None and not async_op
    for rank, part in enumerate(parts):
        if rank == group.rank():
            part.copy_(own)
        if part.numel():
            dist.broadcast(part, group=group, group_src=rank)
    return None


def _reduce_scatter(
    own: torch.Tensor,
    parts: list[torch.Tensor],
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """A reduce-scatter that, like NCCL's, allows parts of different sizes."""
    if len({part.shape for part in parts}) == 1:
        work: dist.Work | None = _EQUAL_REDUCE_SCATTER(own, parts, op, group, async_op)
        return work
    assert group is not None and not async_op
    for rank, part in enumerate(parts):
        total = part.clone()
        if part.numel():
            dist.reduce(total, group=group, group_dst=rank, op=op)
        if rank == group.rank():
            own.copy_(total)
    return None


def _splits_to_numpy(
    dispatcher: MoEAlltoAllTokenDispatcher, point: str, tokens_per_expert: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Replaces Megatron's copy to the CPU. Only the conversion to NumPy is left, because `all_to_all` does not take the
    sizes of its parts as tensors."""
    if point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            value = getattr(dispatcher, name)
            if isinstance(value, torch.Tensor):
                setattr(dispatcher, name, value.numpy())
    return tokens_per_expert


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if HAS_CUDA else torch.device("cpu")


def device_memory() -> tuple[int, int] | None:
    """The used bytes of this rank's GPU, by all its processes, and the pinned host memory that torch holds in this
    process; None on a CPU."""
    if not HAS_CUDA:
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free, int(torch.cuda.memory.host_memory_stats()["allocated_bytes.current"])


def peak_memory_bytes() -> int:
    """The largest memory that this process has had: what torch has allocated on the GPU, or, on a CPU, the process."""
    return torch.cuda.max_memory_allocated() if HAS_CUDA else processes.peak_memory_bytes()
