"""How an engine configures and starts vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args

import torch

from megatron_rl.config.engine_options import ELSEWHERE, REFUSED
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.convert.hub import companions
from megatron_rl.models import linear_layers, read_shape
from megatron_rl.models.adapters import PINNED_ID, SERVED_ID
from megatron_rl.models.composite import composite_of
from megatron_rl.models.vision import vision_of
from megatron_rl.rollout.backend import EngineSpec
from megatron_rl.rollout.drafts import speculative_config
from megatron_rl.rollout.plugins import fault_of_plugins
from megatron_rl.rollout.programs.budgets import Budgets
from megatron_rl.rollout.progress import Progress
from megatron_rl.rollout.shared_memory import remove_leftovers, remove_own_names
from megatron_rl.types import Adapters, LatentAttention, ModelShape

if TYPE_CHECKING:
    from vllm.config.reasoning import ReasoningConfig
    from vllm.distributed.aux_output_connector.connector import AuxOutputConnectorMetadata
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.llm_engine import LLMEngine


def set_cpu_environment() -> None:
    """Set the environment variables that vLLM reads at import, for a machine without a GPU. Variables that are already
    set keep their values.

    An engine uses one thread, because the decode steps of small models are too short to split. Dynamo is off, because
    it would spend seconds on compiling a two-line function.
    """
    for name, value in {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }.items():
        os.environ.setdefault(name, value)


def make_engine(spec: EngineSpec, progress: Progress | None) -> LLMEngine:
    """Start vLLM in the process and the thread that call.

    Args:
        progress: what records the tokens of every step; None if nobody does.

    Raises:
        ValueError: vLLM cannot find the bridge.
    """
    if fault := fault_of_plugins():
        raise ValueError(fault)
    model, rollout, returns_routes = spec.model, spec.rollout, spec.returns_routes
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        set_cpu_environment()
    remove_leftovers()
    shape = read_shape(model.path)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    defaults = {} if on_gpu else _cpu_defaults(rollout, shape)
    ours = _own_arguments(spec, shape, on_gpu)
    look_at_classes_here()
    with text_model(model.path) as folder:
        arguments = EngineArgs(**{**defaults, **rollout.vllm, **ours, "model": str(folder)})
        # vLLM chooses the tokens of a step by GPU and usage; without a usage it takes 2,048 on every GPU.
        config = arguments.create_engine_config(UsageContext.LLM_CLASS)
        # On a CPU vLLM refuses it, because its workers do not collect them; ours do.
        config.aux_output_config.enable_return_routed_experts = returns_routes
        engine = LLMEngine(config, Executor.get_class(config), log_stats=spec.keeps_statistics, multiprocess_mode=False)
    remove_own_names()
    if forbidden := spec.forbidden_ids:
        engine.collective_rpc("forbid", args=(forbidden,))
    if spec.adapters is not None:
        engine.collective_rpc("open_adapter_slots")
    if not on_gpu:
        engine.collective_rpc("sample_by_seed")
        engine.collective_rpc("score_together")
        if spec.adapters is not None:
            engine.collective_rpc("serve_adapters_on_a_cpu")
        if rollout.parallel.pipeline > 1:
            engine.collective_rpc("receive_stages_on_a_cpu")
        if spec.shares_gpus:
            engine.collective_rpc("sleep_on_a_cpu")
        if returns_routes:
            engine.collective_rpc("return_routes")
    if returns_routes:
        _return_routes_anew(engine)
    if progress is not None:
        _record_steps(engine, progress)
    return engine


@contextmanager
def text_model(folder: Path) -> Iterator[Path]:
    """The folder that vLLM reads the model's configuration in. Next to a vision tower that does not run here it is
    another one, which has the text model's configuration and no weights."""
    is_alone = composite_of(folder) and vision_of(folder) is None
    with TemporaryDirectory() as temporary:
        if is_alone:
            for name, content in companions(folder, None).items():
                Path(temporary, name).write_bytes(content)
        yield Path(temporary) if is_alone else folder


def look_at_classes_here() -> None:
    """Let vLLM look at the classes of models in this process.

    vLLM asks a class what it can do before it starts, and keeps the answer in the user's cache. It asks in another
    process, which imports all of vLLM: seven seconds at the first start with each class on a machine, in every engine
    that starts at that time. The reason is that the class may initialise CUDA, and a process that is forked later
    cannot use it. Ours are never forked then: on a CPU there is no CUDA, and in a Ray actor vLLM spawns its workers.
    Not run on a GPU.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def slot_rank(rank: int) -> int:
    """The smallest rank of vLLM's slots that adapters of a rank fit into.

    Raises:
        ValueError: there is none.
    """
    from vllm.config.lora import MaxLoRARanks

    fitting = [size for size in get_args(MaxLoRARanks) if size >= rank]
    if not fitting:
        raise ValueError(f"policy.lora.rank is {rank}, and vLLM serves at most {max(get_args(MaxLoRARanks))}; lower it")
    return int(min(fitting))


def served_adapter(adapters: Adapters | None, pinned: int | None) -> LoRARequest | None:
    """What names the run's adapter in a request. Its folder is never read, because vLLM has the adapter already.

    Args:
        pinned: the version that was copied into the second slot, if that one shall answer. It is part of the name,
            because vLLM keeps the keys and values of prefixes by the names of adapters.
    """
    if adapters is None:
        return None
    from vllm.lora.request import LoRARequest

    if pinned is None:
        return LoRARequest("policy", SERVED_ID, "the bridge brings it")
    return LoRARequest(str(pinned), PINNED_ID, "it is a copy")


def _own_arguments(spec: EngineSpec, shape: ModelShape, on_gpu: bool) -> dict[str, Any]:
    """vLLM's arguments that other keys of the configuration and the bridge decide, and `rollout.vllm` cannot."""
    from vllm.config import WeightTransferConfig

    model, rollout = spec.model, spec.rollout
    ours: dict[str, Any] = {
        "load_format": "auto" if spec.loads_weights or spec.keeps_weights else "dummy",
        "dtype": model.dtype,
        "hf_overrides": {"head_dtype": "float32"},  # the trainer's logits are float32 too (algorithms/logprobs.py)
        "quantization": rollout.quantization,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # ignore the folder's sampling defaults (top_k, temperature)
        "seed": spec.seed,
        "tensor_parallel_size": rollout.parallel.tensor,
        "pipeline_parallel_size": rollout.parallel.pipeline,
        "enable_expert_parallel": rollout.parallel.expert_parallel,
        "max_model_len": rollout.max_engine_tokens,
        "max_num_seqs": rollout.max_sequences,
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend="megatron_rl"),
        "worker_extension_cls": "megatron_rl.rollout.worker.RolloutWorker",
        "enable_return_routed_experts": spec.returns_routes and on_gpu,
    }
    if on_gpu:
        ours["gpu_memory_utilization"] = rollout.gpu_memory_utilization
        ours["enable_sleep_mode"] = spec.shares_gpus
    elif rollout.engine_ranks == 1:  # a single rank works in the engine's own process
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        ours["distributed_executor_backend"] = UniProcExecutor
    if spec.spans_nodes:
        ours["distributed_executor_backend"] = "ray"
    if rollout.thinking is not None and rollout.thinking.mode == "native":
        ours["reasoning_config"] = _reasoning(Budgets(model.path, rollout, on_gpu))
    if rollout.beams is not None:
        ours["max_logprobs"] = min(rollout.beams.candidates, shape.vocab_size)
    if shape.vision is not None:  # the images are patches already
        ours |= {"mm_device_do_normalize": False, "skip_mm_profiling": True, "mm_processor_cache_gb": 0}
    if (speculative := rollout.speculative) is not None:
        ours["speculative_config"] = speculative_config(speculative)
    if spec.adapters is not None:
        ours |= {"enable_lora": True, "max_lora_rank": slot_rank(spec.adapters.rank)}
        ours["max_loras"] = rollout.num_adapters
        ours["lora_target_modules"] = list(spec.adapters.targets or linear_layers(shape))
    assert not (missing := ours.keys() - ELSEWHERE.keys() - REFUSED.keys()), f"rollout.vllm does not refuse {missing}"
    return ours


def _cpu_defaults(rollout: RolloutConfig, shape: ModelShape) -> dict[str, Any]:
    """What vLLM's arguments are on a CPU if `rollout.vllm` does not give them. Prompts of up to 8192 tokens together
    fit into one step, which saves passes of the scheduler's Python loop."""
    defaults: dict[str, Any] = {
        "enforce_eager": True,
        "max_num_batched_tokens": max(8192, rollout.max_engine_tokens),
    }
    # vLLM's faster kernel for latent attention computes in bf16 alone, and drops a weight that a push needs.
    if isinstance(shape.attention, LatentAttention):
        defaults["attention_backend"] = "CPU_MLA"
    else:  # the prefix cache holds whole blocks; vLLM's default for CPUs, 128, is longer than many prompts
        defaults["block_size"] = 32
    return defaults


def _reasoning(budgets: Budgets) -> ReasoningConfig:
    """What vLLM's thinking budget needs to know of a thought. vLLM would tokenise the texts with its own tokenizer,
    which an engine of token ids does not load."""
    from vllm.config.reasoning import ReasoningConfig

    assert budgets.closing is not None and budgets.delimiter is not None, "a thought that is opened is closed"
    reasoning = ReasoningConfig()
    reasoning._reasoning_start_token_ids = [budgets.opening]
    reasoning._reasoning_end_token_ids = list(budgets.closing)
    reasoning._natural_reasoning_end_token_ids = list(budgets.delimiter)
    return reasoning


def _return_routes_anew(engine: LLMEngine) -> None:
    """Let vLLM return the experts of all tokens of a request again after it has recomputed their keys and values,
    which is after a push or a preemption: later tokens see these, and not the keys and values of the older weights.
    vLLM would return only what it has not returned before."""
    connector = engine.engine_core.engine_core.scheduler.aux_output_connector
    build = connector.build_connector_meta

    def build_from_the_start(*arguments: Any) -> AuxOutputConnectorMetadata:
        metadata = build(*arguments)
        metadata.requests = dict.fromkeys(metadata.requests, 0)
        return metadata

    connector.build_connector_meta = build_from_the_start


def _record_steps(engine: LLMEngine, progress: Progress) -> None:
    """Record the tokens of every step, because vLLM returns only the tokens of finished requests."""
    core = engine.engine_core
    get_output = core.get_output

    def get_and_record() -> EngineCoreOutputs:
        outputs = get_output()
        progress.write(outputs)
        return outputs

    core.get_output = get_and_record
