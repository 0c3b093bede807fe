"""What a run with a model that sees images cannot do yet, by key, before anything starts."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config.environment import AgentEnvironment
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig
from megatron_rl.data.pictures import PROCESSOR, cuts_of
from megatron_rl.models.hub import read_header, weight_files
from megatron_rl.models.vision import PREFIXES
from megatron_rl.types import TOWER, ModelShape, Vision


def faults_of_images(config: BaseConfig, shape: ModelShape) -> list[str]:
    """
    Args:
        shape: of the run's model.
    """
    if (vision := shape.vision) is None:
        return []
    asked: dict[str, object] = {
        "policy.vision_tower trained": not isinstance(config, GrpoRunConfig)
        and config.policy.vision_tower == "trained"
        and "rows of this command have no images: leave it out",
        "policy.lora": config.policy.lora is not None
        and config.policy.vision_tower == "trained"
        and "adapters leave the tower frozen: leave policy.vision_tower out",
        "policy.multi_token train": config.policy.multi_token == "train"
        and "the head would see an image's token where the model sees the image: set it to keep or drop",
    }
    if isinstance(config, GrpoRunConfig):
        rollout = config.rollout
        asked |= {
            "critic": config.critic is not None and "",
            "teachers": bool(config.teachers) and "",
            "rollout.environment.kind agent": isinstance(rollout.environment, AgentEnvironment) and "",
            "rollout.beams": rollout.beams is not None and "",
            "rollout.prefix_values": rollout.prefix_values is not None and "",
            "rollout.quantization": rollout.quantization is not None and "",
            "rollout.speculative": rollout.speculative is not None and "",
        }
    path, found = config.model.path, list[str]()
    if isinstance(config, GrpoRunConfig) and (path / "config.json").exists():
        found = [fault for fault in (_fault_of_processor(path, vision), _fault_of_tower(path, shape)) if fault]
    return found + [
        f"{key} and a model that sees images ({vision.model_type}) do not go together yet{f': {why}' if why else ''}; "
        "or train its text alone, taken out by `megatron-rl convert to-megatron`"
        for key, why in asked.items()
        if isinstance(why, str)
    ]


def _fault_of_processor(folder: Path, vision: Vision) -> str | None:
    """What is wrong with the file that says how a model's images are cut to patches."""
    path, (_, _, time, *_, patch) = folder / PROCESSOR, dict(vision.tower)[f"{TOWER}patch_embed.proj.weight"]
    if not path.exists():
        return f"{path} is missing, which says how images are cut to patches; copy it from the published model"
    try:
        cuts = cuts_of(folder)
    except ValueError as error:
        return str(error)
    wanted = {"patch_size": (cuts.patch, patch), "merge_size": (cuts.merge, vision.merge)}
    for name, (given, of_tower) in (wanted | {"temporal_patch_size": (cuts.temporal_patch, time)}).items():
        if given != of_tower:
            return f"{path}: {name} is {given}, and the model's tower has {of_tower}; copy the model's own file"
    return None


def _fault_of_tower(folder: Path, shape: ModelShape) -> str | None:
    """Whether the weights of a frozen tower are missing, which the trainers take from the model's folder."""
    try:
        names = {name for path in weight_files(folder) for name in read_header(path)}
    except (OSError, ValueError):  # it is told elsewhere
        return None
    if shape.tower or any(name.startswith(PREFIXES) for name in names):
        return None
    return (
        f"model.path: {folder} has no weights of its vision tower, which a checkpoint leaves out if it is frozen; set "
        "model.path to the folder of the whole model"
    )
