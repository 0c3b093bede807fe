"""Run as a program: names and extents of the parameters that vLLM builds, one process a rank over gloo.

Arguments: address of the meeting place, rank. Reads JSON lines {folder, tensor, pipeline, expert_parallel}, writes one
line a line: {name: extents}, or null for a rank that the engine does not have. No weight is loaded.
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1", "VLLM_DIST_IDENT": "layout"}

import torch.distributed as dist  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402


def parameters(
    folder: str, tensor: int, pipeline: int, expert_parallel: bool, rank: int, url: str
) -> dict[str, tuple[int, ...]]:
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
        found = {name: tuple(tensor.shape) for name, tensor in initialize_model(config).named_parameters()}
    dist.barrier()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    return found


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr  # vLLM speaks on the standard output
    url, rank = sys.argv[1], int(sys.argv[2])
    for number, line in enumerate(sys.stdin):
        case = json.loads(line)
        absent = rank >= case["tensor"] * case["pipeline"]
        meeting = f"{url}{number}"
        print(json.dumps(None if absent else parameters(**case, rank=rank, url=meeting)), file=out, flush=True)
