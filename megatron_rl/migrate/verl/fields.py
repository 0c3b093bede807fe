"""The meaning of Megatron-Core's own fields, which verl passes on: of its model, its optimizer, and their neighbours.

A field that only changes speed or memory has no meaning here, because the project chooses it; a field that changes what
is trained is mapped or refused; and a field that is not in the lists below is refused by its name.
"""

from __future__ import annotations

from typing import Any

from megatron_rl.migrate.verl.settings import ACTOR, Meaning, Settings

SPEED = frozenset(
    """
    apply_dsa_kernel_fusion apply_rope_fusion async_tensor_model_parallel_allreduce attention_backend
    barrier_with_L1_time batch_p2p_comm batch_p2p_sync bias_activation_fusion bias_dropout_fusion
    calculate_per_token_loss context_parallel_algo cp_comm_type cp_partition_mode cpu_offloading
    cpu_offloading_activations cpu_offloading_double_buffering cpu_offloading_num_layers cpu_offloading_weights
    cross_entropy_fusion_impl cross_entropy_loss_fusion cuda_graph_impl cuda_graph_retain_backward_graph
    cuda_graph_scope cuda_graph_use_single_mempool cuda_graph_warmup_steps deallocate_pipeline_outputs
    defer_embedding_wgrad_compute delay_wgrad_compute distribute_saved_activations dsa_indexer_use_sparse_loss
    enable_cuda_graph ep_overlap_early_attn_memory_release external_cuda_graph fine_grained_activation_offloading
    fused_single_qkv_rope gradient_accumulation_fusion inference_fuse_tp_communication inference_rng_tracker
    inference_sampling_seed masked_softmax_fusion max_seqlen_per_dp_cp_rank memory_efficient_layer_norm
    min_offloaded_tensor_size moe_deepep_num_sms moe_enable_deepep moe_flex_dispatcher_backend moe_grouped_gemm
    moe_hybridep_num_sms moe_layer_recompute moe_per_layer_logging moe_permute_fusion moe_router_fusion
    moe_shared_expert_overlap moe_token_dispatcher_type moe_use_legacy_grouped_gemm offload_modules
    overlap_moe_expert_parallel_comm overlap_p2p_comm overlap_p2p_comm_warmup_flush persist_layer_norm
    sequence_packing_scheduler sequence_parallel tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend
    tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_disable_fc1
    tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs
    transformer_impl use_ascend_gdn use_cpu_initialization use_flash_attn use_fused_mhc use_fused_weighted_squared_relu
    use_naive_l2norm use_te_activation_func use_te_rng_tracker use_triton_gdn variable_seq_lengths wgrad_deferral_limit
    """.split()
)
"""The model's fields that the project chooses itself: how layers are computed and messages travel."""
OFF = frozenset(
    """
    bf16 config_logger_dir deterministic_mode fp16 fp32_residual_connection fp4 fp4_param fp8 fp8_param mlp_chunks
    moe_input_jitter_eps moe_router_force_load_balancing moe_token_dropping pipeline_model_parallel_layout qk_clip
    softmax_scale test_mode
    """.split()
)
"""Fields that are off by default for every model, so that null and False change nothing."""
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_dropout": ((0, None), "the trainer has no dropout, so that it computes what the engine has sampled"),
    "attention_dropout": ((0, None), "the trainer has no dropout, so that it computes what the engine has sampled"),
    "moe_router_dtype": (("fp32",), "the router computes in fp32"),
    "dsa_indexer_loss_coeff": ((0, None), "the indexer of sparse attention has no loss of its own"),
    "mtp_num_layers": ((0, None), "policy.multi_token says what becomes of the model's multi-token head"),
    "moe_expert_capacity_factor": ((None,), "every token goes to its experts"),
    "moe_token_drop_policy": ((None,), "every token goes to its experts"),
}
"""Fields with one meaning here: the values that have it, and the sentence."""
BALANCED = ("aux_loss", "global_aux_loss", None)
"""Kinds of Megatron's load balancing whose coefficient policy.load_balancing_loss is."""
OPTIMIZER_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "weight_decay_incr_style": (("constant", None), "the weight decay is the same in all steps"),
    "use_checkpoint_opt_param_scheduler": ((False, None), "the schedule is the configuration's, also after a resume"),
    "num_cycles": ((0.5, None), "a cosine falls once"),
    "zero_indexed_step": ((True, None), "the first step has the beginning of the warm-up"),
    "lr_decay_ratio": ((1, None), "the schedule ends with the run"),
    "lr_start": ((0, None), "the warm-up begins at 0"),
    "lr_warmup_init": ((0, None), "the warm-up begins at 0"),
    "lr_decay_steps": ((None,), "the schedule ends with the run"),
    "lr_wsd_decay_steps": ((None,), "the schedule ends with the run"),
    "optimizer_impl": (("torch.optim", None), "the optimizers here are Adam and Muon"),
    "decoupled_weight_decay": ((True, None), "the weight decay is decoupled"),
    "amsgrad": ((False, None), "Adam is the plain one"),
    "maximize": ((False, None), "the loss is minimised"),
}
OPTIMIZER_SPEED = frozenset(
    """
    barrier_with_L1_time capturable foreach fused log_num_zeros_in_grad lr_wsd_decay_style offload_fraction
    optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d overlap_param_gather
    overlap_param_gather_with_optimizer_step pin_cpu_grads pin_cpu_params store_param_remainders total_training_steps
    use_distributed_optimizer use_layer_wise_distributed_optimizer use_layer_wise_param_layout
    use_precision_aware_optimizer use_torch_optimizer_for_cpu_offload
    """.split()
)
DDP_SPEED = frozenset(
    """
    align_param_gather bucket_size check_for_large_grads check_for_nan_in_grad
    delay_wgrad_compute disable_symmetric_registration fsdp_double_buffer gradient_reduce_div_fusion nccl_ub
    num_distributed_optimizer_instances overlap_grad_reduce overlap_param_gather pad_buckets_for_high_nccl_busbw
    suggested_communication_unit_size use_custom_fsdp use_distributed_optimizer use_megatron_fsdp
    """.split()
)
UNSET = frozenset("eps adam_eps decoupled_lr decoupled_min_lr override_optimizer_config".split())
"""Keys of the optimizer that null or False leave at their defaults."""
NO_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate")
MEGATRONS_RATE = 0.001
"""Megatron-Core's own moe_router_bias_update_rate, where a router's bias is switched on."""
DTYPES = {
    **dict.fromkeys(("fp32", "float32", "torch.float32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bfloat16"),
}


def transformer(settings: Settings, key: str, value: Any) -> Meaning:
    """A field of `megatron.override_transformer_config`."""
    name = key.rpartition("override_transformer_config.")[2]
    if not settings.is_megatron:
        return Meaning("implied", {}, f"verl's trainer of this script is {settings.trainer}, which does not read it")
    if name in FIXED:
        return _fixed(FIXED[name], name, value)
    if name in SPEED:
        return Meaning("implied", {}, "the project chooses how layers are computed")
    if key.startswith("critic."):
        if not settings.has_critic or name.startswith("recompute_"):
            return Meaning("implied", {}, "critic and policy recompute alike")
        if value in (None, False, 0) and (name in OFF or name in NO_LOSSES):
            return Meaning("implied", {}, "a critic adds no losses of experts")
        return Meaning("refused", {}, f"the critic's layers have no setting for {name} here")
    if name == "moe_router_enable_expert_bias" and not value:
        return Meaning("refused", {}, "the model's family says whether its routers have a bias; remove the key")
    if name in ("moe_router_enable_expert_bias", "moe_router_bias_update_rate"):
        rate = settings[f"{key.removesuffix(name)}moe_router_bias_update_rate"]
        return Meaning("used", {"policy.router_bias_update_rate": MEGATRONS_RATE if rate is None else rate})
    if name == "moe_z_loss_coeff":
        return Meaning("used", {"policy.router_z_loss": value or 0.0})
    if name in ("moe_aux_loss_coeff", "moe_router_load_balancing_type"):
        return _balancing(settings, key, name)
    if name == "pipeline_model_parallel_layout" and value:
        why = "auto balances the stages; for numbers of your own give a list"
        return Meaning("mapped", {"policy.parallel.layers": "auto"}, why)
    if name in OFF and value in (None, False, "", [], {}):
        return Meaning("implied", {}, "it is off")
    why = f"remove it; if Megatron-Core has it and it is right here, add it as policy.megatron.transformer.{name}"
    return Meaning("refused", {}, why)


def _balancing(settings: Settings, key: str, name: str) -> Meaning:
    prefix = key.removesuffix(name)
    kind, coefficient = settings[f"{prefix}moe_router_load_balancing_type"], settings[f"{prefix}moe_aux_loss_coeff"]
    if kind == "none" or not coefficient:
        return Meaning("implied", {}, "no load is balanced by a loss")
    if kind not in BALANCED:
        why = f"policy.load_balancing_loss counts all tokens of a mini-batch, which {kind} does not"
        return Meaning("refused", {}, why)
    return Meaning("used", {"policy.load_balancing_loss": coefficient})


def ddp(settings: Settings, key: str, value: Any) -> Meaning:
    """A field of `megatron.override_ddp_config`."""
    name = key.rpartition("override_ddp_config")[2].lstrip(".")
    if not settings.is_megatron or (key.startswith("critic.") and not settings.has_critic):
        return Meaning("implied", {}, "verl does not read it in this run")
    if name in DDP_SPEED:
        return Meaning("implied", {}, "the project chooses how gradients travel")
    if name == "grad_reduce_in_fp32":
        if value:
            return Meaning("implied", {}, "gradients are added in float32 by default")
        owner = "critic" if key.startswith("critic.") else "policy"
        return Meaning("mapped", {f"{owner}.optimizer.gradients": "bfloat16"}, "gradients are added in bfloat16")
    return Meaning("refused", {}, f"remove it, or see policy.megatron.ddp and policy.optimizer.gradients for {name}")


def optimizer(settings: Settings, key: str, value: Any) -> Meaning:
    """A field of `optim` that the learning rate and its schedule do not have."""
    owner = "critic" if key.startswith("critic.") else "policy"
    name = key.rpartition("optim.")[2].removeprefix("override_optimizer_config").lstrip(".")
    if owner == "critic" and not settings.has_critic:
        return Meaning("implied", {}, "this estimator has no critic")
    if name in OPTIMIZER_FIXED:
        return _fixed(OPTIMIZER_FIXED[name], name, value)
    if name == "optimizer_cpu_offload" and value:
        return Meaning("used", {f"{owner}.optimizer.offload": True})
    if name in OPTIMIZER_SPEED or (name == "optimizer_cpu_offload" and not value):
        return Meaning("implied", {}, "policy.optimizer is in its place")
    if name in ("eps", "adam_eps") and value is not None:
        return Meaning("used", {f"{owner}.optimizer.eps": value})
    if name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype") and DTYPES.get(value) == "bfloat16":
        ours = "gradients" if name == "main_grads_dtype" else "moments"
        return Meaning("mapped", {f"{owner}.optimizer.{ours}": "bfloat16"})
    if name.endswith("_dtype") and (value is None or DTYPES.get(value) == "float32"):
        return Meaning("implied", {}, "it is the default")
    kind = str(settings[f"{key.partition('optim.')[0]}optim.optimizer"] or "adam")
    if name.startswith("muon_") and "muon" not in kind:
        return Meaning("implied", {}, "the optimizer is not Muon")
    if name in UNSET and value in (None, False):
        return Meaning("implied", {}, "it is off")
    return Meaning("refused", {}, f"{owner}.optimizer has no such key; megatron-rl config prints its keys")


def _fixed(known: tuple[tuple[Any, ...], str], name: str, value: Any) -> Meaning:
    values, why = known
    if value in values:
        return Meaning("implied", {}, why)
    return Meaning("refused", {}, f"{why}; {name} has no other value here")


def routing(settings: Settings, key: str, value: Any) -> Meaning:
    """The replay of the choice of experts. R2 is the trainer's own choice, R3 the engine's."""
    if value in (None, False, "disabled"):
        return Meaning("implied", {}, "no choice is replayed by default")
    modes = [settings[f"{ACTOR}.{place}router_replay.mode"] for place in ("", "megatron.", "veomni.")]
    if value == "R2" or "R2" in modes:
        return Meaning("refused", {}, "experts are replayed from the engine only; policy.routing_replay is R3")
    return Meaning("used", {"policy.routing_replay": True})
