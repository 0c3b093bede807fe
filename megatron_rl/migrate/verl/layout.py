"""The trainer's layout where verl's does not carry over: FSDP has no tensor or pipeline parallelism, and a layout of
Megatron's may need more memory here.

The planner of `megatron-rl size-run` chooses, if the sizes of the model are known: its folder exists, or
configs/model has a file of its name. Otherwise the number of billions in the model's name gives a first guess.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.migrate.verl.conversion import Converted, convert
from megatron_rl.migrate.verl.machine import engine_sizes, gpus_of_engine_node, mesh_of
from megatron_rl.migrate.verl.settings import Settings
from megatron_rl.models import FAMILIES
from megatron_rl.planning.layouts import Layout, fitting_layouts
from megatron_rl.planning.memory import run_memory
from megatron_rl.planning.shapes import planned_shape
from megatron_rl.planning.stages import with_layers
from megatron_rl.preflight.adapters import unserved
from megatron_rl.types import ModelShape

TRAINED_BYTES = 6
"""The bytes of a parameter on a rank: its weight in bfloat16 and its gradient in fp32."""
GUESSED_SHARE = 24e9
"""A rank with fewer bytes of weights and gradients is not split further in the first guess."""


CHANGED = "changed to fit into the GPUs: "
CHANGEABLE = ("policy.", "critic.parallel", "model.recompute", "rollout.gpu_memory_utilization")
NONE_FITS = "no layout of the trainer fits"
MORE = "; set trainer.nnodes higher, or cluster.gpu_memory_gb to the memory of your GPUs"
MORE_STAGES = (1, 2, 3, 4)
"""The factors that are tried for the stages of an engine, until its weights fit next to the trainer's."""
SHARES = (0.0, -0.05, -0.1, -0.15, -0.2, 0.1, 0.2, 0.3, 0.4)
"""What is then added to the share of the memory that vLLM may use, until weights and a longest answer fit into it, and
it fits next to the trainer."""


def converted(settings: Settings) -> tuple[Converted, list[str]]:
    """The configuration with a layout, and sentences about what was changed for it."""
    found, notes = _fitting(settings)
    found.open += [note for note in notes if note.startswith(NONE_FITS)]
    notes = [note for note in notes if note not in found.open]
    config = _read(found.configuration)
    shape = _shape(config)
    if config is None or shape is None or config.policy.lora is None or config.rollout.lora == "merged":
        return found, notes
    if (problem := next(unserved(config, config.policy.lora, shape), None)) is not None:
        found.configuration["rollout"]["lora"] = "merged"
        notes.append(f"rollout.lora is merged, because engines do not serve these adapters: {problem}")
    return found, notes


def _fitting(settings: Settings) -> tuple[Converted, list[str]]:
    first: tuple[Converted, list[str]] | None = None
    for factor in MORE_STAGES:
        settings.more_stages = factor
        tensor, stages, _ = engine_sizes(settings)
        if first is not None and not settings.is_apart and tensor * stages > gpus_of_engine_node(settings):
            continue
        found, notes = _with_trainer(settings)
        first = first or (found, notes)
        if notes and notes[-1].startswith(NONE_FITS):
            return first
        if _read(found.configuration) is None:
            if factor == 1:
                return first
            continue
        rollout = found.configuration["rollout"]
        share = rollout["gpu_memory_utilization"]
        for more in SHARES:
            rollout["gpu_memory_utilization"] = round(share + more, 3) if more else share
            if 0 < share + more < 1 and not _problems(found.configuration):
                notes += [f"{CHANGED}an engine has {factor} times as many stages"] if factor > 1 else []
                notes += [f"{CHANGED}rollout.gpu_memory_utilization is {share + more:.3g}"] if more else []
                _follow(found)
                return found, notes
        rollout["gpu_memory_utilization"] = share
    assert first is not None, "there are factors"
    return first


def _shape(config: GrpoRunConfig | None) -> ModelShape | None:
    """The sizes of the model; None if they are not known."""
    try:
        return None if config is None else planned_shape(config)
    except ValueError:
        return None


def _problems(configuration: dict[str, Any]) -> list[str]:
    """What does not fit into the memory of the GPUs, or cannot be split; nothing if the model's sizes are not known."""
    config = _read(configuration)
    if config is None:
        return ["the configuration is not valid"]
    shape = _shape(config)
    try:
        return [] if shape is None else _lacking(config, shape)
    except ValueError as error:
        return [str(error)]


def _lacking(config: GrpoRunConfig, shape: ModelShape) -> list[str]:
    """What does not fit into the memory of the GPUs.

    Raises:
        ValueError: the model cannot be split as configured.
    """
    config = with_layers(config)
    FAMILIES[shape.family].check_mesh(shape, config.policy.parallel.mesh)
    return list(run_memory(config, shape).problems)


def _with_trainer(settings: Settings) -> tuple[Converted, list[str]]:
    """The configuration with a layout of the trainer, for engines of the present number of stages."""
    if not settings.is_megatron:
        settings.mesh = {"tensor": 1, "context": settings.context}
    found = convert(settings)
    config = _read(found.configuration)
    shape = _shape(config)
    if shape is None or config is None:
        if settings.is_megatron:
            return found, []
        settings.mesh, settings.mesh_reason = guessed_mesh(settings)
        text = "the sizes of the model are not known here; once its folder is there, use megatron-rl size-run"
        return convert(settings), [f"policy.parallel is {settings.mesh_reason}: {text}"]
    try:
        if not _lacking(config, shape) and settings.is_megatron:
            return found, []
        if settings.has_critic:
            return _with_critic(settings)
        config = with_layers(config)
        layouts = fitting_layouts(config, shape)
    except ValueError as error:
        return found, [str(error)]
    if not layouts:
        return found, [f"{NONE_FITS} on {settings.num_trainer_gpus} GPUs of {config.cluster.gpu_memory_gb:g} GB{MORE}"]
    best = _nearest(layouts, config, settings)
    if not settings.is_megatron:
        sizes = best.parallel.model_dump(include={"pipeline", "context", "expert"}).items()
        settings.mesh = {name: size for name, size in sizes if size > 1} | {"tensor": best.parallel.tensor}
        settings.mesh |= {"expert_tensor": best.parallel.expert_tensor} if best.parallel.expert_tensor else {}
        settings.mesh_reason = "chosen by the planner of megatron-rl size-run"
        found = convert(settings)
    changes = _replace(found.configuration, best)
    _follow(found)
    return found, _told(changes)


def _told(changes: list[str]) -> list[str]:
    return [f"{CHANGED}{', '.join(dict.fromkeys(changes))}"] if changes else []


def _with_critic(settings: Settings) -> tuple[Converted, list[str]]:
    """The first layout that fits with a critic on the same GPUs: policy and critic are split alike, with more tensor
    parallelism, recomputation and offloaded optimizers only where they must be."""
    sizes = mesh_of(settings, "policy")
    others = {name: sizes[name] or 1 for name in ("pipeline", "context")}
    ways = settings.num_trainer_gpus // (others["pipeline"] * others["context"])
    tensors = [one for one in (1, 2, 4, 8) if one >= (sizes["tensor"] or 1) and ways % one == 0]
    for offload, tensor, recompute in product((False, True), tensors, ("none", "full")):
        found = convert(settings)
        configuration, changes = found.configuration, []
        policy, critic, model = (configuration[name] for name in ("policy", "critic", "model"))
        if recompute == "none" and model.get("recompute") == "full":
            continue
        if tensor != (sizes["tensor"] or 1) or not settings.is_megatron:
            parallel = {**others, "tensor": tensor, "data": ways // tensor}
            for one in (policy, critic):
                one["parallel"] = {name: size for name, size in parallel.items() if size > 1}
            changes += [f"both have tensor {tensor}"] if tensor > 1 else []
        for one in (model, critic.get("model", {})) if recompute == "full" else ():
            changes += ["model.recompute is full"] if one and one.get("recompute") != "full" else []
            one["recompute"] = "full"
        if offload:
            changes.append("policy.optimizer.offload and critic.optimizer.offload are true")
            policy["optimizer"]["offload"] = critic["optimizer"]["offload"] = True
        if not _problems(configuration):
            _follow(found)
            return found, _told(changes)
    return convert(settings), [f"{NONE_FITS} together with a critic on {settings.num_trainer_gpus} GPUs{MORE}"]


def _nearest(layouts: list[Layout], config: GrpoRunConfig, settings: Settings) -> Layout:
    """The fastest layout among the ones that are most like the script's: of the same sizes where verl's trainer is
    Megatron-Core, then with the same recomputation, and with as many ranks of a sequence."""

    def differences(layout: Layout) -> tuple[bool, ...]:
        return (
            settings.is_megatron and layout.parallel != config.policy.parallel,
            layout.recompute != config.model.recompute,
            layout.parallel.context != settings.context,
        )

    return min(layouts, key=differences)


def _follow(found: Converted) -> None:
    """Update the report's rows to the values that the configuration has now, after its layout was changed to fit."""
    for rows in (found.rows, found.defaults):
        for number, row in enumerate(rows):
            present = {target: value for target in row.to if (value := _value(found, target)) is not None}
            differs = any(present.get(target) != value for target, value in row.to.items() if value not in (1, None))
            if differs and any(target.startswith(CHANGEABLE) for target in row.to):
                why = f"{row.why}; changed to fit" if row.why else "changed to fit"
                rows[number] = replace(row, status="mapped", to=present, why=why)


def _value(found: Converted, target: str) -> Any:
    place: Any = found.configuration
    for name in target.split("."):
        place = place.get(name) if isinstance(place, dict) else None
    return place


def guessed_mesh(settings: Settings) -> tuple[dict[str, int], str]:
    """The sizes of the trainer by the number of billions in the model's name."""
    size = re.search(r"(\d+(?:\.\d+)?)\s?[bB](?![a-z])", settings.model_name)
    num_parameters = float(size[1]) * 1e9 if size else 7e9
    tensor, gpus = 1, settings.num_trainer_gpus // settings.context
    while tensor < 8 and num_parameters * TRAINED_BYTES / tensor > GUESSED_SHARE and gpus % (2 * tensor) == 0:
        tensor *= 2
    text = f"of about {size[1]} billion parameters, by its name" if size else "of unknown size"
    return {"tensor": tensor, "context": settings.context}, f"a first guess for a model {text}"


def _read(configuration: dict[str, Any]) -> GrpoRunConfig | None:
    """The configuration, with one step if the number of steps is not known yet; None if it is not valid. Rewards do not
    change what fits."""
    run = {"name": "run", "steps": 1, **configuration.get("run", {})}
    rewards = [{"kind": "compute_score", "path": "any.py:reward"}]  # one may still need its url
    try:
        return validate(GrpoRunConfig, {**configuration, "run": run, "rewards": rewards})
    except ValueError:
        return None


def _replace(configuration: dict[str, Any], layout: Layout) -> list[str]:
    """Give the configuration the layout; returns what has changed."""
    changes = []
    policy, model = configuration.setdefault("policy", {}), configuration["model"]
    parallel = layout.parallel.model_dump(exclude_defaults=True)
    if layout.parallel.layers is not None:
        parallel["layers"] = list(layout.parallel.layers)
    if {name: size for name, size in policy.get("parallel", {}).items() if size not in (1, None)} != parallel:
        changes.append(f"policy.parallel is {layout.label}")
    policy["parallel"] = parallel
    if model.get("recompute", "none") != layout.recompute:
        changes.append(f"model.recompute is {layout.recompute}")
        model["recompute"] = layout.recompute
    if layout.offload and not policy.get("optimizer", {}).get("offload"):
        changes.append("policy.optimizer.offload is true")
        policy.setdefault("optimizer", {})["offload"] = True
    return changes
