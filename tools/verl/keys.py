"""What every key of verl means here, as one table of rows in the sections of verl's configuration.

The first row whose pattern matches a key says what becomes of it. A row with `always` also counts where the script does
not give its key: verl's default then enters the configuration. `*` in a pattern is any text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from megatron_rl.tools.verl import adapters
from megatron_rl.tools.verl import algorithm as how
from megatron_rl.tools.verl import content as what
from megatron_rl.tools.verl import machine as where
from megatron_rl.tools.verl.settings import Meaning, Settings

Judge = Callable[[Settings, str, Any], Meaning]
NUMBER = (int, float)


@dataclass(frozen=True, slots=True)
class KeyRule:
    pattern: str
    kinds: tuple[type, ...]
    """The types that a value may have besides null; none means any."""
    judge: Judge
    always: bool = False


def used(target: str, why: str = "") -> Judge:
    """The value has the same meaning as our key `target`."""
    return lambda settings, key, value: Meaning("used", {target: value}, why)


def implied(why: str) -> Judge:
    return lambda settings, key, value: Meaning("implied", {}, why)


def refused(why: str) -> Judge:
    """Not expressible, unless the value is null, false, 0 or empty."""

    def judge(settings: Settings, key: str, value: Any) -> Meaning:
        if value in (None, False, 0, "", [], {}):
            return Meaning("implied", {}, "it is off")
        return Meaning("not expressible", {}, why)

    return judge


def only(values: tuple[Any, ...], why: str, otherwise: str) -> Judge:
    """Implied for these values, not expressible for others."""

    def judge(settings: Settings, key: str, value: Any) -> Meaning:
        if value is None or value in values:
            return Meaning("implied", {}, why)
        return Meaning("not expressible", {}, otherwise)

    return judge


def rows(kinds: tuple[type, ...], judge: Judge, *patterns: str, always: bool = False) -> tuple[KeyRule, ...]:
    """A row for each pattern; in a pattern `@` means `actor_rollout_ref.`, and `{a,b}` means a row for each name."""
    return tuple(KeyRule(one, kinds, judge, always) for pattern in patterns for one in _written_out(pattern))


def _written_out(pattern: str) -> list[str]:
    whole = pattern.replace("@", "actor_rollout_ref.")
    before, brace, rest = whole.partition("{")
    names, _, after = rest.partition("}")
    if not brace:
        return [whole]
    return [one for name in names.split(",") for one in _written_out(before + name + after)]


TEXT, BOOL, INT = (str,), (bool,), (int,)
PACKED = "samples are packed into micro-batches by their tokens (balance)"
LOGPROBS = "log-probs are computed in the same packed micro-batches"
REFERENCE = "the reference is swapped into the policy's own ranks"
SWITCHED = "trainers that share GPUs with engines hold weights, gradients and optimizer state in the node's memory"
CHOSEN = "the project chooses the kernels and layers itself"

TABLE: dict[str, tuple[KeyRule, ...]] = {
    "data": (
        *rows((), what.train_rows, "data.train_files", always=True),
        *rows((), what.eval_rows, "data.val_files", always=True),
        *rows(INT, used("rollout.prompts_per_step"), "data.train_batch_size", always=True),
        *rows(INT, what.batch_of_generation, "data.gen_batch_size"),
        *rows(INT, used("rollout.max_prompt_tokens"), "data.max_prompt_length", always=True),
        *rows(INT, used("rollout.max_response_tokens"), "data.max_response_length", always=True),
        *rows((), what.long_prompts, "data.filter_overlong_prompts", "data.truncation", always=True),
        *rows(TEXT, what.column, "data.prompt_key", "data.reward_fn_key"),
        *rows((), what.chat_argument, "data.apply_chat_template_kwargs*"),
        *rows(BOOL, only((True,), "rows are always shuffled", "rows are always shuffled"), "data.shuffle"),
        *rows(INT, used("run.seed"), "data.seed"),
        *rows(INT, only((-1,), "all rows", "write a file with fewer rows"), "data.train_max_samples"),
        *rows(INT, implied("see data.val_files"), "data.val_max_samples"),
        *rows((), refused("rows are read by the project's own readers; write them in a form that it knows"),
            "data.custom_cls.*"),
        *rows((), refused("the order is random, or by pass_rate (data.easy_first_epochs)"), "data.sampler.*"),
        *rows((), refused("rows are not generated during a run"), "data.datagen.*"),
        *rows((), refused("the models here are of text alone"), "data.image_key", "data.video_key",
            "data.return_multi_modal_inputs", "data.image_patch_size"),
        *rows((), refused("see rollout.environment"), "data.tool_config_path"),
        *rows((), refused("the tokenizer is in model.path"), "data.tokenizer"),
        *rows((), implied("the project reads rows in its own way"), "data.return_*", "data.val_batch_size",
            "data.*workers*", "data.trust_remote_code", "data.use_shm", "data.validation_shuffle"),
    ),
    "model": (
        *rows(TEXT, what.model_path, "@model.path", always=True),
        *rows(BOOL, what.recompute, "@model.enable_gradient_checkpointing", always=True),
        *rows(INT, adapters.lora, "{@model,critic.model}.{lora_rank,lora.rank}"),
        *rows(NUMBER, adapters.lora, "{@model,critic.model}.{lora_alpha,lora.alpha}"),
        *rows((), adapters.lora, "{@model,critic.model}.lora*",
            "{@model,critic.model}.{target_modules,exclude_modules,target_parameters,modules_to_save}"),
        *rows((), implied("engines get adapters through the bridge, which plans its messages"),
            "@rollout.layered_summon"),
        *rows((), refused("edit config.json in the model's folder"), "@model.override_config.*",
            "@model.hf_config_path"),
        *rows((), refused("put the tokenizer into the model's folder"), "@model.tokenizer_path",
            "@model.custom_chat_template"),
        *rows((), refused("the model's code is in layout/families and in vLLM"), "@model.external_lib"),
        *rows((), refused("set policy.multi_token to train or keep; the policy gets no gradient from the head"),
            "@model.mtp.enable", "@model.mtp.enable_train"),
        *rows((), refused("engines do not draft with the model's head"), "@model.mtp.enable_rollout"),
        *rows((), implied("it belongs to multi-token prediction"), "@model.mtp.*"),
        *rows((), implied(PACKED), "@model.use_remove_padding", "@actor.use_remove_padding"),
        *rows((), implied(CHOSEN), "@model.use_fused_kernels", "@model.fused_kernel_options*", "@model.use_liger",
            "@model.tiled_mlp*", "@model.attn_implementation", "@model.torch_dtype"),
        *rows((), implied("the trainer recomputes activations, it does not move them"),
            "@model.enable_activation_offload"),
        *rows((), implied("weights are read from safetensors; no remote code runs"), "@model.use_shm",
            "@model.trust_remote_code"),
    ),
    "the actor's batch and loss": (
        *rows(INT, where.mini_batch, "@actor.ppo_mini_batch_size", always=True),
        *rows(INT, where.epochs, "@actor.ppo_epochs"),
        *rows(BOOL, where.is_dynamic, "@actor.use_dynamic_bsz", always=True),
        *rows(INT, where.token_bound, "@actor.ppo_max_token_len_per_gpu", always=True),
        *rows((), implied(PACKED), "@actor.ppo_micro_batch_size*"),
        *rows(NUMBER, how.clip_ratio, "@actor.clip_ratio"),
        *rows(NUMBER, how.loss_part, "@actor.{clip_ratio_low,clip_ratio_high,clip_ratio_c,tau_pos,tau_neg}",
            always=True),
        *rows(TEXT, how.loss_mode, "@actor.policy_loss.loss_mode", always=True),
        *rows(NUMBER, how.loss_part,
            "@actor.policy_loss.{clip_cov_ratio,clip_cov_lb,clip_cov_ub,kl_cov_ratio,ppo_kl_coef}", always=True),
        *rows(TEXT, how.aggregation, "@actor.loss_agg_mode", always=True),
        *rows(NUMBER, how.loss_length, "@actor.loss_scale_factor"),
        *rows(NUMBER, how.entropy, "@actor.entropy_coeff", always=True),
        *rows(BOOL, how.kl_switch, "@actor.use_kl_loss", always=True),
        *rows(NUMBER, how.kl_part, "@actor.kl_loss_coef", always=True),
        *rows(TEXT, how.kl_part, "@actor.kl_loss_type", always=True),
        *rows((), implied("prompts are shared inside a packed row by the trainer itself"),
            "@actor.use_prefix_grouper"),
        *rows((), implied("mini-batches are drawn by the run's seed"), "@actor.shuffle", "@actor.data_loader_seed",
            "critic.shuffle", "critic.data_loader_seed"),
        *rows((), refused("the models here are of text alone"), "@actor.freeze_vision_tower",
            "@actor.num_images_in_input"),
        *rows((), how.routing, "@actor.router_replay.mode", "@rollout.enable_rollout_routing_replay"),
        *rows((), implied("routes are kept with the tokens"), "@actor.router_replay.*"),
        *rows((), implied("metrics always have the entropy"), "@actor.calculate_entropy"),
        *rows((), refused("there is no estimator that needs it"), "@actor.calculate_sum_pi_squared",
            "@actor.sum_pi_squared_checkpointing"),
        *rows((), what.save_contents, "*.checkpoint.*"),
    ),
    "optimizers": (
        *rows(NUMBER, where.optimizer, "{@actor,critic}.optim.lr", "{@actor,critic}.optim.weight_decay", always=True),
        *rows((list,), where.optimizer, "{@actor,critic}.optim.betas", always=True),
        *rows(NUMBER, where.warmup, "{@actor,critic}.optim.{lr_warmup_steps,lr_warmup_steps_ratio}"),
        *rows(TEXT, where.schedule, "{@actor,critic}.optim.{lr_scheduler_type,warmup_style,lr_decay_style}"),
        *rows(NUMBER, where.lowest_rate, "{@actor,critic}.optim.min_lr_ratio", "{@actor,critic}.optim.min_lr"),
        *rows(NUMBER, where.clip_grad, "{@actor,critic}.optim.clip_grad", "{@actor,critic}.grad_clip"),
        *rows(BOOL, where.cpu_offload, "{@actor,critic}.optim.override_optimizer_config.optimizer_cpu_offload"),
        *rows((), implied("it belongs to Megatron's optimizers, which policy.optimizer replaces"),
            "{@actor,critic}.optim.override_optimizer_config*"),
        *rows(TEXT, only(("AdamW", "adam", "adamw"), "the default", "the kinds of optimizer are adam and muon"),
            "{@actor,critic}.optim.optimizer"),
        *rows(NUMBER, only((0, 0.0), "the warm-up begins at 0", "the warm-up begins at 0"),
            "{@actor,critic}.optim.lr_warmup_init"),
        *rows((), refused("the schedule ends with the run"), "{@actor,critic}.optim.lr_decay_steps",
            "{@actor,critic}.optim.lr_wsd_decay_steps", "{@actor,critic}.optim.lr_wsd_decay_style"),
        *rows((), implied("the run's steps are known"), "{@actor,critic}.optim.total_training_steps"),
        *rows((), implied(CHOSEN), "{@actor,critic}.optim.optimizer_impl"),
    ),
    "the trainer's layout": (
        *rows((), implied(REFERENCE), "@ref.*"),
        *rows(INT, where.parallel, *("{@actor,critic}.megatron." + name for name in where.MESH)),
        *rows((), implied(SWITCHED), "*.param_offload", "*.grad_offload", "*.optimizer_offload", "*.offload_policy"),
        *rows(INT, where.fsdp, "{@actor,critic}.ulysses_sequence_parallel_size",
            "{@actor,critic.model}.fsdp_config.{ulysses_sequence_parallel_size,fsdp_size}"),
        *rows(BOOL, used("policy.parallel.sequence"), "@actor.megatron.sequence_parallel"),
        *rows((), what.granularity, "@actor.megatron.override_transformer_config.recompute_*"),
        *rows(NUMBER, used("policy.load_balancing_loss"),
            "@actor.megatron.override_transformer_config.moe_aux_loss_coeff"),
        *rows(NUMBER, used("policy.router_z_loss"), "@actor.megatron.override_transformer_config.moe_z_loss_coeff"),
        *rows((), where.stages,
            "{@actor,critic}.megatron.override_transformer_config.{num_layers_in_*,account_for_*}"),
        *rows((), implied(CHOSEN), "*.override_transformer_config.*", "*.override_ddp_config*",
            "*.override_mcore_model_config*", "*.use_torch_compile"),
        *rows((),
            implied("weights are read from the Hugging Face folder by each rank (model.weights: from Megatron's form)"),
            "*.use_mbridge", "*.vanilla_mbridge", "*.load_weight"),
        *rows((), refused("set model.weights to a folder that megatron-rl convert to-megatron has written"),
            "@actor.megatron.use_dist_checkpointing", "@actor.megatron.dist_checkpointing_path"),
        *rows((), implied("the run has one seed, run.seed"), "*.megatron.seed", "*.fsdp_config.seed"),
        *rows((), implied("the trainer is Megatron-Core"), "*.fsdp_config*", "*.strategy",
            "critic.model.fsdp_config*", "*.use_distributed_optimizer"),
        *rows((), implied("entropies are computed in chunks"), "*.entropy_*"),
        *rows((), implied(PACKED), "@actor.megatron.use_remove_padding"),
        *rows((), implied("deadlines are cluster.step_timeout_s and bridge.timeout_s"), "*nccl_timeout"),
        *rows(BOOL, where.hybrid, "actor_rollout_ref.hybrid_engine", always=True),
    ),
    "the engines": (
        *rows(INT, how.group_size, "@rollout.n", always=True),
        *rows(NUMBER, used("rollout.sampling.temperature"), "@rollout.temperature", always=True),
        *rows(NUMBER, only((1,), "all tokens", "training needs the full distribution; use 1"), "@rollout.top_p"),
        *rows(NUMBER, only((-1, 0), "all tokens", "training needs the full distribution; use -1"), "@rollout.top_k"),
        *rows(BOOL, only((True,), "answers are sampled", "training needs sampled answers"), "@rollout.do_sample"),
        *rows(INT, where.engines, "@rollout.tensor_model_parallel_size", "@rollout.pipeline_model_parallel_size",
            always=True),
        *rows(INT, where.engine_replicas, "@rollout.data_parallel_size"),
        *rows(INT, where.engine_experts, "@rollout.expert_parallel_size"),
        *rows(NUMBER, used("rollout.gpu_memory_utilization"), "@rollout.gpu_memory_utilization", always=True),
        *rows(INT, used("rollout.max_sequences"), "@rollout.max_num_seqs", always=True),
        *rows(TEXT, what.dtype, "@rollout.dtype", always=True),
        *rows(TEXT, only(("vllm",), "vLLM answers", "vLLM answers in its place"), "@rollout.name"),
        *rows((), used("rollout.quantization"), "@rollout.quantization"),
        *rows(INT, used("eval.samples_per_prompt"), "@rollout.val_kwargs.n", always=True),
        *rows(BOOL, what.eval_sampling, "@rollout.val_kwargs.do_sample", always=True),
        *rows((), what.eval_sampling, "@rollout.val_kwargs.*"),
        *rows((), what.multi_turn, "@rollout.multi_turn.*"),
        *rows((), implied(LOGPROBS), "@rollout.log_prob_*"),
        *rows((), implied("engines return the log-probs of what they sample"), "@rollout.calculate_log_probs",
            "@rollout.logprobs_mode"),
        *rows((), refused("all requested answers are waited for; see rollout.late"), "@rollout.over_sample_rate"),
        *rows((), refused("an agent is rollout.environment of kind agent"), "@rollout.agent.agent_loop_config_path",
            "@rollout.agent.custom_async_server*"),
        *rows((), only(("single_turn_agent",), "an answer is one turn", "see rollout.environment"),
            "@rollout.agent.default_agent_loop"),
        *rows((), refused("dumped rollouts are rollout.dump and rollout.replay"), "@rollout.skip_rollout"),
        *rows((), refused("answers end at the end-of-text token"), "@rollout.ignore_eos"),
        *rows((), implied("weights come through the bridge, which plans its messages"), "@rollout.load_format",
            "@rollout.checkpoint_engine*", "@rollout.update_weights*"),
        *rows((), implied("prompt and answer lengths give the longest sequence"), "@rollout.max_model_len",
            "@rollout.prompt_length", "@rollout.response_length"),
        *rows((), implied("the project chooses vLLM's options"),
            "@rollout.{enable_*,enforce_eager,free_cache_engine,max_num_batched_tokens,mode,cudagraph*}",
            "@rollout.{disable_log_stats,scheduling_policy,skip_*,multi_stage_wake_up,agent.num_workers}",
            "@rollout.engine_kwargs*"),
        *rows((), implied("metrics are in metrics.jsonl, and a few answers in samples.jsonl"), "@rollout.trace*",
            "@rollout.prometheus*"),
        *rows(INT, implied("see trainer.nnodes"), "rollout.nnodes", "rollout.n_gpus_per_node",
            "trainer.n_rollout_gpus_per_node"),
    ),
    "the algorithm": (
        *rows(TEXT, how.estimator, "algorithm.adv_estimator", always=True),
        *rows(BOOL, how.standard_deviation, "algorithm.norm_adv_by_std_in_grpo"),
        *rows(NUMBER, how.discount, "algorithm.gamma", "algorithm.lam"),
        *rows(BOOL, how.kl_switch, "algorithm.use_kl_in_reward", always=True),
        *rows(TEXT, how.kl_part, "algorithm.kl_penalty", "algorithm.kl_ctrl.type", always=True),
        *rows(NUMBER, how.kl_part, "algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.horizon",
            "algorithm.kl_ctrl.target_kl", always=True),
        *rows((), how.correction, "algorithm.rollout_correction.rollout_is", always=True),
        *rows((), how.correction, "algorithm.rollout_correction.*"),
        *rows(BOOL, how.filter_groups, "algorithm.filter_groups.enable"),
        *rows(NUMBER, implied("it is the number in rollout.active_sampling; groups without a signal then fill up"),
            "algorithm.filter_groups.max_num_gen_batches"),
        *rows((), implied("groups are compared by their rewards"), "algorithm.filter_groups.*"),
        *rows((), refused("there is no PF-PPO"), "algorithm.use_pf_ppo"),
        *rows((), implied("it belongs to PF-PPO"), "algorithm.pf_ppo.*"),
    ),
    "rewards": (
        *rows((), what.rewards, "custom_reward_function.path", always=True),
        *rows((), what.reward_part, "custom_reward_function.*"),
        *rows(BOOL, what.reward_part, "reward_model.enable"),
        *rows(TEXT, what.reward_part, "reward_model.model.path"),
        *rows(TEXT, what.manager, "reward_model.reward_manager", "reward_manager.name"),
        *rows((), what.overlong_buffer, "reward_model.reward_kwargs.overlong_buffer_cfg.*",
            "reward_model.overlong_buffer.*"),
        *rows((), implied("see overlong_buffer_cfg"), "reward_model.reward_kwargs.max_resp_len"),
        *rows((), refused("code runs in the project's own sandbox; use a reward of kind code"),
            "reward_model.sandbox_fusion.url"),
        *rows((), refused("a server of the user's own serves the reward model"), "reward_model.enable_resource_pool"),
        *rows((), implied("rewards run while the engines generate; a reward model is a server of the user's own"),
            "reward_model.sandbox_fusion.*", "reward_model.launch_reward_fn_async", "reward_model.use_reward_loop",
            "reward_model.num_workers",
            "reward_model.{rollout.*,model.*,*micro_batch_size*,strategy,max_length,*dynamic_bsz,nnodes}",
            "reward_model.{forward_max_token_len_per_gpu,ulysses_sequence_parallel_size,n_gpus_per_node,profiler*}"),
        *rows((), refused("the module of a manager is not read; write its scores as a reward of kind function"),
            "reward_model.reward_loop_*", "reward_manager.*"),
    ),
    "the critic": (
        *rows(TEXT, what.model_path, "critic.model.path"),
        *rows(INT, where.mini_batch, "critic.ppo_mini_batch_size", always=True),
        *rows(INT, where.epochs, "critic.ppo_epochs"),
        *rows(INT, where.token_bound, "critic.ppo_max_token_len_per_gpu", "critic.forward_max_token_len_per_gpu"),
        *rows((), implied(PACKED), "critic.*micro_batch_size*", "critic.use_dynamic_bsz",
            "critic.model.use_remove_padding"),
        *rows(NUMBER, where.value_clip, "critic.cliprange_value", always=True),
        *rows((), implied("critic and policy recompute alike, unless critic.model.recompute is set"),
            "critic.model.enable_*"),
        *rows((), refused("edit config.json in the critic's folder"), "critic.model.override_config*"),
        *rows((), implied("the critic has the policy's tokenizer"), "critic.model.tokenizer_path",
            "critic.model.trust_remote_code", "critic.model.use_shm", "critic.model.external_lib"),
        *rows((), implied("the value loss is a mean over tokens"), "critic.loss_agg_mode"),
        *rows((), implied("the estimator says whether there is a critic"), "critic.enable"),
        *rows((), implied(CHOSEN), "critic.megatron.*"),
    ),
    "the run": (
        *rows(INT, what.total_steps, "trainer.total_training_steps", "trainer.total_epochs", always=True),
        *rows(TEXT, what.names, "trainer.project_name", "trainer.experiment_name", "trainer.default_local_dir",
            always=True),
        *rows((), what.loggers, "trainer.logger", always=True),
        *rows(INT, where.gpus, "trainer.nnodes", "trainer.n_gpus_per_node", always=True),
        *rows((bool, int), what.save_every, "trainer.save_freq", always=True),
        *rows((bool, int), what.evaluation, "trainer.test_freq", always=True),
        *rows(BOOL, what.evaluation, "trainer.val_before_train"),
        *rows(INT, what.critic_warmup, "trainer.critic_warmup"),
        *rows(INT, used("checkpoint.keep"), "trainer.max_actor_ckpt_to_keep"),
        *rows(INT, implied("policy and critic are in one checkpoint"), "trainer.max_critic_ckpt_to_keep"),
        *rows(TEXT, what.resume, "trainer.resume_mode"),
        *rows((), refused("verl's checkpoints are not read; export one for Hugging Face as model.path"),
            "trainer.resume_from_path"),
        *rows(BOOL, refused("megatron-rl generate answers prompts without training"), "trainer.val_only"),
        *rows(TEXT, only(("cuda",), "GPUs", "the run needs GPUs of CUDA, or CPUs"), "trainer.device"),
        *rows(TEXT, what.dumped, "trainer.rollout_data_dir"),
        *rows((), implied("a few answers of a step are in samples.jsonl"), "trainer.log_val_generations",
            "trainer.validation_data_dir"),
        *rows((), implied("ranks are always balanced"), "trainer.balance_batch"),
        *rows((), implied("verl's own way to start, stop or copy, which a run here does not need"),
            "trainer.{use_legacy_worker_impl,esi_redundant_time,default_hdfs_dir,del_local_ckpt_after_load}",
            "trainer.ray_wait_register_center_timeout"),
        *rows((), implied("the run starts Ray itself, or finds it by cluster.ray_address"), "ray_kwargs.*",
            "ray_init.*"),
        *rows((), refused("there is no profiler; metrics.jsonl has the time of each phase"), "global_profiler.tool"),
        *rows((), implied("profiling is off; metrics.jsonl has the time of each phase"), "global_profiler.*",
            "*.profiler.*", "trainer.profile_steps"),
        *rows((), implied("tokens go through Ray's object store"), "transfer_queue.*"),
        *rows((), implied("it belongs to Hydra"), "hydra.*", "hydra/*"),
    ),
}  # fmt: skip
RULES: tuple[KeyRule, ...] = tuple(rule for section in TABLE.values() for rule in section)


def rule_of(key: str) -> KeyRule | None:
    """The row of a key; None if the key is not known. A row with the whole key comes before one with `*`."""
    exact = next((rule for rule in RULES if rule.pattern == key), None)
    return exact or next((rule for rule in RULES if fnmatchcase(key, rule.pattern)), None)
