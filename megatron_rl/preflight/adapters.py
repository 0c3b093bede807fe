"""What is wrong with the adapters of a run (`policy.lora`), before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from megatron_rl.config.policy import LoraConfig, ModelConfig, PolicyConfig
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig
from megatron_rl.loop.checkpoints import Resume, find_checkpoints
from megatron_rl.models import FAMILIES, critic_shape, linear_layers
from megatron_rl.models.adapters import OUTPUT, linear_names
from megatron_rl.models.hub import MANIFEST
from megatron_rl.models.peft import TENSORS, base_form, base_of, read_adapters, require_base, require_fitting
from megatron_rl.planning.adapters import SLOT_RANKS
from megatron_rl.types import LatentAttention, ModelShape


def faults_of_adapters(config: BaseConfig, shape: ModelShape) -> list[str]:
    """
    Args:
        shape: the policy's sizes.
    """
    found: list[str] = []
    if config.policy.lora is not None:
        found += _faults(config.policy, config.policy.lora, shape, config.model)
        if isinstance(config, GrpoRunConfig) and config.rollout.replay is None and config.served_adapters:
            found += [f"{fault}, or set rollout.lora: merged" for fault in unserved(config, config.policy.lora, shape)]
    if isinstance(config, GrpoRunConfig) and config.critic and config.critic.lora:
        model = config.critic.model or config.model
        of_critic = _faults(config.critic.trainer, config.critic.lora, critic_shape(shape), model)
        found += [fault.replace("policy.", "critic.") for fault in of_critic]
    return found


def notes_on_adapters(config: BaseConfig) -> Iterator[str]:
    """What a user should know of adapters, and of adapters that a run begins with."""
    optimizer, rollout = config.policy.optimizer, getattr(config, "rollout", None)
    if config.policy.lora and rollout and rollout.lora == "merged" and config.model.dtype != "float32":
        if "rounding" in optimizer.model_fields_set and optimizer.rounding == "dithered":
            yield (
                "policy.optimizer.rounding is dithered, and the weights that rollout.lora: merged sends to engines are "
                "rounded to the nearest number all the same"
            )
    sections = {"policy": config.policy.lora, "critic": getattr(getattr(config, "critic", None), "lora", None)}
    for section, lora in sections.items():
        if lora is None or lora.start is None or not (lora.start / TENSORS).is_file():
            continue
        with suppress(ValueError):  # a fault, which `faults_of_adapters` tells
            if (found := base_form(lora.start)) not in ("", lora.base):
                yield (
                    f"the adapters in {lora.start} were trained on a base model with {section}.lora.base {found}, and "
                    f"this run has {lora.base}, so it begins with a slightly different model"
                )


def faults_of_resumed_base(config: BaseConfig, resume: Resume) -> list[str]:
    """Compare the base model with the one that the adapters of the checkpoint to resume from were trained on."""
    saved = find_checkpoints(config.run_folder / "checkpoints")
    if config.policy.lora is None or resume is None or not saved:
        return []
    folder = saved[max(saved) if resume == "auto" else resume]
    try:
        told = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["training"].get("base", "")
        require_base(told, config.model.weights or config.model.path, f"the adapters of {folder}")
    except (ValueError, OSError, LookupError, AttributeError) as error:
        return [f"model.path: {error}"]
    return []


def _faults(policy: PolicyConfig, lora: LoraConfig, shape: ModelShape, model: ModelConfig) -> Iterator[str]:
    known = linear_layers(shape)
    nameable = [*known, OUTPUT]
    if unknown := [name for name in lora.adapters.targets if name not in nameable]:
        yield (
            f"policy.lora.targets has {', '.join(unknown)}, but the linear layers of {shape.family} are "
            f"{', '.join(nameable)}"
        )
    if OUTPUT in lora.adapters.targets:
        yield from _faults_of_output(policy, lora, shape)
    if policy.optimizer.kind == "muon":
        yield "policy.lora needs policy.optimizer.kind adam: Muon on A and B has not been tried"
    if policy.router_bias_update_rate:
        yield "policy.router_bias_update_rate moves weights, which policy.lora freezes; leave one of them out"
    if lora.start is None:
        return
    try:
        found = read_adapters(lora.start)
    except (ValueError, OSError) as error:
        yield f"policy.lora.start: {error}"
        return
    mine = lora.adapters
    for key, has, wanted in (("rank", found.rank, mine.rank), ("alpha", found.alpha, mine.alpha)):
        if has != wanted:
            yield f"policy.lora.{key} is {wanted:g}, but the adapters in {lora.start} have {has:g}; set it to {has:g}"
    if found.rank_stabilised != mine.rank_stabilised:
        theirs, ours = (str(one.rank_stabilised).lower() for one in (found, mine))
        yield (
            f"policy.lora.rank_stabilised is {ours}, but use_rslora of the adapters in {lora.start} is {theirs}; set "
            f"it to {theirs}"
        )
    try:
        weights = model.weights or model.path
        require_fitting(lora.start, replace(shape, adapters=found), weights)
        if weights.is_dir():
            require_base(base_of(lora.start), weights, f"the adapters in {lora.start}")
    except (ValueError, OSError) as error:
        yield f"policy.lora.start: {error}"
        return
    if set(found.targets or known) != set(mine.targets or known):
        yield (
            f"policy.lora.start: the adapters in {lora.start} are for {', '.join(found.targets)}; set "
            "policy.lora.targets to them"
        )


def _faults_of_output(policy: PolicyConfig, lora: LoraConfig, shape: ModelShape) -> Iterator[str]:
    if shape.value_head:
        yield f"policy.lora.targets has {OUTPUT}, and a critic has a value head in its place; leave it out"
    elif shape.tied_embeddings:
        yield (
            f"policy.lora.targets has {OUTPUT}, but the output layer of this model is its embedding "
            "(tie_word_embeddings), which has no adapter; leave it out"
        )
    if len(lora.adapters.targets) == 1 and policy.parallel.pipeline > 1:
        yield (
            f"policy.lora.targets is {OUTPUT} alone, so only the last pipeline stage would train; name another layer, "
            "too, or set policy.parallel.pipeline to 1"
        )


def unserved(config: GrpoRunConfig, lora: LoraConfig, shape: ModelShape) -> Iterator[str]:
    """Adapters that vLLM cannot serve, or has not been tried with."""
    targets, family = lora.adapters.targets or linear_layers(shape), FAMILIES[shape.family]
    if OUTPUT in targets:
        yield f"policy.lora.targets has {OUTPUT}, and engines serve no adapter of the output layer; leave it out"
    if shape.has_linear_attention:
        yield f"policy.lora: vLLM's adapters have not been tried in a model with linear attention, {shape.family}"
    if isinstance(shape.attention, LatentAttention):
        yield (
            f"policy.lora: vLLM decodes latent attention with matrices that it makes of kv_b_proj, and adds no adapter "
            f"to them; train the adapters of {shape.family} with `megatron-rl sft`"
        )
    if shape.mixture:
        attention = linear_names(family.block_rules(shape.attention))
        if left := [name for name in targets if name in linear_layers(shape) and name not in attention]:
            yield (
                f"policy.lora.targets means {', '.join(left)}, too: engines serve no adapters of experts; choose "
                f"{', '.join(attention)}"
            )
        if not config.cluster.gpus_per_engine_rank:
            yield (
                'policy.lora: vLLM computes a mixture with adapters by a kernel for GPUs alone (it ends with "module '
                "'triton.language' has no attribute 'float32'\"), and the engines of this run are on CPUs; leave it out"
            )
    if lora.base == "fp8":
        yield (
            "policy.lora.base is fp8, and engines that serve adapters compute with weights that are not rounded to "
            "fp8; leave it out"
        )
    if lora.rank > SLOT_RANKS[-1]:
        yield f"policy.lora.rank is {lora.rank}, and vLLM serves at most {SLOT_RANKS[-1]}; lower it"
    if config.rollout.quantization:
        yield (
            f"rollout.quantization is {config.rollout.quantization}: it has not been tried with adapters that vLLM "
            "serves; leave it out"
        )
    if config.model.weights is not None:
        yield (
            "model.weights: with policy.lora the engines load the base model from model.path; convert the weights to a "
            "Hugging Face folder, and give it as model.path"
        )
