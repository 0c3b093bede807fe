"""Every argument of TRL's configurations (1.16), and what becomes of it here.

Invariants (tests/unit/trl): the names are the same as in TRL; an argument that changes what is trained is mapped, or
refused by name if it differs from its default; none is ignored because nobody thought of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Treatment = Literal["mapped", "implied", "refused"]


@dataclass(frozen=True, slots=True)
class Argument:
    default: Any
    treatment: Treatment
    says: str
    """Mapped: our keys. Implied: why any value is right. Refused: why no other value than the default is."""


def _all(treatment: Treatment, says: str, **defaults: Any) -> dict[str, Argument]:
    return {name: Argument(default, treatment, says) for name, default in defaults.items()}


_BATCH = "rollout.prompts_per_step and algorithm.updates_per_step, by the sizes of TRL"
_SPEED = "a matter of speed or memory, which does not change what is trained"
_FILES = "the run's folder has all of it: metrics.jsonl, samples.jsonl, report.html"
_SERVER = "the run starts its own engines; sections `rollout` and `cluster` place them"
_LOADER = "rows are read once and tokenized before the run"
_EVALUATED = "evaluations are batched by the run"
_HUB = "the model is uploaded after the run, and by `trainer.push_to_hub()`"
_ROUTE = "the actor is Megatron's: tensor, pipeline and data parallelism are in `policy.parallel`"

_REFERENCE = "the reference policy keeps the weights of the start"

_SEQUENCE_MASK = (
    "`sequence_mask` rejects by the product of a sample's ratios, and weights by the ratio of each token, at most 2"
)

COMMON: Mapping[str, Argument] = {
    **_all("mapped", "run.folder and run.name", output_dir=None),
    **_all("mapped", "run.steps", max_steps=-1, num_train_epochs=3.0),
    **_all("mapped", "policy.optimizer.schedule and min_lr_ratio", lr_scheduler_type="linear"),
    **_all("mapped", "policy.optimizer.min_lr_ratio, from `min_lr_rate` or `min_lr`", lr_scheduler_kwargs=None),
    **_all(
        "mapped",
        "policy.optimizer.warmup_steps; below 1 a share of all steps. The n-th of w has the rate n / w, in TRL "
        "(n - 1) / w",
        warmup_steps=0,
    ),
    **_all(
        "mapped",
        "policy.optimizer.kind: adam, for all forms of AdamW; 8-bit and 4-bit states are fp32, with a warning",
        optim="adamw_torch_fused",
    ),
    **_all("mapped", "policy.optimizer.weight_decay", weight_decay=0.0),
    **_all("mapped", "policy.optimizer.betas", adam_beta1=0.9, adam_beta2=0.999),
    **_all("mapped", "policy.optimizer.eps", adam_epsilon=1e-8),
    **_all("mapped", "policy.optimizer.clip_grad", max_grad_norm=1.0),
    **_all("mapped", "model.dtype; None is `auto`", bf16=None),
    **_all("mapped", "model.dtype: float16", fp16=False),
    **_all("mapped", "model.recompute", gradient_checkpointing=True),
    **_all("mapped", "observe: wandb, tensorboard, mlflow; others are left out with a warning", report_to="none"),
    **_all(
        "mapped",
        "eval.every, `eval_every` of sft and dpo; without eval_steps it is logging_steps",
        eval_strategy="no",
        eval_steps=None,
    ),
    **_all("mapped", "how often is evaluated, if eval_steps is not given; all steps are logged", logging_steps=10),
    **_all("mapped", "checkpoint.every", save_strategy="steps", save_steps=500),
    **_all("mapped", "checkpoint.keep", save_total_limit=None),
    **_all("mapped", "run.seed", seed=42),
    **_all("mapped", "`train(resume_from_checkpoint=...)`", resume_from_checkpoint=None),
    **_all(
        "mapped", "model.dtype, from `dtype` or `torch_dtype`, and `revision` of a hub's name", model_init_kwargs=None
    ),
    **_all("mapped", "policy.load_balancing_loss, of each layer; None is 0", router_aux_loss_coef=None),
    **_all("implied", "rows are packed without padding", pad_to_multiple_of="auto"),
    **_all("implied", "every token counts once, over all ranks", average_tokens_across_devices=True),
    **_all("implied", _SPEED, tf32=None, torch_compile=False, torch_compile_backend=None, torch_compile_mode=None),
    **_all("implied", _SPEED, use_liger_kernel=False, liger_kernel_config=None, use_cache=False),
    **_all("implied", _SPEED, gradient_checkpointing_kwargs=None, torch_empty_cache_steps=None),
    **_all("implied", _SPEED, auto_find_batch_size=False, bf16_full_eval=False, fp16_full_eval=False),
    **_all("implied", _FILES, logging_strategy="steps", logging_first_step=False),
    **_all("implied", _FILES, log_on_each_node=True, logging_nan_inf_filter=True),
    **_all("implied", _FILES, include_num_input_tokens_seen="no", log_level="passive"),
    **_all("implied", _FILES, log_level_replica="warning", disable_tqdm=None, run_name=None, project="huggingface"),
    **_all("implied", _FILES, skip_memory_metrics=True),
    **_all("implied", _FILES, debug="", eval_on_start=False, eval_delay=0),
    **_all("implied", _EVALUATED, per_device_eval_batch_size=8, eval_accumulation_steps=None),
    **_all("implied", _EVALUATED, eval_do_concat_batches=True, eval_use_gather_object=False),
    **_all("implied", _EVALUATED, prediction_loss_only=False, batch_eval_metrics=False),
    **_all("implied", "checkpoints are complete or absent", save_on_each_node=False, enable_jit_checkpoint=False),
    **_all("implied", "a resumed run continues to the bit", ignore_data_skip=False, full_determinism=False),
    **_all("implied", "a resumed run continues to the bit", restore_callback_states_from_checkpoint=False),
    **_all("mapped", _HUB, push_to_hub=False, hub_token=None, hub_private_repo=None, hub_model_id=None),
    **_all("mapped", _HUB, hub_revision=None),
    **_all("implied", "it is uploaded once, after the run", hub_strategy="every_save", hub_always_push=False),
    **_all("implied", _LOADER, dataloader_drop_last=False, dataloader_num_workers=0, dataloader_pin_memory=True),
    **_all("implied", _LOADER, dataloader_persistent_workers=False, dataloader_prefetch_factor=None),
    **_all("implied", _LOADER, dataloader_multiprocessing_context=None, dataloader_in_order=True),
    **_all("implied", _LOADER, label_names=None, length_column_name="length"),
    **_all("implied", _ROUTE, accelerator_config=None, parallelism_config=None, deepspeed=None, fsdp=None),
    **_all("implied", _ROUTE, fsdp_config=None, ddp_find_unused_parameters=None, ddp_bucket_cap_mb=None),
    **_all("implied", _ROUTE, ddp_broadcast_buffers=None, ddp_static_graph=None, ddp_backend=None, ddp_timeout=1800),
    **_all("implied", _ROUTE, use_cpu=False, local_rank=-1),
    **_all("implied", "`train` and `evaluate` say what is done", do_train=False, do_eval=False, do_predict=False),
    **_all("implied", "trackio is no tracker here", trackio_space_id=None, trackio_bucket_id=None),
    **_all("implied", "trackio is no tracker here", trackio_static_space_id=None),
    **_all("refused", "the code of a model folder is not run", trust_remote_code=False),
    **_all("refused", "the order of the rows is shuffled in each epoch", train_sampling_strategy="random"),
    **_all("refused", "one seed is for all", data_seed=None),
    **_all("refused", "Adam has no further options here", optim_args=None, optim_target_modules=None),
    **_all("refused", "it is not known here", label_smoothing_factor=0.0, neftune_noise_alpha=None),
    **_all("refused", "a checkpoint has all that a run needs", save_only_model=False),
    **_all(
        "refused", "checkpoint.keep_best keeps it, and `megatron-rl export` writes it", load_best_model_at_end=False
    ),
    **_all("refused", "checkpoint.keep_best names a metric", metric_for_best_model=None, greater_is_better=None),
    **_all("refused", "rewards are what is measured", include_for_metrics=()),
}
"""What transformers' TrainingArguments has, in TRL's form, and other arguments of all three trainers."""

ARGUMENTS: Mapping[str, Argument] = {
    **COMMON,
    **_all("mapped", _BATCH, per_device_train_batch_size=8, gradient_accumulation_steps=1),
    **_all("mapped", _BATCH, generation_batch_size=None, steps_per_generation=None),
    **_all("mapped", "algorithm.epochs, with reshuffle: false", num_iterations=1),
    **_all("mapped", "rollout.samples_per_prompt", num_generations=8),
    **_all("mapped", "policy.optimizer.lr", learning_rate=1e-6),
    **_all("mapped", "eval.samples_per_prompt", num_generations_eval=None),
    **_all("mapped", "rollout.max_response_tokens", max_completion_length=512),
    **_all("mapped", "rollout.sampling.temperature", temperature=1.0),
    **_all("mapped", "data.chat_template", chat_template_kwargs=None),
    **_all(
        "mapped",
        "rollout.environment.max_turns; without it only `max_completion_length` bounds an answer",
        max_tool_calling_iterations=None,
    ),
    **_all("mapped", "rollout.gpu_memory_utilization, with use_vllm", vllm_gpu_memory_utilization=0.3),
    **_all("mapped", "rollout.parallel.tensor, with use_vllm", vllm_tensor_parallel_size=1),
    **_all("mapped", "algorithm.kl, with the estimator k3", beta=0.0),
    **_all(
        "mapped",
        "algorithm.kl.straight_through, with the same expected gradient; refused with several optimizer steps on a "
        "batch of answers, where TRL weights by the ratio",
        use_bias_correction_kl=True,
    ),
    **_all("mapped", "the clip of algorithm.loss", epsilon=0.2, epsilon_high=None),
    **_all("mapped", "algorithm.loss.clip_ratio_c, the bound of dual clip; at least 1 + epsilon_high", delta=None),
    **_all("mapped", "algorithm.loss: sapo", sapo_temperature_neg=1.05, sapo_temperature_pos=1.0),
    **_all("mapped", "algorithm.loss: vespo", vespo_k_pos=2.0, vespo_lambda_pos=3.0),
    **_all("mapped", "algorithm.loss: vespo", vespo_k_neg=3.0, vespo_lambda_neg=2.0),
    **_all("mapped", "algorithm.loss: gspo, if `sequence`; not sapo, cispo, vespo", importance_sampling_level="token"),
    **_all("mapped", "rewards[].weight", reward_weights=None),
    **_all("mapped", "algorithm.adv_estimator: grpo, or gdpo", multi_objective_aggregation="sum_then_normalize"),
    **_all("mapped", "algorithm.adv_estimator.std; 1e-6 is added to it, in TRL 1e-4", scale_rewards="group"),
    **_all("mapped", "algorithm.loss_agg_mode, and algorithm.loss", loss_type="dapo"),
    **_all("mapped", "algorithm.overlong_filter", mask_truncated_completions=False),
    **_all("mapped", "algorithm.top_entropy_share, by TRL's inclusive quantile", top_entropy_quantile=1.0),
    **_all(
        "mapped",
        "algorithm.entropy, as the mean over tokens for every loss_type",
        entropy_coef=0.0,
        use_adaptive_entropy=False,
        entropy_target=0.2,
    ),
    **_all("mapped", "algorithm.entropy.coefficient", entropy_coef_max=1.0, entropy_coef_delta=0.005),
    **_all(
        "mapped",
        "algorithm.correction with use_vllm; without it the run has its own default",
        vllm_importance_sampling_correction=True,
    ),
    **_all("mapped", f"algorithm.correction; {_SEQUENCE_MASK}", vllm_importance_sampling_mode="sequence_mask"),
    **_all("mapped", "algorithm.correction", vllm_importance_sampling_clip_max=3.0),
    **_all("mapped", "algorithm.correction", vllm_importance_sampling_clip_min=None),
    **_all("mapped", "algorithm.correction.reject, the masking of DeepSeek-V3.2", off_policy_mask_threshold=None),
    # The same in every run here, or without meaning.
    **_all("mapped", "vLLM always generates; the keys of vllm_... count with it", use_vllm=False),
    **_all("implied", "vLLM always generates", vllm_mode="colocate", vllm_model_impl="vllm"),
    **_all("implied", "cluster.colocate puts trainer and engines on the same GPUs", vllm_enable_sleep_mode=False),
    **_all("implied", _SERVER, vllm_server_base_url=None, vllm_server_host="0.0.0.0", vllm_server_port=8000),
    **_all("implied", _SERVER, vllm_server_timeout=240.0, vllm_group_port=51216, ds3_gather_for_generation=True),
    **_all("implied", "the sum of the largest prompt and answer", vllm_max_model_length=None),
    **_all("implied", "vLLM's own caches and batches", cache_implementation=None),
    **_all("implied", "vLLM's own caches and batches", use_transformers_continuous_batching=False),
    **_all("implied", "vLLM's own caches and batches", transformers_continuous_batching_config=None),
    **_all("implied", "vLLM's own caches and batches", use_transformers_paged=False),
    **_all("implied", "no layer has dropout", disable_dropout=False),
    **_all("implied", _FILES, log_completions=False),
    **_all("implied", _FILES, log_multimodal=True),
    **_all("implied", _FILES, num_completions_to_print=None, log_unique_prompts=False),
    **_all("implied", _FILES, log_completions_hub_repo=None),
    **_all("implied", _LOADER, remove_unused_columns=False),
    # They would change what is trained or kept.
    **_all("refused", "the trainer would compute other log-probs than were sampled", top_p=1.0, top_k=0, min_p=None),
    **_all("refused", "the trainer would compute other log-probs than were sampled", repetition_penalty=1.0),
    **_all("refused", "only temperature can be set", generation_kwargs=None),
    **_all("refused", "answers are not constrained by a grammar", vllm_structured_outputs_regex=None),
    **_all("implied", "trainer and engine always compute logits in float32", cast_lm_head_to_fp32=False),
    **_all("mapped", "data.shuffle", shuffle_dataset=True),
    **_all("refused", _REFERENCE, sync_ref_model=False),
    **_all("refused", _REFERENCE, ref_model_mixup_alpha=0.6),
    **_all("refused", _REFERENCE, ref_model_sync_steps=512),
    **_all("refused", "the adaptive coefficient begins to act at 0", entropy_coef_min=0.0),
    **_all("refused", "it has another name since TRL 1.0", vllm_importance_sampling_cap=None),
}
"""GRPOConfig's."""

_ROWS = "`rows_per_step` of section dpo, sft or reward_model, by the sizes of TRL"
_CUT = "`max_tokens` and `on_bad_row: cut`; at most the model's positions"
_PADDING = "rows are always packed without padding, and see nothing of each other"

OFFLINE: Mapping[str, Argument] = {
    **COMMON,
    **_all("mapped", _ROWS, per_device_train_batch_size=8, gradient_accumulation_steps=1),
    **_all("mapped", _CUT, max_length=1024),
    **_all("refused", "rows are cut at their end", truncation_mode="keep_start"),
    **_all("implied", _PADDING, padding_free=False, pad_token=None),
    **_all("implied", _LOADER, dataset_num_proc=None, remove_unused_columns=True),
    **_all("implied", _SPEED, activation_offloading=False),
}
"""What the other configurations have in common."""

DPO_ARGUMENTS: Mapping[str, Argument] = {
    **OFFLINE,
    **_all("mapped", "policy.optimizer.lr", learning_rate=1e-6),
    **_all("mapped", "dpo.loss.kind: `sigmoid` is dpo; `ipo`; others are refused", loss_type=("sigmoid",)),
    **_all("mapped", "dpo.loss.beta", beta=0.1),
    **_all("refused", "the loss is one, with the weight 1", loss_weights=None),
    **_all("refused", "dpo.loss has nothing like it", ld_alpha=None, f_divergence_type="reverse_kl"),
    **_all("refused", "dpo.loss has nothing like it", use_weighting=False),
    **_all("refused", _REFERENCE, sync_ref_model=False, ref_model_mixup_alpha=0.6, ref_model_sync_steps=512),
    **_all("implied", "only losses and divergences read it that are refused", label_smoothing=0.0, discopop_tau=0.05),
    **_all("implied", "only losses and divergences read it that are refused", f_alpha_divergence_coef=0.5),
    **_all("implied", "log-probs of the reference are computed once", precompute_ref_log_probs=False),
    **_all("implied", "log-probs of the reference are computed once", precompute_ref_batch_size=None),
    **_all("implied", "no layer has dropout", disable_dropout=True),
}

_OF_BOTH = ("precompute_ref_log_probs", "precompute_ref_batch_size", "disable_dropout", "sync_ref_model")
KTO_ARGUMENTS: Mapping[str, Argument] = {
    **{name: one for name, one in OFFLINE.items() if name not in ("truncation_mode", "padding_free", "pad_token")},
    **{name: DPO_ARGUMENTS[name] for name in (*_OF_BOTH, "ref_model_mixup_alpha", "ref_model_sync_steps")},
    **_all("mapped", "policy.optimizer.lr", learning_rate=1e-6),
    **_all("mapped", "dpo.loss.beta", beta=0.1),
    **_all("mapped", "dpo.loss, of the kind kto", desirable_weight=1.0, undesirable_weight=1.0),
    **_all("refused", "the loss is kto", loss_type="kto"),
    **_all("implied", "z takes the next row of the file, and rows are shuffled", train_sampling_strategy="sequential"),
}

_DECODERS = "only models with an encoder read it, and models are decoders here"
_NOT_OF_PAIRS = ("truncation_mode", "padding_free", "pad_token", "pad_to_multiple_of", "router_aux_loss_coef")
ORPO_ARGUMENTS: Mapping[str, Argument] = {
    **{name: one for name, one in OFFLINE.items() if name not in (*_NOT_OF_PAIRS, "activation_offloading")},
    **{name: DPO_ARGUMENTS[name] for name in ("learning_rate", "beta", "disable_dropout")},
    **_all("implied", _DECODERS, max_completion_length=None, is_encoder_decoder=None),
    **_all("implied", _PADDING, padding_value=None),
    **_all("refused", "`megatron-rl generate` answers rows with the trained model", generate_during_eval=False),
}

CPO_ARGUMENTS: Mapping[str, Argument] = {
    **{name: one for name, one in ORPO_ARGUMENTS.items() if name != "padding_value"},
    **_all("mapped", "dpo.loss.kind: `sigmoid` is cpo; `simpo`; others are refused", loss_type="sigmoid"),
    **_all("mapped", "dpo.loss.alpha", cpo_alpha=1.0),
    **_all("mapped", "dpo.loss.gamma, of the kind simpo", simpo_gamma=0.5),
    **_all("mapped", "dpo.loss.label_smoothing, of the kind cpo", label_smoothing=0.0),
    **_all("refused", "dpo.loss has nothing like AlphaPO's rewards", alpha=0.0),
}

SFT_ARGUMENTS: Mapping[str, Argument] = {
    **OFFLINE,
    **_all("mapped", "policy.optimizer.lr", learning_rate=2e-5),
    **_all("mapped", "sft.turns: `whole` if prompts are trained, else `all`", completion_only_loss=None),
    **_all("mapped", "sft.turns: `all` in place of `whole`", assistant_only_loss=False),
    **_all("mapped", "a step has as many rows as its blocks of `max_length` tokens would hold", packing=False),
    **_all("refused", "rows are packed as wholes: write `bfd`", packing_strategy="bfd"),
    **_all("implied", "evaluations are packed, too, which changes no loss", eval_packing=None),
    **_all("mapped", "the column `text` of the run's rows", dataset_text_field="text"),
    **_all("mapped", "the eos_token of the run's tokenizer", eos_token=None),
    **_all("mapped", "the chat template of the run's tokenizer; a .jinja file", chat_template_path=None),
    **_all("refused", "rows are always tokenized here; give texts or chats", dataset_kwargs=None),
    **_all("refused", "the loss is the negative log-likelihood", loss_type="nll"),
    **_all("implied", "the order of the rows is shuffled in each epoch, as by TRL's sampler", shuffle_dataset=False),
}

_ANSWERS = "rollout.prompts_per_step, with one answer to each prompt"
_FORMS = "algorithm.distillation.form: 0 is forward, 0.5 jensen_shannon, 1 reverse; others are refused"
_ONLY_PROMPTS = "only the prompts of rows are read"
GKD_ARGUMENTS: Mapping[str, Argument] = {
    **SFT_ARGUMENTS,
    **_all("mapped", _ANSWERS, per_device_train_batch_size=8, gradient_accumulation_steps=1),
    **_all("mapped", "rollout.max_prompt_tokens; a longer prompt is refused, and not cut", max_length=1024),
    **_all("mapped", "rollout.max_response_tokens", max_new_tokens=128),
    **_all("mapped", _FORMS, beta=0.5),
    **_all("mapped", "the folder in `teachers`, if `teacher_model` is not given", teacher_model_name_or_path=None),
    **_all("mapped", "1 alone: all answers are the student's own, as in every run", lmbda=0.5),
    **_all("mapped", "1 alone: the divergence has the temperature of sampling here, and in TRL 1", temperature=0.9),
    **_all("refused", "a teacher is loaded as its folder says", teacher_model_init_kwargs=None),
    **_all("refused", "an evaluation needs a reward; run `megatron-rl grpo` with teachers", eval_strategy="no"),
    **_all("implied", "only rows that are not the student's own read it, and lmbda is 1", seq_kd=False),
    **_all("implied", _ONLY_PROMPTS, packing=False, completion_only_loss=None, assistant_only_loss=False),
    **_all("implied", _ONLY_PROMPTS, dataset_text_field="text", dataset_kwargs=None, packing_strategy="bfd"),
    **_all("implied", _ONLY_PROMPTS, truncation_mode="keep_start"),
    **_all("implied", "the loss is the divergence", loss_type="nll"),
    **_all("implied", "no layer has dropout", disable_dropout=True),
}

NO_REWARDS = ("truncation_mode", "padding_free", "router_aux_loss_coef")
"""What only RewardConfig does not have."""
REWARD_ARGUMENTS: Mapping[str, Argument] = {
    **{name: one for name, one in OFFLINE.items() if name not in NO_REWARDS},
    **_all("mapped", "policy.optimizer.lr", learning_rate=1e-4),
    **_all("mapped", "`max_tokens` and `on_bad_row: skip`; at most the model's positions", max_length=1024),
    **_all("mapped", "reward_model.loss.center", center_rewards_coefficient=None),
    **{name: SFT_ARGUMENTS[name] for name in ("eos_token", "chat_template_path")},
    **_all("implied", "no layer has dropout", disable_dropout=True),
}

FORMER_COMMON: Mapping[str, Argument] = {
    **_all("mapped", "it is warmup_steps below 1 today", warmup_ratio=None),
    **_all("mapped", "it is eval_strategy today", evaluation_strategy=None),
    **_all("implied", _FILES, logging_dir=None),
    **_all("implied", "a folder that has a run is never overwritten", overwrite_output_dir=None),
    **_all("implied", "weights are saved as safetensors", save_safetensors=None),
    **_all("implied", "rows are packed without padding", group_by_length=None),
    **_all("implied", _ROUTE, no_cuda=None, use_mps_device=None, half_precision_backend=None, ddp_backend_options=None),
    **_all("implied", _SPEED, jit_mode_eval=None, torchdynamo=None, use_ipex=None),
    **_all("implied", "rewards are what is measured", include_inputs_for_metrics=None, past_index=None),
}
"""Arguments of earlier releases of TRL and transformers, which may be given, too."""
FORMER: Mapping[str, Argument] = {
    **_all("mapped", "rollout.max_prompt_tokens; prompts are not cut, as in TRL 1.0", max_prompt_length=None),
    **_all("mapped", "TRL renamed it to log_unique_prompts", wandb_log_unique_prompts=None),
    **FORMER_COMMON,
    **_all("implied", _SERVER, vllm_device=None, vllm_dtype=None, vllm_max_model_len=None),
}
"""GRPOConfig's."""
FORMER_SFT: Mapping[str, Argument] = {
    **FORMER_COMMON,
    **_all("mapped", "it is max_length today", max_seq_length=None),
}

TYPES: Mapping[str, Any] = {
    **dict.fromkeys(
        "output_dir optim_args torch_compile_backend torch_compile_mode run_name trackio_space_id trackio_bucket_id "
        "trackio_static_space_id hub_token hub_model_id hub_revision metric_for_best_model ddp_backend fsdp "
        "dataloader_multiprocessing_context cache_implementation vllm_structured_outputs_regex vllm_server_base_url "
        "log_completions_hub_repo resume_from_checkpoint evaluation_strategy logging_dir vllm_device vllm_dtype "
        "half_precision_backend torchdynamo ddp_backend_options eos_token chat_template_path pad_token "
        "teacher_model_name_or_path".split(),
        str | None,
    ),
    **dict.fromkeys(
        "bf16 tf32 disable_tqdm hub_private_repo greater_is_better remove_unused_columns ddp_find_unused_parameters "
        "ddp_broadcast_buffers ddp_static_graph shuffle_dataset wandb_log_unique_prompts overwrite_output_dir "
        "save_safetensors group_by_length no_cuda use_mps_device jit_mode_eval use_ipex "
        "include_inputs_for_metrics eval_packing completion_only_loss is_encoder_decoder".split(),
        bool | None,
    ),
    **dict.fromkeys(
        "torch_empty_cache_steps eval_accumulation_steps save_total_limit data_seed dataloader_prefetch_factor "
        "ddp_bucket_cap_mb num_generations num_generations_eval max_completion_length generation_batch_size "
        "steps_per_generation vllm_max_model_length max_tool_calling_iterations num_completions_to_print "
        "max_prompt_length vllm_max_model_len past_index dataset_num_proc max_length max_seq_length "
        "precompute_ref_batch_size padding_value".split(),
        int | None,
    ),
    **dict.fromkeys(
        "neftune_noise_alpha eval_steps router_aux_loss_coef min_p delta epsilon_high "
        "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min off_policy_mask_threshold "
        "vllm_importance_sampling_cap warmup_ratio ld_alpha center_rewards_coefficient".split(),
        float | None,
    ),
    **dict.fromkeys("warmup_steps logging_steps eval_delay save_steps".split(), float),
    **dict.fromkeys(
        "lr_scheduler_kwargs gradient_checkpointing_kwargs liger_kernel_config accelerator_config parallelism_config "
        "fsdp_config deepspeed model_init_kwargs generation_kwargs chat_template_kwargs "
        "transformers_continuous_batching_config dataset_kwargs teacher_model_init_kwargs".split(),
        dict[str, Any] | str | None,
    ),
    **dict.fromkeys("optim_target_modules report_to".split(), list[str] | str | None),
    **dict.fromkeys("include_for_metrics label_names".split(), list[str] | None),
    **dict.fromkeys("reward_weights loss_weights".split(), list[float] | None),
    "include_num_input_tokens_seen": str | bool,
    "pad_to_multiple_of": int | str | None,
    "debug": str | list[str],
}
"""The types of the fields whose default does not say it; parsers of command lines read them."""


def type_of(name: str, argument: Argument) -> Any:
    return TYPES.get(name, list[str] if isinstance(argument.default, tuple) else type(argument.default))
