"""The meaning of verl's settings of batches, optimizers, GPUs and parallelism."""

from __future__ import annotations

from typing import Any

from megatron_rl.migrate.verl.settings import ACTOR, ROLLOUT, Meaning, Settings

MESH = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
}
"""Megatron-Core's name of a size -> ours."""
NO_CRITIC = "this estimator has no critic"
SCHEDULES = {
    "dp": ("lr_scheduler_type", "warmup_style"),
    "megatron": ("lr_decay_style",),
    "veomni": ("lr_scheduler_type",),
    "torchtitan": ("decay_type",),
}
"""verl's engines -> their keys of the schedule of the learning rate."""
VLLM_SPEED = (
    *("attention_backend", "cudagraph_capture_sizes", "disable_cascade_attn", "disable_custom_all_reduce"),
    *("disable_log_stats", "disable_mm_preprocessor_cache", "distributed_executor_backend", "enable_chunked_prefill"),
    *("enable_expert_parallel", "enable_prefix_caching", "enable_sleep_mode", "enforce_eager", "all2all_backend"),
    *("max_num_batched_tokens", "max_num_seqs", "max_num_partial_prefills", "mm_processor_cache_gb"),
)
"""Arguments of vLLM that change only speed and memory."""
LOWEST = ("min_lr_ratio", "min_lr", "lr_min", "min_lr_factor")
"""The engines' keys of the rate at the end of the schedule."""
ROUND = 128
"""The bound of a micro-batch is a multiple of this number of tokens, so that the longest answer fits with padding."""


def owner_of(key: str) -> str:
    """The section of ours that a key of verl's actor or critic belongs to."""
    return "critic" if key.startswith("critic.") else "policy"


def absent(settings: Settings, key: str) -> bool:
    """Whether the key is of a critic that the run does not have."""
    return owner_of(key) == "critic" and not settings.has_critic


def mini_batch(settings: Settings, key: str, value: Any) -> Meaning:
    """Prompts of an optimizer step -> optimizer steps of a training step."""
    if absent(settings, key):
        return Meaning("implied", {}, NO_CRITIC)
    prompts = int(settings["data.train_batch_size"])
    steps = max(-(-prompts // int(value)), 1)
    target = "critic.updates_per_step" if owner_of(key) == "critic" else "algorithm.updates_per_step"
    uneven = prompts % int(value) and prompts > int(value)
    more = "; the mini-batches are of equal size here" if uneven else ""
    return Meaning("mapped", {target: steps}, f"{prompts} prompts of a step / {value} of a mini-batch{more}")


def epochs(settings: Settings, key: str, value: Any) -> Meaning:
    if absent(settings, key) or value == 1:
        return Meaning("implied", {}, NO_CRITIC if absent(settings, key) else "every answer is trained on once")
    why = "every answer is trained on once here; use 1, and more updates by a smaller ppo_mini_batch_size"
    return Meaning("refused", {}, why)


def is_dynamic(settings: Settings, key: str, value: Any) -> Meaning:
    if value or not key.startswith(ACTOR):
        return Meaning("implied", {}, "samples are always packed up to a number of tokens")
    tokens = max(16384, _rounded(settings.longest))
    return Meaning(
        "mapped",
        {"balance.max_tokens_per_microbatch": tokens},
        "samples are always packed; without a number of tokens from verl it is 16384, or the longest answer",
    )


def token_bound(settings: Settings, key: str, value: Any) -> Meaning:
    if not key.startswith(ACTOR):
        return Meaning(
            "implied", {}, "critic and policy have the same micro-batches, balance.max_tokens_per_microbatch"
        )
    if not settings[f"{ACTOR}.use_dynamic_bsz"]:
        return Meaning("implied", {}, "verl reads it with use_dynamic_bsz only")
    tokens = int(value) * settings.context
    ways = f"{value} x {settings.context} ranks of a sequence" if settings.context > 1 else "tokens of a micro-batch"
    if tokens < settings.longest:
        ways = f"{ways} = {tokens} is shorter than the longest answer, which must fit"
    bound = max(tokens, _rounded(settings.longest))
    return Meaning("mapped", {"balance.max_tokens_per_microbatch": bound}, ways)


def _rounded(tokens: int) -> int:
    return -(-tokens // ROUND) * ROUND


def warmup(settings: Settings, key: str, value: Any) -> Meaning:
    """The number of steps, or their share. verl counts training steps, and we count optimizer steps."""
    if absent(settings, key):
        return Meaning("implied", {}, NO_CRITIC)
    owner, prefix = owner_of(key), key.rpartition(".")[0]
    steps, ratio = settings[f"{prefix}.lr_warmup_steps"], settings[f"{prefix}.lr_warmup_steps_ratio"]
    has_steps = steps is not None and steps > 0 and settings.engine != "veomni"
    if steps is not None and steps > 0 and settings.engine == "veomni" and not key.endswith("ratio"):
        return Meaning("implied", {}, "verl's VeOmni trainer does not read it, but lr_warmup_steps_ratio")
    if not has_steps and not ratio:
        return Meaning("implied", {}, "no warm-up is the default")
    if key.endswith("ratio") == has_steps:
        return Meaning(
            "implied", {}, f"verl reads {'lr_warmup_steps' if has_steps else 'lr_warmup_steps_ratio'} instead"
        )
    if not has_steps:
        total = num_steps(settings)
        if total is None:
            why = f"it is {ratio} x the training steps, which the number of rows says; give --rows N"
            return Meaning("refused", {}, why)
        steps = int(ratio * total)
    each = settings.updates_per_step if owner == "policy" else _critic_updates(settings)
    why = f"{steps} training steps x {each} optimizer steps"
    return Meaning("mapped", {f"{owner}.optimizer.warmup_steps": steps * each}, why)


def _critic_updates(settings: Settings) -> int:
    size = settings["critic.ppo_mini_batch_size"]
    return max(-(-int(settings["data.train_batch_size"]) // int(size)), 1)


def num_steps(settings: Settings) -> int | None:
    """The number of training steps, which total_training_steps and total_epochs both bound; None if it depends on rows
    that nobody has counted."""
    given = settings["trainer.total_training_steps"]
    if settings.num_rows is None:
        return None if given is None else int(given)
    steps = settings.num_rows // int(settings["data.train_batch_size"]) * int(settings["trainer.total_epochs"])
    return steps if given is None else min(steps, int(given))


def optimizer(settings: Settings, key: str, value: Any) -> Meaning:
    """Numbers with the same meaning: `lr`, `weight_decay`, `betas`."""
    if absent(settings, key):
        return Meaning("implied", {}, NO_CRITIC)
    return Meaning("used", {f"{owner_of(key)}.optimizer.{key.rpartition('.')[2]}": value})


def clip_grad(settings: Settings, key: str, value: Any) -> Meaning:
    if absent(settings, key):
        return Meaning("implied", {}, NO_CRITIC)
    prefix = "critic" if owner_of(key) == "critic" else ACTOR
    if key == f"{prefix}.grad_clip" and (settings.engine != "dp" or f"{prefix}.optim.clip_grad" in settings):
        return Meaning("implied", {}, f"verl's {settings.trainer} trainer reads {prefix}.optim.clip_grad")
    return Meaning("used", {f"{owner_of(key)}.optimizer.clip_grad": value})


def schedule(settings: Settings, key: str, value: Any) -> Meaning:
    """The names of the schedule: `lr_scheduler_type`, `warmup_style`, `lr_decay_style` and `decay_type`."""
    if absent(settings, key):
        return Meaning("implied", {}, NO_CRITIC)
    read = SCHEDULES[settings.engine]
    if key.rpartition(".")[2] not in read:
        return Meaning("implied", {}, f"verl's {settings.trainer} trainer does not read it, but {read[0]}")
    if key not in settings and value in (None, "constant"):
        return Meaning("implied", {}, "the rate is constant by default")
    if value not in ("constant", "linear", "cosine"):
        return Meaning("refused", {}, "the schedules here are constant, linear and cosine")
    owner, prefix = owner_of(key), key.rpartition(".")[0]
    to: dict[str, Any] = {f"{owner}.optimizer.schedule": value}
    if value != "constant" and all(settings[f"{prefix}.{name}"] is None for name in LOWEST):
        to[f"{owner}.optimizer.min_lr_ratio"] = 0.0
    return Meaning("used", to)


def lowest_rate(settings: Settings, key: str, value: Any) -> Meaning:
    """The names in LOWEST; those without `ratio` or `factor` are rates. A constant rate has none."""
    prefix = key.rpartition(".")[0]
    kinds = {settings[f"{prefix}.{name}"] for name in SCHEDULES[settings.engine]}
    if absent(settings, key) or not kinds & {"linear", "cosine"}:
        return Meaning("implied", {}, "the learning rate is constant")
    rate = value if key.endswith(("ratio", "factor")) else value / settings[f"{prefix}.lr"]
    return Meaning("mapped", {f"{owner_of(key)}.optimizer.min_lr_ratio": rate})


def mesh_of(settings: Settings, owner: str) -> dict[str, int | None]:
    """The sizes of a trainer, by our names; FSDP's were chosen by `layout.py`, or are a first guess."""
    if not settings.is_megatron:
        chosen = settings.mesh or {"tensor": 1, "context": settings.context}
        sizes = {name: chosen.get(name) for name in MESH.values()}
    else:
        prefix = "critic.megatron" if owner == "critic" else f"{ACTOR}.megatron"
        sizes = {ours: settings[f"{prefix}.{theirs}"] for theirs, ours in MESH.items()}
    split = (sizes["tensor"] or 1) * (sizes["pipeline"] or 1) * (sizes["context"] or 1)
    return {**sizes, "data": settings.num_trainer_gpus // split if settings.num_trainer_gpus % split == 0 else None}


def parallel(settings: Settings, key: str, value: Any) -> Meaning:
    """A size of Megatron's mesh, of the actor or of the critic."""
    if absent(settings, key):
        return Meaning("implied", {}, NO_CRITIC)
    ours = MESH[key.rpartition(".")[2]]
    if not settings.is_megatron:
        return Meaning("implied", {}, f"verl's trainer of this script is {settings.trainer}, which does not read it")
    if value is None:
        return Meaning("implied", {}, "null is the default")
    return Meaning("used", {f"{owner_of(key)}.parallel.{ours}": value})


def stages(settings: Settings, key: str, value: Any) -> Meaning:
    """Other numbers of layers in the first and the last stage."""
    if absent(settings, key):
        return Meaning("implied", {}, NO_CRITIC)
    if not value:
        return Meaning("implied", {}, "all stages have as many layers by default")
    why = "auto balances the stages, and gives the last one fewer layers; for numbers of your own give a list"
    if owner_of(key) == "critic":
        return Meaning("left out", {}, "give the layers of the critic's stages as the list critic.parallel.layers")
    return Meaning("mapped", {"policy.parallel.layers": "auto"}, why)


def value_clip(settings: Settings, key: str, value: Any) -> Meaning:
    if not settings.has_critic:
        return Meaning("implied", {}, NO_CRITIC)
    return Meaning("used", {"critic.loss.cliprange_value": value})


def gpus(settings: Settings, key: str, value: Any) -> Meaning:
    """`trainer.nnodes` and `trainer.n_gpus_per_node`: the ranks of the trainer, and what shares the GPUs."""
    to: dict[str, Any] = {}
    if key.endswith("n_gpus_per_node"):
        to["cluster.gpus_per_node"] = value
        to |= {"cluster.gpus_per_trainer": 1, "cluster.gpus_per_engine_rank": 1}
        return Meaning("mapped", to, "every trainer rank and every engine rank has a GPU")
    if value > 1:
        to["cluster.ray_address"] = "auto"
    world = settings.num_trainer_gpus
    for owner in ("policy", "critic") if settings.has_critic else ("policy",):
        sizes = mesh_of(settings, owner)
        if sizes["data"] is None:
            why = f"{world} GPUs are no multiple of tensor x pipeline x context of {owner}.parallel; correct the sizes"
            return Meaning("refused", to, why)
        if settings.is_megatron:
            to[f"{owner}.parallel.data"] = sizes["data"]
        else:
            to |= {f"{owner}.parallel.{name}": size for name, size in sizes.items() if size is not None}
    why = f"{world} trainer ranks" + ("" if settings.is_megatron else f", {settings.mesh_reason}")
    return Meaning("mapped", to, why)


def fsdp(settings: Settings, key: str, value: Any) -> Meaning:
    """Keys that say how an engine without Megatron-Core splits weights and tokens."""
    engine = next((one for one in ("veomni", "torchtitan", "megatron") if f".{one}." in key), "dp")
    if settings.engine != engine:
        return Meaning("implied", {}, f"verl's trainer of this script is {settings.trainer}, which does not read it")
    if absent(settings, key):
        return Meaning("implied", {}, NO_CRITIC)
    if value in (1, -1) and not key.endswith("fsdp_size"):
        return Meaning("implied", {}, "1 is the default")
    sizes = {name: size for name, size in mesh_of(settings, "policy").items() if size and (size > 1 or name == "data")}
    to = {f"policy.parallel.{name}": size for name, size in sizes.items()}
    return Meaning("mapped", to, f"the trainer is Megatron-Core; {settings.mesh_reason}")


def hybrid(settings: Settings, key: str, value: Any) -> Meaning:
    if settings.is_apart:
        return Meaning("mapped", {"cluster.colocate": False, "rollout.max_lag": 1}, "engines have GPUs of their own")
    if not settings.is_sharing:
        return Meaning("mapped", {"cluster.colocate": False}, "active sampling needs engines on GPUs of their own")
    return Meaning("mapped", {"cluster.colocate": True}, "trainers and engines take turns on the same GPUs")


def engines(settings: Settings, key: str, value: Any) -> Meaning:
    """Tensor and pipeline parallelism of an engine, and from it the number of engines."""
    tensor, stages, engines = engine_sizes(settings)
    given, total = settings[f"{ROLLOUT}.tensor_model_parallel_size"], settings.num_engine_gpus
    if key.endswith("pipeline_model_parallel_size"):
        if stages > 1:
            return Meaning("used", {"rollout.pipeline": stages})
        return Meaning("implied", {}, "one stage is the default")
    to = {
        "rollout.tensor": tensor,
        "rollout.num_engines": engines,
        **({"rollout.pipeline": stages} if stages > 1 else {}),
    }
    if settings.is_sharing and tensor * stages > gpus_of_engine_node(settings):
        why = "an engine on the trainer's GPUs is in one node; give engines GPUs of their own (cluster.colocate=false)"
        return Meaning("left out", to, why)
    if engines * tensor * stages != total:
        why = f"{total} GPUs are no multiple of {tensor * stages}, the GPUs of an engine; lower rollout.tensor"
        return Meaning("left out", to, why)
    if tensor != given:
        where = "an engine on the trainer's GPUs is in one node" if settings.is_sharing else "stages span the nodes"
        why = f"{given} GPUs of an engine: tensor ranks are in one node, and {where}"
        return Meaning("mapped", to, why)
    return Meaning("used", to, f"{total} GPUs / {tensor * stages} of an engine")


def engine_sizes(settings: Settings) -> tuple[int, int, int]:
    """Tensor ranks and stages of an engine, and the number of engines. The tensor ranks of an engine are in one node,
    so a larger number becomes stages. An engine that shares GPUs with trainers is in one node as a whole, and has no
    more ranks than the node."""
    tensor = int(settings[f"{ROLLOUT}.tensor_model_parallel_size"])
    stages = int(settings[f"{ROLLOUT}.pipeline_model_parallel_size"] or 1) * settings.more_stages
    of_node = gpus_of_engine_node(settings)
    if tensor > of_node and tensor % of_node == 0:
        tensor, stages = of_node, stages if settings.is_sharing else stages * (tensor // of_node)
    return tensor, stages, max(settings.num_engine_gpus // (tensor * stages), 1)


def gpus_of_engine_node(settings: Settings) -> int:
    return int(settings["rollout.n_gpus_per_node"] or settings["trainer.n_gpus_per_node"])


def engine_experts(settings: Settings, key: str, value: Any) -> Meaning:
    tensor = settings[f"{ROLLOUT}.tensor_model_parallel_size"]
    if value in (None, 1):
        return Meaning("implied", {}, "the default")
    if value == tensor:
        return Meaning("used", {"rollout.expert_parallel": True})
    why = f"experts are distributed over the {tensor} tensor ranks of an engine; for {value} ranks raise rollout.tensor"
    return Meaning("mapped", {"rollout.expert_parallel": True}, why)


def engine_replicas(settings: Settings, key: str, value: Any) -> Meaning:
    if value in (None, 1):
        return Meaning("implied", {}, "the default")
    why = "an engine has no data parallelism inside; here each replica is an engine (rollout.num_engines)"
    return Meaning("left out", {}, why)
