"""What an unknown key means that other projects have: which key of ours it is, or that the project lacks it."""

from __future__ import annotations

from collections.abc import Sequence

LACKS = "the project does not have {}"
KEYS = {
    **dict.fromkeys(("lora", "use_lora", "peft", "use_peft", "peft_config"), "adapters (LoRA) are policy.lora"),
    "qlora": "adapters are policy.lora, and policy.lora.base: fp8 quantises the weights below them",
    **dict.fromkeys(("lora_rank", "lora_r"), "the rank of adapters is policy.lora.rank"),
    "lora_alpha": "it is policy.lora.alpha",
    **dict.fromkeys(("target_modules", "lora_target_modules"), "layers with adapters are policy.lora.targets"),
    **dict.fromkeys(("adapter", "lora_adapter_path"), "a folder of adapters is policy.lora.start"),
    **dict.fromkeys(("fsdp", "fsdp_config", "fsdp2"), LACKS.format("FSDP: Megatron-Core shards with policy.parallel")),
    **dict.fromkeys(("deepspeed", "zero_stage"), LACKS.format("DeepSpeed: see policy.parallel and policy.optimizer")),
    **dict.fromkeys(("sglang", "backend", "engine"), LACKS.format("another engine than vLLM")),
    **dict.fromkeys(("muon", "optimizer_type"), "the kinds of optimizer are policy.optimizer.kind"),
    **dict.fromkeys(
        ("images", "multimodal", "multi_modal_data"), "images are in columns of the rows (`images`, `image`)"
    ),
    **dict.fromkeys(("learning_rate", "lr"), "the learning rate is policy.optimizer.lr"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "clip_grad"), "it is policy.optimizer.clip_grad"),
    **dict.fromkeys(("beta", "kl_coef", "kl_loss_coef", "use_kl_loss"), "the KL is algorithm.kl.coefficient"),
    **dict.fromkeys(("entropy_coeff", "entropy_coef"), "it is algorithm.entropy.coefficient"),
    **dict.fromkeys(("num_generations", "n", "group_size"), "answers to a prompt are rollout.samples_per_prompt"),
    **dict.fromkeys(("train_batch_size", "batch_size"), "prompts of a step are rollout.prompts_per_step"),
    **dict.fromkeys(("ppo_mini_batch_size", "num_minibatches"), "mini-batches are algorithm.updates_per_step"),
    **dict.fromkeys(("num_iterations", "ppo_epochs", "mu"), "passes over a step's answers are algorithm.epochs"),
    **dict.fromkeys(("speculative", "speculative_config", "num_speculative_tokens"), "it is rollout.speculative"),
    **dict.fromkeys(("mtp", "mtp_num_layers", "multi_token_prediction"), "the multi-token head is policy.multi_token"),
    "draft_model": LACKS.format("a second model that drafts: see rollout.speculative"),
    **dict.fromkeys(("quantization", "load_in_4bit", "load_in_8bit"), "engines have rollout.quantization"),
    **dict.fromkeys(
        ("repetition_penalty", "min_p", "frequency_penalty", "presence_penalty"),
        LACKS.format("it, because the trainer would compute other log-probs than were sampled"),
    ),
    **dict.fromkeys(("max_completion_length", "response_length"), "it is rollout.max_response_tokens"),
    **dict.fromkeys(("max_prompt_length", "prompt_length"), "it is rollout.max_prompt_tokens"),
    **dict.fromkeys(("temperature", "top_p", "top_k"), "sampling is rollout.sampling"),
    **dict.fromkeys(("save_freq", "save_steps"), "it is checkpoint.every"),
    **dict.fromkeys(("eval_steps", "test_freq"), "it is eval.every"),
    **dict.fromkeys(("total_training_steps", "max_steps"), "it is run.steps"),
    **dict.fromkeys(("total_epochs", "num_train_epochs", "epochs"), "it is run.epochs"),
    **dict.fromkeys(("wandb", "report_to", "logger", "tensorboard", "mlflow"), "trackers are listed in observe"),
    **dict.fromkeys(("gradient_checkpointing", "recompute"), "it is model.recompute"),
    **dict.fromkeys(
        ("ref", "reference", "ref_model"), "a reference is kept if algorithm.kl is set or the loss is a2po"
    ),
    **dict.fromkeys(("model_name_or_path", "model_name"), "it is model.path"),
    **dict.fromkeys(("epsilon", "clip_ratio", "cliprange"), "clipping is algorithm.loss"),
}
"""The key's last name -> what to say. The keys that a sentence names exist (tests/unit/config)."""
AXES = {
    **dict.fromkeys(("tensor", "tp", "tensor_parallel_size", "tensor_model_parallel_size"), "tensor"),
    **dict.fromkeys(("pipeline", "pp", "pipeline_parallel_size", "pipeline_model_parallel_size"), "pipeline"),
    **dict.fromkeys(("context", "cp", "context_parallel_size"), "context"),
    **dict.fromkeys(("expert", "ep", "expert_parallel_size", "expert_model_parallel_size"), "expert"),
    "enable_expert_parallel": "expert",
}
"""What others call the sizes of `policy.parallel`, `critic.parallel` and `rollout.parallel`."""
OFFLINE = {name: f"megatron-rl {name.replace('_', '-')}" for name in ("sft", "dpo", "reward_model")}
FORMER: dict[tuple[str, ...], str] = {
    **{(name,): f"it is a section of `{command}`" for name, command in OFFLINE.items()},
    **dict.fromkeys(
        [("data",), ("rollout",), ("rewards",), ("algorithm",), ("eval",), ("teachers",)],
        "it is a section of `megatron-rl grpo` and `megatron-rl ppo`",
    ),
    ("critic",): "it is a section of `megatron-rl ppo`",
    ("rollout", "expert_parallel"): "it is rollout.parallel.expert now, the number of tensor ranks where it was true",
    ("sft", "epochs"): "it is run.epochs now",
    ("rollout", "thinking", "delimiter"): "it is rollout.delimiter now",
    ("critic", "ppo_epochs"): "it is critic.epochs",
    ("rollout", "speculative", "method"): "it is rollout.speculative.kind",
    ("rollout", "speculative", "num_speculative_tokens"): "it is rollout.speculative.tokens",
}
"""A key in its section -> what to say: sections of other commands, keys of an earlier version, and names with another
meaning there."""


def hint(section: Sequence[str], key: str) -> str | None:
    """What to say about an unknown key; None if nothing is known.

    >>> hint(["rollout"], "tensor_parallel_size")
    'it is rollout.parallel.tensor'
    """
    if (told := FORMER.get((*section, key))) is not None:
        return told
    if key in AXES and not (section and section[0] == "rollout" and AXES[key] == "context"):
        owner = section[0] if section and section[0] in ("critic", "rollout") else "policy"
        return f"it is {owner}.parallel.{AXES[key]}"
    return KEYS.get(key)
