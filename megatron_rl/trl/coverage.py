"""What becomes of TRL's own tests of GRPOTrainer and of public scripts. tests/doors runs each of them as a dry run.

A test has TRL's meaning if its arguments are mapped, or if it expects an error and gets one about the same. Names are
from TRL's repository, from the summer before release 1.16; the wheel has no tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

VERSIONS = {"trl": "1.16.0", "peft": "0.21.2", "datasets": "5.2.0"}
Verdict = Literal["the same", "different", "refused", "internal"]


@dataclass(frozen=True, slots=True)
class TestGroup:
    """Tests with one verdict."""

    says: str
    verdict: Verdict
    tests: tuple[str, ...]


TABLE = """
the same: families, rows, iterables and loaders
    init_minimal train train_dataset_format train_with_iterable_dataset init_with_eval_dataset
    iterable_dataset_requires_dispatch_batches_false iterable_dataset_forces_num_workers_zero
    iterable_eval_keeps_map_style_train_workers train_multiple_dataloader_workers
    dataset_required_without_environment train_with_chat_template_kwargs train_with_pad_to_multiple_of
the same: evaluations
    train_with_eval train_with_num_generations_eval train_eval_on_start evaluate_with_eval_dataset
the same: losses, and what is added to them
    train_loss_types train_beta_non_zero train_with_bias_correction_kl train_delta_clipping
    train_with_off_policy_mask train_with_off_policy_mask_with_liger get_off_policy_mask get_off_policy_mask_padding
    train_normalize_then_sum_aggregation train_scale_rewards train_num_generations_larger_than_batch_size
    train_with_mask_truncated_completions train_with_mask_truncated_completions_all_masked train_with_entropy_filter
    train_with_static_entropy train_with_adaptive_entropy train_with_adaptive_entropy_gradient_accumulation
    entropy_bonus_scale warning_raised_sequence_level_with_token_summed_loss
the same: tokens of high entropy, by the quantile
    compute_entropy_mask_0 compute_entropy_mask_1 compute_entropy_mask_lower_threshold
    compute_entropy_mask_threshold_0 compute_entropy_mask_threshold_1 compute_entropy_mask_all_masked
the same: reward functions and reward models
    train_different_reward_model train_reward_func_standard train_reward_func_conversational
    train_multiple_reward_funcs train_sync_and_async_reward_funcs train_multiple_reward_funcs_with_None_output
    train_multiple_reward_funcs_with_weights reward_metric_reflects_reward_weights train_multiple_mixed_reward_funcs
    train_reward_func_additional_column warning_raised_all_rewards_none
    train_with_reward_func_accessing_trainer_state train_reward_func_with_log_extra
    train_reward_func_with_log_metric no_reward_source_raises mismatched_reward_processing_classes_length
    correct_reward_processing_classes_list single_reward_model_with_single_processing_class
the same: adapters of PEFT
    train_peft_config train_peft_model train_peft_with_gradient_checkpointing liger_kernel_with_peft_lm_head_raises
    liger_kernel_with_peft_non_lm_head_target_allowed liger_kernel_with_peft_prompt_learning_raises
different: dropout of adapters, which is left out with a warning
    train_with_liger_grpo_kernel_and_peft
the same: vLLM, kernels and other engines
    train_vllm train_vllm_importance_sampling_correction train_with_liger_grpo_kernel train_with_cast_lm_head_to_fp32
    liger_grpo_kernel_importance_sampling train_with_transformers_continuous_batching
the same: functions as tools
    train_with_tools train_with_tools_async train_with_malformed_tool_calls train_with_tools_multimodal_response
the same: objects whose methods are tools: `environment_factory`
    train_with_multiple_environments train_with_unknown_environment_raises train_with_environment_factory
    train_with_environment_owned_reward environment_owned_reward_coexists_with_reward_funcs
    environment_owned_reward_mixed_environments train_with_environment_owned_data
    environment_owned_data_requires_max_steps multiple_environments_without_dataset_raises
refused: a rollout of one's own, `rollout_func`
    generate_prefers_rollout_func rollout_func_dispatch rollout_func_fields
the same: images, with a trained vision tower
    train_vlm train_vlm_beta_non_zero train_vlm_importance_sampling train_vlm_vllm train_vlm_multi_image
    train_vlm_text_only train_vlm_mixed vlm_processor_vllm_colocate_mode
the same: images, with adapters of the text model
    train_vlm_peft
refused: images in four bits
    vlm_training
the same: several passes over the same answers, `num_iterations`
    train_multiple_iterations train_sequence_importance_sampling prepare_input_called_with_correct_data
refused: scripts that sample from a changed distribution: top_p, beams, a grammar
    train_with_additional_generation_kwargs train_vllm_with_additional_generation_kwargs
    train_with_generation_kwargs train_vllm_structured_outputs
refused: other weights than the adapters' that train, or adapters on single parameters
    liger_kernel_with_peft_modules_to_save_lm_head_allowed train_vllm_and_peft train_moe_peft_model
refused: code in a model's folder, a reference that moves
    trust_remote_code train_with_sync_ref_model
internal: parts of TRL's own classes and of transformers
    continuous_batching_contract_1 continuous_batching_contract_2 continuous_batching_contract_3
    continuous_batching_contract_4 compute_liger_loss_passes_vllm_is_ratio entropy_bonus_flows_gradients
"""
"""A verdict and what the tests are about, and below it their names."""

CASES_REFUSED: Mapping[str, tuple[str, ...]] = {
    "train": ("cohere2",),
}
"""Cases that are refused of tests whose other cases have TRL's meaning."""

SCRIPTS: Mapping[str, tuple[bool, str]] = {
    "TRL's quick start, with its accuracy_reward": (True, ""),
    "TRL's first documentation page, reward_len": (True, ""),
    "a demonstration with max_prompt_length": (True, ""),
    "the GSM8K demonstration, four answers a step": (
        False,
        "an optimizer step has fewer answers than a group: set gradient_accumulation_steps to 8",
    ),
    "Unsloth's notebook for 3B": (True, "without its own imports"),
    "a script of Unsloth's form with 8-bit Adam": (True, "likewise"),
    "GSM8K with LoRA and dropout": (True, "without dropout, as a warning says"),
    "open-r1's grpo.py with a recipe": (True, ""),
    "Countdown with a YAML file": (True, ""),
    "the cookbook's LoRA run": (True, "likewise"),
    "the course's PEFT model": (True, ""),
    "TRL's notebook in four bits": (False, "quantization_config: policy.lora.base is fp8 or nothing"),
}
"""The public scripts: whether the dry run passes, and a note."""


def _groups() -> Iterator[TestGroup]:
    for part in re.split(r"\n(?=\w)", TABLE.strip()):
        head, *names = part.split("\n")
        verdict, _, says = head.partition(": ")
        yield TestGroup(says, cast("Verdict", verdict), tuple(" ".join(names).split()))


TESTS = tuple(_groups())


def numbers() -> dict[Verdict, int]:
    """How many tests have each verdict."""
    found: dict[Verdict, int] = dict.fromkeys(get_args(Verdict), 0)
    for group in TESTS:
        found[group.verdict] += len(group.tests)
    return found
