"""Makes vLLM's configuration for CUDA from our options, and builds its CUDA classes on meta, without a GPU.

    python tests/gpu_set/vllm_classes.py configure                 # from all recipes
    python tests/gpu_set/vllm_classes.py record FAMILY '{"tensor": 2, "expert": 2}' ...

vLLM's constructors and loaders are the real ones. What torch.cuda says is faked (faked.py), and its collectives do
nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faked
import torch
import torch.distributed as dist

from megatron_rl.config.load import load_config
from megatron_rl.config.policy import ModelConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.layout import Recording
from megatron_rl.models import FAMILIES, read_shape, vllm_shards
from megatron_rl.planning.engine import step_tokens
from megatron_rl.rollout.backend import EngineSpec

ROOT = Path(__file__).parents[2]
BASE = {
    "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 512, "vocab_size": 512, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "rope_theta": 1e6,
    "bos_token_id": 0, "eos_token_id": 1, "attention_bias": False,
}  # fmt: skip


def published(name: str, architecture: str, **smaller: Any) -> dict[str, Any]:
    """A published config.json with fewer layers and smaller sizes."""
    config = json.loads((ROOT / "configs" / "model" / f"{name}.json").read_text())
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
    own = {"architectures": [architecture], "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}
    return config | {key: BASE[key] for key in sizes} | own | smaller


GROUPED = {"num_key_value_heads": 4, "head_dim": 64, "num_experts_per_tok": 2}
LATENT = {"num_key_value_heads": 8, "q_lora_rank": 128, "kv_lora_rank": 512, "num_experts_per_tok": 2}
SIGMOID = {"n_routed_experts": 16, "moe_intermediate_size": 256, "first_k_dense_replace": 1}
DELTA = {
    "num_experts": 16, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
    "linear_num_key_heads": 8, "linear_num_value_heads": 16,
}  # fmt: skip
MODELS = {
    "llama": BASE | {"architectures": ["LlamaForCausalLM"]},
    "qwen2": BASE | {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": BASE | {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": BASE | {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "mixtral": BASE | {
        "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "deepseek_v3": {key: value for key, value in BASE.items() if key != "head_dim"} | {
        "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 8, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.5, "q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1,
    },
    "kimi_k2": published("Kimi-K2-Instruct", "DeepseekV3ForCausalLM", **LATENT, **SIGMOID),
    "glm4_moe_lite": published("GLM-4.7-Flash", "Glm4MoeLiteForCausalLM", **LATENT, **SIGMOID),
    "glm4_moe": published("GLM-4.6", "Glm4MoeForCausalLM", **GROUPED, **SIGMOID),
    "gpt_oss": published("gpt-oss-120b", "GptOssForCausalLM", **GROUPED, num_local_experts=16),
    "qwen3_next": published("Qwen3-Next-80B-A3B-Instruct", "Qwen3NextForCausalLM", **GROUPED, **DELTA),
    "qwen3_5_moe_text": published("Qwen3.5-35B-A3B-text", "Qwen3_5MoeForCausalLM", **GROUPED, **DELTA),
    "olmo3": published("Olmo-3-32B-Think-DPO", "Olmo3ForCausalLM", num_key_value_heads=4),
}  # fmt: skip
"""Small models whose sizes vLLM's kernels accept: its fp8 pads a router of fewer than 16 experts, and then fails."""


ARCHITECTURES = {name: family.vllm_model for name, family in FAMILIES.items()} | {"olmo3": "Olmo3ForCausalLM"}
"""What published folders name, and configs/model leaves out. vLLM runs OLMo with its class for transformers' models."""
NUM_GPUS = 8
"""The GPUs of a node."""


class _Made(Exception):
    """The configuration is made, and no engine starts."""


def configuration(folder: Path, rollout: RolloutConfig, **spec: Any) -> Any:
    """The VllmConfig that an engine of a run would have."""
    import vllm.v1.engine.llm_engine as llm_engine

    from megatron_rl.rollout.start import make_engine

    made: list[Any] = []

    def instead(config: Any, *_: Any, **__: Any) -> None:
        made.append(config)
        raise _Made

    real, llm_engine.LLMEngine = llm_engine.LLMEngine, instead
    try:
        make_engine(EngineSpec(ModelConfig(path=folder, dtype="bfloat16"), rollout, 0, **spec), None)
    except _Made:
        pass
    finally:
        llm_engine.LLMEngine = real
    return made[0]


def folder_of(name: str, model: dict[str, Any], home: Path) -> Path:
    folder = home / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": name, **model}))
    return folder


def configure(home: Path) -> dict[str, dict[str, Any]]:
    """For each recipe that names a model of configs/model: what vLLM has made of its options."""
    found = {}
    for recipe in sorted((ROOT / "recipes").rglob("*.yaml")):
        config = load_config(
            GrpoRunConfig, [str(recipe), f"data.train={ROOT}/recipes/tiny/data/gsm8k_train_sample.jsonl"]
        )
        file = ROOT / "configs" / "model" / f"{config.model.path.name}.json"
        if not file.is_file():
            continue
        folder = home / recipe.stem
        folder.mkdir()
        sizes = json.loads(file.read_text())
        (folder / "config.json").write_text(json.dumps(sizes | {"architectures": [ARCHITECTURES[sizes["model_type"]]]}))
        spec = {
            "shares_gpus": config.cluster.colocate,
            "returns_routes": config.policy.routing_replay,
            "spans_nodes": config.rollout.engine_ranks > NUM_GPUS,
        }
        made = configuration(folder, config.rollout, **spec)
        parallel, scheduler = made.parallel_config, made.scheduler_config
        found[recipe.stem] = {
            "wanted": [
                config.rollout.parallel.tensor,
                config.rollout.parallel.pipeline,
                config.rollout.max_sequences,
                config.cluster.colocate,
            ],
            "made": [
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                scheduler.max_num_seqs,
                made.model_config.enable_sleep_mode,
            ],
            "quantization": [config.rollout.quantization, made.model_config.quantization],
            "routes": [config.policy.routing_replay, made.aux_output_config.enable_return_routed_experts],
            "tokens": [step_tokens(config), scheduler.max_num_batched_tokens],
            "transfer": made.weight_transfer_config.backend,
            "logprobs": made.model_config.logprobs_mode,
            "graphs": made.compilation_config.cudagraph_mode.name,
            "eager": made.model_config.enforce_eager,
        }
    return found


@contextmanager
def rank_of(config: Any, rank: int) -> Iterator[None]:
    """Be one rank of vLLM's world."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.models.utils import _model_to_pp_missing_layer_names as absent_layers_by_id

    parallel = config.parallel_config
    world = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    faked.join(rank, world)
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(world, rank, local_rank=rank, backend="fake")
        parallel_state.initialize_model_parallel(
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size, backend="fake"
        )
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    absent_layers_by_id.clear()  # vLLM keys it by id(model), which the next model of this process can have too


def loaded(config: Any) -> Any:
    """A quantised model with weights: vLLM quantises while it loads, so that only then its layers have their form."""
    from vllm.model_executor.model_loader import get_model_loader

    def of_tensor(out: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shape: Any = None) -> None:
        out.copy_((weight.float() / scale).to(out.dtype))

    def of_rows(out: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, most: Any = None) -> None:
        scale.copy_(weight.float().abs().amax(-1, keepdim=True) / torch.finfo(out.dtype).max)
        of_tensor(out, weight, scale)

    kernels = torch.library.Library("_C", "IMPL", "CPU")  # in the place of vLLM's, for CUDA
    kernels.impl("static_scaled_fp8_quant", of_tensor)
    kernels.impl("dynamic_per_token_scaled_fp8_quant", of_rows)
    config.device_config.device = config.load_config.device = torch.device("cpu")
    return get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)


def built(config: Any) -> Any:
    """A model without weights of its own."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import initialize_model

    torch.set_default_dtype(torch.bfloat16)
    with faked.CudaMeansCpu():
        model = initialize_model(config)
    torch.set_default_dtype(torch.float32)
    record_metadata_for_reloading(model)
    return model


def record(name: str, options: dict[str, Any], home: Path) -> dict[str, Any]:
    """The recordings of all ranks of an engine against the family's table."""
    from megatron_rl.bridge import model_parameters
    from megatron_rl.bridge.vllm_loaders import record_loading

    folder = folder_of(name, MODELS[name], home)
    axes = {name: value for name, value in options.items() if name != "quantization"}
    quantization = options.get("quantization")
    rollout = RolloutConfig(parallel=axes, quantization=quantization, max_prompt_tokens=512, max_response_tokens=512)
    shape = read_shape(folder)
    found: dict[str, Any] = {"differing": [], "classes": set(), "repacked": set()}
    for rank in range(rollout.engine_ranks):
        config = configuration(folder, rollout)  # a model notes its layers there
        with rank_of(config, rank):
            model = loaded(config) if rollout.quantization else built(config)
            recorded = record_loading(model, shape, torch.bfloat16)
            shards = vllm_shards(
                shape, rollout.parallel.tensor, rank, rollout.parallel.expert_parallel, rollout.parallel.pipeline
            )
            table = Recording.of(shards, FAMILIES[shape.family])
            differing = {repr(shard) for shard in recorded.shards} ^ {repr(shard) for shard in table.shards}
            found["differing"] += sorted(differing)
            found["repacked"] |= {key for key, *_ in model_parameters.repacked_layers(model)}
            found["classes"] |= {type(module.impl).__name__ for module in model.modules() if hasattr(module, "impl")}
    shutil.rmtree(folder)
    return {key: sorted(value) for key, value in found.items()}


def pretend(home: Path) -> None:
    """Let vLLM choose its CUDA platform, and groups whose collectives do nothing."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    faked.load_driver(home)
    faked.pretend()
    import vllm.platforms
    from vllm.distributed import parallel_state
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    platforms: Any = vllm.platforms
    platforms._current_platform = NonNvmlCudaPlatform()
    NonNvmlCudaPlatform.device_count = lambda *_: NUM_GPUS
    base = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    NonNvmlCudaPlatform.get_device_communicator_cls = lambda *_: base  # the other one joins NCCL
    new_group, new_vllm_group = dist.new_group, parallel_state.init_model_parallel_group
    dist.new_group = lambda ranks=None, *_, **__: new_group(ranks, backend="fake")
    # A queue in shared memory would wait for the other ranks.
    parallel_state.init_model_parallel_group = lambda *arguments, use_message_queue_broadcaster=False, **others: (
        new_vllm_group(*arguments, **others)
    )


def main() -> None:
    what, *arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as home:
        pretend(Path(home))
        if what == "configure":
            print(json.dumps(configure(Path(home))))
        else:
            family, *options = arguments
            print(json.dumps([record(family, json.loads(one), Path(home)) for one in options]))


if __name__ == "__main__":
    main()
