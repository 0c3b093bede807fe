"""TRL's tests of its GRPOTrainer, each as the arguments that it is about (megatron_rl/trl/coverage.py names them)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import given
from given import lora, model, scorer, tokenizer, wrapped
from transformers import BitsAndBytesConfig


@dataclass(frozen=True)
class Case:
    test: str
    args: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    """What the trainer gets in the place of the usual. A callable of `lazy` is called first."""
    of: str = ""
    """Which of the test's cases it is."""
    refused: str = ""
    """What the error says, where TRL's test expects one, or where megatron_rl.trl.coverage says that it is refused."""


LAZY = ("model", "processing_class", "peft_config", "train_dataset", "eval_dataset", "reward_processing_classes")
EVAL = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3}
KEEPS = {"eval_dataset": given.few}
Q_V = ["q_proj", "v_proj"]
FAMILY = "model_type .* is not supported"


def sets(kind: str) -> Callable[[], Any]:
    def make() -> Any:
        from datasets import DatasetDict, IterableDatasetDict

        rows = given.few().to_iterable_dataset() if "iterable" in kind else given.few()
        several = {"first": rows, "second": rows}
        return {
            "dataset_dict": DatasetDict if "iterable" not in kind else IterableDatasetDict,
            "iterable_dataset_dict": IterableDatasetDict,
            "dict": dict,
            "iterable_dict": dict,
        }.get(kind, lambda _: rows)(several)

    return make


def _case(test: str, args: dict[str, Any] | None = None, of: str = "", refused: str = "", **others: Any) -> Case:
    return Case(test, args or {}, others, of, refused)


MODELS = [
    *(
        _case("train", of=name, model=name)
        for name in ("qwen2", "qwen3moe", "gptoss", "glm4moe", "gemma3", "nemotronh")
    ),
    _case("train", of="minimaxm2", model="minimaxm2", refused="no sigmoid router without groups of experts"),
    _case("train", of="cohere2", model="cohere2", refused=FAMILY),
    _case("init_minimal", {}),
    *(_case("train_dataset_format", of=n, train_dataset=r) for n, r in (("text", given.texts), ("chat", given.chats))),
    _case("train_with_iterable_dataset", {"max_steps": 4}, train_dataset=lambda: given.texts().to_iterable_dataset()),
    *(
        _case("init_with_eval_dataset", of=kind, eval_dataset=sets(kind))
        for kind in ("dataset", "iterable", "dataset_dict", "iterable_dataset_dict", "dict", "iterable_dict")
    ),
    _case(
        "iterable_dataset_requires_dispatch_batches_false",
        {"accelerator_config": {"dispatch_batches": True}},
        train_dataset=lambda: given.texts().to_iterable_dataset(),
        refused="iterable train_dataset",
    ),
    _case(
        "iterable_dataset_forces_num_workers_zero",
        {"dataloader_num_workers": 4, "max_steps": 1},
        train_dataset=lambda: given.texts().to_iterable_dataset(),
    ),
    _case("iterable_eval_keeps_map_style_train_workers", {"dataloader_num_workers": 4}, eval_dataset=sets("iterable")),
    _case("train_multiple_dataloader_workers", {"dataloader_num_workers": 2}),
    _case("dataset_required_without_environment", train_dataset=None, refused="train_dataset is missing"),
    _case(
        "train_with_chat_template_kwargs",
        {"chat_template_kwargs": {"enable_thinking": False}},
        train_dataset=given.chats,
        model="qwen3",
    ),
    _case("train_with_pad_to_multiple_of", {"pad_to_multiple_of": 8}),
    _case("train_with_eval", EVAL, **KEEPS),
    _case("train_with_num_generations_eval", EVAL | {"num_generations_eval": 1}, **KEEPS),
    _case("train_eval_on_start", EVAL | {"loss_type": "grpo", "eval_on_start": True}, **KEEPS),
    _case("trust_remote_code", {"trust_remote_code": True}, refused="the code of a model folder is not run"),
    _case("train_with_cast_lm_head_to_fp32", {"cast_lm_head_to_fp32": True}),
    _case("train_with_sync_ref_model", {"beta": 0.1, "sync_ref_model": True}, refused="sync_ref_model=True"),
    _case("vlm_training", quantization_config=BitsAndBytesConfig(load_in_4bit=True), refused="quantization_config"),
    _case("train_with_liger_grpo_kernel", {"use_liger_kernel": True}, of="llama", model="llama", **KEEPS),
    _case("train_with_liger_grpo_kernel", {"use_liger_kernel": True}, of="mistral", model="mistral", **KEEPS),
    _case("liger_grpo_kernel_importance_sampling", {"use_liger_kernel": True, "importance_sampling_level": "sequence"}),
    _case(
        "train_with_transformers_continuous_batching",
        {"use_transformers_continuous_batching": True},
        model=model("llama"),
    ),
    _case("train_vllm", {"use_vllm": True}),
]
IMAGES = [
    *(
        _case(test, args, model="qwen3vl", train_dataset=given.pictures, reward_funcs=given.length)
        for test, args in (
            ("train_vlm", {}),
            ("train_vlm_beta_non_zero", {"beta": 0.1}),
            ("train_vlm_importance_sampling", {"steps_per_generation": 2}),
            ("train_vlm_vllm", {"use_vllm": True}),
            ("vlm_processor_vllm_colocate_mode", {"use_vllm": True, "vllm_mode": "colocate"}),
        )
    ),
    *(
        _case(test, {}, model="qwen3vl", train_dataset=rows, reward_funcs=given.length)
        for test, rows in (
            ("train_vlm_multi_image", lambda: given.pictures("images", (2, 1, 2, 1))),
            ("train_vlm_text_only", given.chats),
            ("train_vlm_mixed", lambda: given.pictures("image", (0, 1, 0, 1))),
        )
    ),
    _case("train_vlm_peft", {}, model="qwen3vl", train_dataset=given.pictures, peft_config=lora(target_modules=Q_V)),
]
LOSSES = [
    *(
        _case("train_loss_types", {"loss_type": kind, "gradient_accumulation_steps": 2}, of=kind)
        for kind in ("bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")
    ),
    _case("train_loss_types", {"loss_type": "luspo", "importance_sampling_level": "sequence"}, of="luspo"),
    _case("train_beta_non_zero", {"beta": 0.1}),
    _case("train_with_bias_correction_kl", {"beta": 0.1, "use_bias_correction_kl": True}),
    _case("train_delta_clipping", {"delta": 2.0}),
    _case("train_with_off_policy_mask", {"off_policy_mask_threshold": 0.5}),
    _case("train_with_off_policy_mask_with_liger", {"off_policy_mask_threshold": 0.5, "use_liger_kernel": True}),
    _case("train_normalize_then_sum_aggregation", {"multi_objective_aggregation": "normalize_then_sum"}),
    *(_case("train_scale_rewards", {"scale_rewards": s}, of=str(s)) for s in (False, "group", "batch", True, "none")),
    _case("train_num_generations_larger_than_batch_size", {"num_generations": 6, "gradient_accumulation_steps": 2}),
    _case("train_with_mask_truncated_completions", {"mask_truncated_completions": True}),
    _case(
        "train_with_mask_truncated_completions_all_masked",
        {"mask_truncated_completions": True, "max_completion_length": 2},
    ),
    _case("train_with_entropy_filter", {"top_entropy_quantile": 0.2}),
    _case("train_with_static_entropy", {"entropy_coef": 0.1}),
    _case("train_with_adaptive_entropy", {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 15.0}),
    _case(
        "train_with_adaptive_entropy_gradient_accumulation",
        {"entropy_coef": 0.01, "use_adaptive_entropy": True, "gradient_accumulation_steps": 2},
    ),
    *(_case("entropy_bonus_scale", {"entropy_coef": 0.5, "loss_type": kind}, of=kind) for kind in ("grpo", "dr_grpo")),
    *(
        _case(
            "warning_raised_sequence_level_with_token_summed_loss",
            {"importance_sampling_level": "sequence", "loss_type": kind},
            of=kind,
        )
        for kind in ("grpo", "bnpo", "dr_grpo", "dapo")
    ),
    *(
        _case(
            "train_vllm_importance_sampling_correction",
            {
                "use_vllm": True,
                "vllm_importance_sampling_clip_min": low,
                "vllm_importance_sampling_clip_max": high,
            },
            of=f"{low}-{high}",
        )
        for low, high in ((None, 3.0), (0.5, None), (0.5, 5.0))
    ),
    _case("train_multiple_iterations", {"num_iterations": 2}),
    _case("train_sequence_importance_sampling", {"num_iterations": 2, "importance_sampling_level": "sequence"}),
    _case("prepare_input_called_with_correct_data", {"shuffle_dataset": False, "num_iterations": 2}),
    *(
        _case(
            test, {"top_p": 0.9, "top_k": 10, "min_p": 0.01, "repetition_penalty": 1.1}, refused="top_p=0.9, top_k=10"
        )
        for test in ("train_with_additional_generation_kwargs", "train_vllm_with_additional_generation_kwargs")
    ),
    _case("train_with_generation_kwargs", {"generation_kwargs": {"num_beams": 2}}, refused="generation_kwargs"),
    _case("train_vllm_structured_outputs", {"vllm_structured_outputs_regex": "a+"}, refused="by a grammar"),
]
REWARDS = [
    _case(
        "train_different_reward_model",
        reward_funcs=scorer("scorer_llama"),
        reward_processing_classes=tokenizer("scorer_llama"),
        train_dataset=given.chats,
    ),
    _case("train_reward_func_standard", reward_funcs=given.length),
    _case("train_reward_func_conversational", reward_funcs=given.words, train_dataset=given.chats),
    _case("train_multiple_reward_funcs", reward_funcs=[given.length, given.distinct]),
    _case("train_sync_and_async_reward_funcs", reward_funcs=[given.length, given.distinct, given.slow]),
    _case("train_multiple_reward_funcs_with_None_output", reward_funcs=[given.length, given.abstains]),
    _case(
        "train_multiple_reward_funcs_with_weights",
        {"reward_weights": [0.7, 0.3]},
        reward_funcs=[given.length, given.distinct],
    ),
    _case(
        "reward_metric_reflects_reward_weights",
        {"reward_weights": [0.7, 0.3], "multi_objective_aggregation": "normalize_then_sum"},
        reward_funcs=[given.length, given.distinct],
    ),
    _case("train_multiple_mixed_reward_funcs", reward_funcs=[given.length, "scorer"]),
    _case("train_reward_func_additional_column", reward_funcs=given.near),
    _case("warning_raised_all_rewards_none", reward_funcs=given.abstains),
    *(
        _case(test, reward_funcs=given.reports)
        for test in (
            "train_with_reward_func_accessing_trainer_state",
            "train_reward_func_with_log_extra",
            "train_reward_func_with_log_metric",
        )
    ),
    _case("no_reward_source_raises", reward_funcs=None, refused="reward_funcs is empty"),
    _case(
        "mismatched_reward_processing_classes_length",
        reward_funcs=["scorer", "scorer_llama"],
        reward_processing_classes=tokenizer("scorer"),
        refused="reward_processing_classes has 1 entries for 2 reward_funcs",
    ),
    _case(
        "correct_reward_processing_classes_list",
        reward_funcs=["scorer", "scorer_llama"],
        reward_processing_classes=lambda: [tokenizer("scorer")(), tokenizer("scorer_llama")()],
    ),
    _case("single_reward_model_with_single_processing_class", reward_processing_classes=tokenizer("scorer")),
]
ADAPTERS = [
    _case("train_peft_config", model=model(), peft_config=lora()),
    _case("train_peft_model", model=wrapped()),
    _case("train_peft_model", model=wrapped(target_modules="all-linear"), of="all-linear"),
    _case(
        "train_peft_with_gradient_checkpointing",
        {"gradient_checkpointing": True},
        model=model(),
        peft_config=lora(target_modules="all-linear"),
    ),
    _case(
        "liger_kernel_with_peft_lm_head_raises",
        model=model(),
        peft_config=lora(target_modules=[*Q_V, "lm_head"]),
        refused="lm_head",
    ),
    _case(
        "liger_kernel_with_peft_non_lm_head_target_allowed",
        {"use_liger_kernel": True},
        model=model(),
        peft_config=lora(target_modules=Q_V),
    ),
    _case(
        "liger_kernel_with_peft_prompt_learning_raises",
        peft_config=given.prompt_tuning,
        refused="PromptTuningConfig is no LoraConfig",
    ),
    _case(
        "train_with_liger_grpo_kernel_and_peft",
        {"use_liger_kernel": True},
        model=model("llama"),
        processing_class=tokenizer("llama"),
        peft_config=lora(task_type="CAUSAL_LM", r=8, lora_alpha=32, lora_dropout=0.1, target_modules=Q_V),
    ),
    _case(
        "liger_kernel_with_peft_modules_to_save_lm_head_allowed",
        peft_config=lora(target_modules=Q_V, modules_to_save=["lm_head"]),
        refused="modules_to_save",
    ),
    _case(
        "train_vllm_and_peft",
        {"use_vllm": True},
        peft_config=lora(target_modules="all-linear", modules_to_save=["embed_tokens", "lm_head"]),
        refused="modules_to_save",
    ),
    _case(
        "train_moe_peft_model",
        model=wrapped("gptoss", target_parameters=["mlp.experts.down_proj"]),
        refused="target_parameters",
    ),
]
TOOLS = {"model": "qwen3moe", "train_dataset": given.chats, "reward_funcs": given.words}
OWNED = {"model": "qwen3moe", "train_dataset": None, "reward_funcs": given.words}
FEW = {"max_steps": 5}
ENVIRONMENTS = [
    *(
        _case(test, {"max_completion_length": 128}, tools=[tool], **TOOLS)
        for test, tool in (
            ("train_with_tools", given.add),
            ("train_with_tools_async", given.add_slowly),
            ("train_with_malformed_tool_calls", given.add),
        )
    ),
    _case(
        "train_with_tools_multimodal_response",
        {"max_completion_length": 64},
        tools=[given.photograph],
        **TOOLS | {"model": "qwen3vl"},
    ),
    _case(
        "train_with_multiple_environments",
        {"shuffle_dataset": False},
        environment_factory={"counter": given.Counter, "words": given.Words},
        **TOOLS | {"train_dataset": given.of_environments("counter", "words")},
    ),
    _case(
        "train_with_unknown_environment_raises",
        environment_factory={"counter": given.Counter},
        refused="environment='unknown', which is not among the environments",
        **TOOLS | {"train_dataset": given.of_environments("unknown")},
    ),
    _case("train_with_environment_factory", FEW, environment_factory=given.Counter, **OWNED),
    _case(
        "train_with_environment_owned_reward",
        FEW,
        environment_factory=given.Scored,
        **OWNED | {"reward_funcs": None},
    ),
    _case(
        "environment_owned_reward_coexists_with_reward_funcs",
        FEW | {"reward_weights": [0.5]},
        environment_factory=lambda: given.Scored(),
        **OWNED,
    ),
    _case(
        "environment_owned_reward_mixed_environments",
        environment_factory={"scored": given.Scored, "scored2": given.Scored, "plain": given.Words},
        **TOOLS | {"train_dataset": given.of_environments("scored", "scored2", "plain")},
    ),
    _case(
        "environment_owned_data_requires_max_steps",
        environment_factory=given.Words,
        refused="the length of the training is max_steps",
        **OWNED,
    ),
    _case(
        "multiple_environments_without_dataset_raises",
        {"max_steps": 1},
        environment_factory={"a": given.Counter, "b": given.Words},
        refused="requires a train_dataset",
        **OWNED,
    ),
    _case("train_with_environment_owned_data", FEW, environment_factory=given.Words, **OWNED),
]
OTHERS = [_case("generate_prefers_rollout_func", rollout_func=given.length, refused="rollout_func")]
CASES = [*MODELS, *IMAGES, *LOSSES, *REWARDS, *ADAPTERS, *ENVIRONMENTS, *OTHERS]
