"""The arguments of vLLM that `rollout.vllm` must not set, and why.

Invariant (tests/unit/rollout): every argument that `rollout/start.py` sets for its own reasons is in the table, and
vLLM has every name of the table.
"""

from __future__ import annotations

from collections.abc import Iterable

ELSEWHERE = {
    **dict.fromkeys(("model", "tokenizer", "tokenizer_mode", "config_format"), "model.path"),
    **dict.fromkeys(("revision", "code_revision", "tokenizer_revision"), "model.path"),
    "dtype": "model.dtype",
    "seed": "run.seed",
    "quantization": "rollout.quantization",
    "tensor_parallel_size": "rollout.parallel.tensor",
    "pipeline_parallel_size": "rollout.parallel.pipeline",
    "data_parallel_size": "rollout.num_engines",
    "enable_expert_parallel": "rollout.parallel.expert",
    "max_model_len": "rollout.max_response_tokens",
    "max_num_seqs": "rollout.max_sequences",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.gpu_memory_utilization",
    "generation_config": "rollout.sampling",
    "override_generation_config": "rollout.sampling",
    "reasoning_config": "rollout.thinking",
    "max_logprobs": "rollout.beams",
    "enable_sleep_mode": "cluster.colocate",
    "enable_return_routed_experts": "policy.routing_replay",
    "aux_output_config": "policy.routing_replay",
    "enable_lora": "policy.lora",
    "max_lora_rank": "policy.lora.rank",
    "max_loras": "policy.lora",
    "lora_target_modules": "policy.lora.targets",
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), "rollout.speculative"),
}
"""The keys that set an argument, by its name."""

REFUSED = {
    "load_format": "the bridge brings the weights",
    "model_weights": "the bridge brings the weights",
    "weight_transfer_config": "the bridge brings the weights",
    "worker_cls": "the bridge is a part of each worker",
    "worker_extension_cls": "the bridge is a part of each worker",
    "skip_tokenizer_init": "engines get and return token ids",
    "logprobs_mode": "the trainer compares its log-probs with those of the distribution that tokens were sampled from",
    "distributed_executor_backend": "it follows from the number of ranks and nodes of an engine",
    **dict.fromkeys(
        ("prefill_context_parallel_size", "decode_context_parallel_size"),
        "the ranks of an engine are rollout.parallel.tensor x rollout.parallel.pipeline",
    ),
    **dict.fromkeys(
        ("enable_eplb", "enable_elastic_ep", "cpu_offload_gb", "offload_group_size"),
        "the weight sync writes each weight to the place on the GPU that it had when the engine started",
    ),
    **dict.fromkeys(
        ("kv_transfer_config", "kv_offloading_size"),
        "keys and values that are kept elsewhere would outlive the weights that computed them",
    ),
    **dict.fromkeys(
        ("logits_processors", "watermark_config"),
        "the trainer computes log-probs of the model's own distribution",
    ),
    **dict.fromkeys(
        ("hf_overrides", "hf_config_path"), "trainer and engine read the model's sizes from the same config.json"
    ),
    **dict.fromkeys(
        ("mm_device_do_normalize", "skip_mm_profiling", "mm_processor_cache_gb"),
        "engines get images as the patches that the trainer reads",
    ),
    "stream_interval": "each token has the version of the weights of its own step",
    "trust_remote_code": "no code of a model's folder is run",
    "hf_token": "the configuration is written into the run's folder",
}
"""The other arguments, with the reason."""


def refusals(names: Iterable[str]) -> list[str]:
    """One sentence for each argument that must not be set."""
    told = {name: f"{name} must not be set here: {reason}" for name, reason in REFUSED.items()}
    told |= {name: f"{name} must not be set here; {key} decides it" for name, key in ELSEWHERE.items()}
    return [told[name] for name in names if name in told]
