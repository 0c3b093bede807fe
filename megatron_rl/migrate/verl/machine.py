"""The meaning of verl's settings of batches, optimizers, GPUs and parallelism."""

from __future__ import annotations

from typing import Any

from megatron_rl.migrate.verl.settings import ACTOR, ROLLOUT, Meaning, Settings, owner_of

MESH = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
}
"""Megatron-Core's name of a size -> ours."""
ROUND = 128
"""The bound of a micro-batch is a multiple of this number of tokens, so that the longest answer fits with padding."""


def mini_batch(settings: Settings, key: str, value: Any) -> Meaning:
    """Prompts of an optimizer step -> optimizer steps of a training step."""
    prompts = int(settings["data.train_batch_size"])
    steps = max(-(-prompts // int(value)), 1)
    target = "critic.updates_per_step" if owner_of(key) == "critic" else "algorithm.updates_per_step"
    uneven = prompts % int(value) and prompts > int(value)
    more = "; the mini-batches are of equal size here" if uneven else ""
    return Meaning("mapped", {target: steps}, f"{prompts} prompts of a step / {value} of a mini-batch{more}")


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


def num_steps(settings: Settings) -> int | None:
    """The number of training steps, which total_training_steps and total_epochs both bound; None if it depends on rows
    that nobody has counted."""
    given = settings["trainer.total_training_steps"]
    if settings.num_rows is None:
        return None if given is None else int(given)
    steps = settings.num_rows // int(settings["data.train_batch_size"]) * int(settings["trainer.total_epochs"])
    return steps if given is None else min(steps, int(given))


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
    ours = MESH[key.rpartition(".")[2]]
    if not settings.is_megatron:
        return Meaning("implied", {}, f"verl's trainer of this script is {settings.trainer}, which does not read it")
    if value is None:
        return Meaning("implied", {}, "null is the default")
    return Meaning("used", {f"{owner_of(key)}.parallel.{ours}": value})


def stages(settings: Settings, key: str, value: Any) -> Meaning:
    """Other numbers of layers in the first and the last stage."""
    if not value:
        return Meaning("implied", {}, "all stages have as many layers by default")
    why = "auto balances the stages, and gives the last one fewer layers; for numbers of your own give a list"
    return Meaning("mapped", {"policy.parallel.layers": "auto"}, why)


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
            return Meaning("used", {"rollout.parallel.pipeline": stages})
        return Meaning("implied", {}, "one stage is the default")
    to = {
        "rollout.parallel.tensor": tensor,
        "rollout.num_engines": engines,
        **({"rollout.parallel.pipeline": stages} if stages > 1 else {}),
    }
    if settings.is_sharing and tensor * stages > gpus_of_engine_node(settings):
        why = "an engine on the trainer's GPUs is in one node; give engines GPUs of their own (cluster.colocate=false)"
        return Meaning("left out", to, why)
    if engines * tensor * stages != total:
        why = f"{total} GPUs are no multiple of {tensor * stages}, the GPUs of an engine; lower rollout.parallel.tensor"
        if total < tensor * stages:
            why = f"{total} GPUs are left for engines, and one has {tensor * stages}; lower it, or give more GPUs"
            return Meaning("refused", {}, why)
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
        return Meaning("used", {"rollout.parallel.expert": tensor})
    over = f"experts are distributed over the {tensor} tensor ranks of an engine"
    return Meaning("mapped", {"rollout.parallel.expert": tensor}, f"{over}; for {value}, raise rollout.parallel.tensor")
