"""What a run with a model that sees images cannot do yet, by key, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl.config.environment import AgentEnvironment
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig
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
    found = _fault_of_processor(config.model.path, vision) if isinstance(config, GrpoRunConfig) else None
    return ([found] if found else []) + [
        f"{key} and a model that sees images ({vision.model_type}) do not go together yet{f': {why}' if why else ''}; "
        "or train its text alone, taken out by `megatron-rl convert to-megatron`"
        for key, why in asked.items()
        if isinstance(why, str)
    ]


def _fault_of_processor(folder: Path, vision: Vision) -> str | None:
    """What is wrong with the file that says how a model's images are cut to patches."""
    path, patch = folder / "preprocessor_config.json", dict(vision.tower)[f"{TOWER}patch_embed.proj.weight"][-1]
    if not (folder / "config.json").exists():  # only the sizes of the model are known
        return None
    if not path.exists():
        return f"{path} is missing, which says how images are cut to patches; copy it from the published model"
    if (given := json.loads(path.read_text()).get("patch_size", 14)) != patch:
        return f"{path}: patch_size is {given}, and the model's tower has patches of {patch}; copy the model's own file"
    return None
