"""The models that vLLM builds: class, names and extents of the parameters, and what its loaders would copy into them,
in a process for each rank over gloo. No weight is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from megatron_rl.bridge.recording import record_loading
from megatron_rl.layout import Recording, read_shape


def parameters(
    folder: str, tensor: int, pipeline: int, expert_parallel: bool, rank: int, url: str
) -> tuple[str, dict[str, tuple[int, ...]], Recording]:
    """The name of the model's class, the extents of its parameters, and the recording of its loaders."""
    config = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        enable_expert_parallel=expert_parallel,
        distributed_executor_backend="mp",
        max_model_len=64,
    ).create_engine_config()
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(tensor * pipeline, rank, url, local_rank=rank, backend="gloo")
        parallel_state.initialize_model_parallel(tensor, pipeline, backend="gloo")
        model = initialize_model(config)
        found = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
        before = dict(model.named_parameters())
        recording = record_loading(model, read_shape(Path(folder)), torch.float32)
        assert all(before[name] is tensor for name, tensor in model.named_parameters()), "the model is as it was"
    dist.barrier()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    return type(model).__name__, found, recording


def rank_parameters(url: str, rank: int, cases: Sequence[tuple[str, int, int, bool]]) -> list[tuple | None]:
    """Of each case (folder, tensor, pipeline, expert_parallel); None where the engine has no such rank."""
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_DIST_IDENT": "layout"}
    return [
        parameters(*case, rank, f"{url}{number}") if rank < case[1] * case[2] else None
        for number, case in enumerate(cases)
    ]
