"""The meaning of verl's settings of batches, optimizers, GPUs and parallelism."""

from __future__ import annotations

from typing import Any

from megatron_rl.migrate.verl.settings import ACTOR, ROLLOUT, Meaning, Settings, implied, mapped, owner_of, refused

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
    prompts, owner = int(settings["data.train_batch_size"]), key.rpartition(".")[0]
    target = "critic.updates_per_step" if owner == "critic" else "algorithm.updates_per_step"
    uneven = prompts % int(value) and prompts > int(value)
    more = "; the mini-batches are of equal size here" if uneven else ""
    why = f"{prompts} prompts of a step / {value} of a mini-batch{more}"
    return mapped({target: settings.updates_per_step(owner)}, why)


def epochs(settings: Settings, key: str, value: Any) -> Meaning:
    """The number of times that a training step trains on each of its samples."""
    owner = key.rpartition(".")[0]
    target, other = ("critic.epochs", ACTOR) if owner == "critic" else ("algorithm.epochs", "critic")
    is_shuffled = bool(settings[f"{owner}.shuffle"])
    if value == 1:
        return mapped({target: 1}) if owner == "critic" else implied("every answer is trained on once")
    repeats = int(settings[f"{other}.ppo_epochs"]) > 1 and (other != "critic" or settings.has_critic)
    if repeats and bool(settings[f"{other}.shuffle"]) != is_shuffled:
        return refused(
            "actor.shuffle and critic.shuffle differ, and here algorithm.reshuffle is for both; make them equal"
        )
    return mapped({target: value, "algorithm.reshuffle": is_shuffled})


def is_dynamic(settings: Settings, key: str, value: Any) -> Meaning:
    why = "samples are always packed up to a number of tokens"
    if value:
        return implied(why)
    tokens = max(16384, _rounded(settings.longest))
    return mapped(
        {"balance.max_tokens_per_microbatch": tokens}, f"{why}; without one it is 16384, or the longest answer"
    )


def token_bound(settings: Settings, key: str, value: Any) -> Meaning:
    if not settings[f"{ACTOR}.use_dynamic_bsz"]:
        return implied("verl reads it with use_dynamic_bsz only")
    tokens = int(value) * settings.context
    ways = f"{value} x {settings.context} ranks of a sequence" if settings.context > 1 else "tokens of a micro-batch"
    if tokens < settings.longest:
        ways = f"{ways} = {tokens} is shorter than the longest answer, which must fit"
    return mapped({"balance.max_tokens_per_microbatch": max(tokens, _rounded(settings.longest))}, ways)


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
    sizes: dict[str, int | None] = dict.fromkeys(MESH.values())
    if settings.is_megatron:
        prefix = "critic.megatron" if owner == "critic" else f"{ACTOR}.megatron"
        sizes = {ours: settings[f"{prefix}.{theirs}"] for theirs, ours in MESH.items()}
    else:
        sizes |= settings.mesh or {"tensor": 1, "context": settings.context}
    split = (sizes["tensor"] or 1) * (sizes["pipeline"] or 1) * (sizes["context"] or 1)
    return {**sizes, "data": settings.num_trainer_gpus // split if settings.num_trainer_gpus % split == 0 else None}


def parallel(settings: Settings, key: str, value: Any) -> Meaning:
    """A size of Megatron's mesh, of the actor or of the critic."""
    if value is None:
        return implied("null is the default")
    return Meaning("used", {f"{owner_of(key)}.parallel.{MESH[key.rpartition('.')[2]]}": value})


def gpus(settings: Settings, key: str, value: Any) -> Meaning:
    """`trainer.nnodes` and `trainer.n_gpus_per_node`: the ranks of the trainer, and what shares the GPUs."""
    if key.endswith("n_gpus_per_node"):
        to = {"cluster.gpus_per_node": value, "cluster.gpus_per_trainer": 1, "cluster.gpus_per_engine_rank": 1}
        return mapped(to, "every trainer rank and every engine rank has a GPU")
    to = {"cluster.ray_address": "auto"} if value > 1 else {}
    world = settings.num_trainer_gpus
    for owner in ("policy", "critic") if settings.has_critic else ("policy",):
        sizes = mesh_of(settings, owner)
        if sizes["data"] is None:
            why = f"{world} GPUs are no multiple of tensor x pipeline x context of {owner}.parallel; correct the sizes"
            return Meaning("refused", to, why)
        if settings.is_megatron:
            sizes = {"data": sizes["data"]}
        to |= {f"{owner}.parallel.{name}": size for name, size in sizes.items() if size is not None}
    return mapped(to, f"{world} trainer ranks" + ("" if settings.is_megatron else f", {settings.mesh_reason}"))


def fsdp(settings: Settings, key: str, value: Any) -> Meaning:
    """Keys that say how an engine without Megatron-Core splits weights and tokens."""
    if value in (1, -1) and not key.endswith("fsdp_size"):
        return implied("1 is the default")
    sizes = {name: size for name, size in mesh_of(settings, "policy").items() if size and (size > 1 or name == "data")}
    to = {f"policy.parallel.{name}": size for name, size in sizes.items()}
    return mapped(to, f"the trainer is Megatron-Core; {settings.mesh_reason}")


def hybrid(settings: Settings, key: str, value: Any) -> Meaning:
    if settings.is_apart:
        return mapped({"cluster.colocate": False, "rollout.max_lag": 1}, "engines have GPUs of their own")
    return mapped({"cluster.colocate": True}, "trainers and engines take turns on the same GPUs")


def engines(settings: Settings, key: str, value: Any) -> Meaning:
    """Tensor and pipeline parallelism of an engine, and from it the number of engines."""
    tensor, stages, number = engine_sizes(settings)
    given, total = settings[f"{ROLLOUT}.tensor_model_parallel_size"], settings.num_engine_gpus
    of_stages = {"rollout.parallel.pipeline": stages} if stages > 1 else {}
    if key.endswith("pipeline_model_parallel_size"):
        return Meaning("used", of_stages) if of_stages else implied("one stage is the default")
    to = {"rollout.parallel.tensor": tensor, "rollout.num_engines": number, **of_stages}
    if not settings.is_apart and tensor * stages > gpus_of_engine_node(settings):
        why = "an engine on the trainer's GPUs is in one node; give engines GPUs of their own (cluster.colocate=false)"
        return Meaning("left out", to, why)
    if total < tensor * stages:
        return refused(f"{total} GPUs are left for engines, and one has {tensor * stages}; lower it, or give more GPUs")
    if number * tensor * stages != total:
        why = f"{total} GPUs are no multiple of {tensor * stages}, the GPUs of an engine; lower rollout.parallel.tensor"
        return Meaning("left out", to, why)
    if tensor != given:
        where = "stages span the nodes" if settings.is_apart else "an engine on the trainer's GPUs is in one node"
        return mapped(to, f"{given} GPUs of an engine: tensor ranks are in one node, and {where}")
    return Meaning("used", to, f"{total} GPUs / {tensor * stages} of an engine")


def engine_sizes(settings: Settings) -> tuple[int, int, int]:
    """Tensor ranks and stages of an engine, and the number of engines. The tensor ranks of an engine are in one node,
    so a larger number becomes stages. An engine that shares GPUs with trainers is in one node as a whole, and has no
    more ranks than the node."""
    tensor = int(settings[f"{ROLLOUT}.tensor_model_parallel_size"])
    stages = int(settings[f"{ROLLOUT}.pipeline_model_parallel_size"] or 1) * settings.more_stages
    of_node = gpus_of_engine_node(settings)
    if tensor > of_node and tensor % of_node == 0:
        tensor, stages = of_node, stages * (tensor // of_node) if settings.is_apart else stages
    return tensor, stages, max(settings.num_engine_gpus // (tensor * stages), 1)


def gpus_of_engine_node(settings: Settings) -> int:
    return int(settings["rollout.n_gpus_per_node"] or settings["trainer.n_gpus_per_node"])


def engine_experts(settings: Settings, key: str, value: Any) -> Meaning:
    tensor = settings[f"{ROLLOUT}.tensor_model_parallel_size"]
    if value in (None, 1):
        return implied("the default")
    over = f"experts are distributed over the {tensor} tensor ranks of an engine"
    why = "" if value == tensor else f"{over}; for {value}, raise rollout.parallel.tensor"
    return Meaning("mapped" if why else "used", {"rollout.parallel.expert": tensor}, why)
