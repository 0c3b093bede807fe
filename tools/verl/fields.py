"""The meaning of Megatron-Core's own fields, which verl passes on: of its model, its optimizer, and their neighbours.

A field that only changes speed or memory has no meaning here, because the project chooses it; a field that changes what
is trained is mapped or refused; and a field that is not in the lists below is refused by its name.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from megatron_rl.tools.verl.settings import ACTOR, Meaning, Settings

SPEED = (
    *(
        "*fusion*",
        "*fused*",
        "*overlap*",
        "tp_comm_*",
        "*deepep*",
        "*cuda_graph*",
        "*offload*",
        "batch_p2p*",
        "*hybridep*",
    ),
    *("moe_token_dispatcher_type", "moe_grouped_gemm", "moe_use_legacy_grouped_gemm", "moe_layer_recompute"),
    *("persist_layer_norm", "deallocate_pipeline_outputs", "attention_backend", "variable_seq_lengths"),
    *("use_cpu_initialization", "distribute_saved_activations", "max_seqlen_per_dp_cp_rank", "sequence_parallel"),
    *("memory_efficient_layer_norm", "inference_*", "dsa_indexer_use_sparse_loss", "calculate_per_token_loss"),
)
"""Patterns of the model's fields that the project chooses itself."""
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
OPTIMIZER_SPEED = (
    *("*offload*", "overlap_*", "use_precision_aware_optimizer", "use_layer_wise_distributed_optimizer", "foreach"),
    *("fused", "capturable", "store_param_remainders", "use_torch_optimizer_for_cpu_offload", "lr_wsd_decay_style"),
)
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
    if any(fnmatchcase(name, pattern) for pattern in SPEED):
        return Meaning("implied", {}, "the project chooses how layers are computed")
    if key.startswith("critic."):
        if not settings.has_critic or value in (None, False, 0) or name.startswith("recompute_"):
            return Meaning("implied", {}, "critic and policy recompute alike, and a critic adds no losses of experts")
        return Meaning("not expressible", {}, f"the critic's layers have no setting for {name} here")
    if name == "moe_router_enable_expert_bias":
        return Meaning("implied", {}, "the model's family says whether its routers have a bias")
    if name == "moe_router_bias_update_rate":
        return Meaning("used", {"policy.router_bias_update_rate": value or 0.0})
    if name == "moe_z_loss_coeff":
        return Meaning("used", {"policy.router_z_loss": value or 0.0})
    if name in ("moe_aux_loss_coeff", "moe_router_load_balancing_type"):
        return _balancing(settings, key, name)
    if name == "pipeline_model_parallel_layout" and value:
        why = "auto balances the stages; for numbers of your own give a list"
        return Meaning("mapped", {"policy.parallel.layers": "auto"}, why)
    if value in (None, False, "", [], {}):
        return Meaning("implied", {}, "it is off")
    why = f"if Megatron-Core has it and it is right here, add it as policy.megatron.transformer.{name}"
    return Meaning("not expressible", {}, why)


def _balancing(settings: Settings, key: str, name: str) -> Meaning:
    prefix = key.removesuffix(name)
    kind, coefficient = settings[f"{prefix}moe_router_load_balancing_type"], settings[f"{prefix}moe_aux_loss_coeff"]
    if kind == "none" or not coefficient:
        return Meaning("implied", {}, "no load is balanced by a loss")
    if kind not in BALANCED:
        why = f"policy.load_balancing_loss counts all tokens of a mini-batch, which {kind} does not"
        return Meaning("not expressible", {}, why)
    return Meaning("used", {"policy.load_balancing_loss": coefficient})


def ddp(settings: Settings, key: str, value: Any) -> Meaning:
    """A field of `megatron.override_ddp_config`."""
    name = key.rpartition("override_ddp_config")[2].lstrip(".")
    if any(fnmatchcase(name, one) for one in ("", "overlap_*", "bucket_size", "*pad*", "*nccl*", "check_for_*")):
        return Meaning("implied", {}, "the project chooses how gradients travel")
    if name == "grad_reduce_in_fp32" and value:
        return Meaning("implied", {}, "gradients are added in fp32 by default")
    if value in (None, False, 0):
        return Meaning("implied", {}, "it is off")
    return Meaning("not expressible", {}, f"see policy.megatron.ddp and policy.optimizer.gradients for {name}")


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
    if name in ("", "total_training_steps") or any(fnmatchcase(name, pattern) for pattern in OPTIMIZER_SPEED):
        return Meaning("implied", {}, "policy.optimizer is in its place")
    if name in ("eps", "adam_eps") and value is not None:
        return Meaning("used", {f"{owner}.optimizer.eps": value})
    if name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype") and DTYPES.get(value) == "bfloat16":
        ours = "gradients" if name == "main_grads_dtype" else "moments"
        return Meaning("mapped", {f"{owner}.optimizer.{ours}": "bfloat16"})
    if value in (None, False, "", [], {}) or DTYPES.get(value) == "float32":
        return Meaning("implied", {}, "it is the default" if value else "it is off")
    kind = str(settings[f"{key.partition('optim.')[0]}optim.optimizer"] or "adam")
    if name.startswith("muon_") and "muon" not in kind:
        return Meaning("implied", {}, "the optimizer is not Muon")
    return Meaning("not expressible", {}, f"{owner}.optimizer has no such key; megatron-rl config prints its keys")


def _fixed(known: tuple[tuple[Any, ...], str], name: str, value: Any) -> Meaning:
    values, why = known
    if value in values:
        return Meaning("implied", {}, why)
    return Meaning("not expressible", {}, f"{why}; {name} has no other value here")


def routing(settings: Settings, key: str, value: Any) -> Meaning:
    """The replay of the choice of experts. R2 is the trainer's own choice, R3 the engine's."""
    if value in (None, False, "disabled"):
        return Meaning("implied", {}, "no choice is replayed by default")
    modes = [settings[f"{ACTOR}.{place}router_replay.mode"] for place in ("", "megatron.", "veomni.")]
    if "R2" in modes:
        return Meaning("not expressible", {}, "experts are replayed from the engine only; policy.routing_replay is R3")
    return Meaning("used", {"policy.routing_replay": True})
