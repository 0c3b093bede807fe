"""The models that vLLM builds: class, names and extents of the parameters, and what its loaders would copy into them,
in a process for each rank over gloo. No weight is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import file_forms
import torch
import torch.distributed as dist
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.model_executor.models.utils import _model_to_pp_missing_layer_names as absent_layers_by_id
from vllm.v1.engine import llm_engine

from megatron_rl.bridge.vllm_loaders import record_loading
from megatron_rl.config.policy import ModelConfig, PolicyConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.layout import Recording
from megatron_rl.models import read_shape
from megatron_rl.models.interleaving import are_zeros, described
from megatron_rl.rollout.backend import EngineSpec
from megatron_rl.rollout.start import make_engine
from megatron_rl.types import ModelShape


def parameters(
    folder: str, tensor: int, pipeline: int, expert_parallel: bool, rank: int, url: str, form: str | None = None
) -> tuple[str, dict[str, tuple[int, ...]], Recording | str]:
    """The name of the model's class, the extents of its parameters, and the recording of its loaders, or why there is
    none.

    Args:
        form: a family of tests/file_forms.py, in the form of which the loaders get the folder's tensors; or
            plain_rates, see there.
    """
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
        with plain_rates() if form == "plain_rates" else nullcontext():
            model = initialize_model(config)
        found = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
        before = dict(model.named_parameters())
        shape = PolicyConfig(vision_tower="trained").adapted(read_shape(Path(folder)))
        form = shape.family if form == "plain_rates" else form
        recording = record_form(model, shape, form) if form else record_loading(model, shape, torch.float32)
        if not form:
            names = {shard.local_name for shard in recording.shards}
            zeros = are_zeros(found, names)
            held = described({name: before[name] for name in found if name not in zeros}, names)
            found = {name: tuple(tensor.shape) for name, tensor in held.items()}
        assert all(before[name] is tensor for name, tensor in model.named_parameters()), "the model is as it was"
    dist.barrier()
    for path in Path("/dev/shm").glob(f"*-{os.environ['VLLM_DIST_IDENT']}-*-cpushm_*"):
        path.unlink(missing_ok=True)  # where vLLM's groups have shared memory (AVX-512), they keep it until they end
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    absent_layers_by_id.clear()  # vLLM keys it by id(model), which the next model of this process can have too
    return type(model).__name__, found, recording


@contextmanager
def plain_rates() -> Iterator[None]:
    """Inside the block a loader of Mamba-2's rates is built that copies A_log as it is."""
    known, mamba_mixer2.composed_weight_loader = mamba_mixer2.composed_weight_loader, lambda loader, function: loader
    try:
        yield
    finally:
        mamba_mixer2.composed_weight_loader = known


def record_form(model: torch.nn.Module, shape: ModelShape, form: str) -> Recording | str:
    for layer in model.modules():
        if hasattr(layer, "is_fused_checkpoint_transposed"):  # as the classes of models say that are published so
            layer.is_fused_checkpoint_transposed = form in ("like_gpt_oss", "like_llama4")
    with file_forms.known():
        try:
            return record_loading(model, replace(shape, family=form), torch.float32)
        except ValueError as error:
            return str(error)


def rank_parameters(url: str, rank: int, cases: Sequence[tuple]) -> list[tuple | None]:
    """Of each case (folder, tensor, pipeline, expert_parallel, form); None where the engine has no such rank."""
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_DIST_IDENT": f"layout{os.getppid()}"}
    return [
        parameters(*case[:4], rank, f"{url}{number}", *case[4:]) if rank < case[1] * case[2] else None
        for number, case in enumerate(cases)
    ]


def looked_at(folder: str, cache: str) -> list[str]:
    """The files that vLLM has in an empty cache when an engine with a model has its configuration. An error, if vLLM
    starts another process to look at the model's class."""

    class _HasConfiguration(Exception):
        pass

    def configured(*_: Any, **__: Any) -> None:
        raise _HasConfiguration

    def fails(_: Any) -> None:
        raise AssertionError("vLLM starts a process that imports vLLM again")

    os.environ["VLLM_CACHE_ROOT"] = cache
    registry._run_in_subprocess, llm_engine.LLMEngine = fails, configured
    spec = EngineSpec(
        ModelConfig(path=Path(folder)),
        RolloutConfig(prompts_per_step=1, max_prompt_tokens=32, max_response_tokens=32),
        0,
    )
    with suppress(_HasConfiguration):
        make_engine(spec, None)
    return [path.name for path in Path(cache, "modelinfos").iterdir()]
