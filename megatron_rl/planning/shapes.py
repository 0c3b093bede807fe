"""The sizes of the models of a run, before their folders exist."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config.package_files import find_shipped
from megatron_rl.config.policy import ModelConfig
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig, OfflineRunConfig
from megatron_rl.models import critic_shape, read_shape
from megatron_rl.types import ModelShape


def planned_shape(config: BaseConfig) -> ModelShape:
    """The sizes of the model that is trained.

    Raises:
        ValueError: see `planned_model`.
    """
    return trained_shape(config, planned_model(config))


def planned_model(config: BaseConfig) -> ModelShape:
    """The sizes of the policy's model. If its folder does not exist, they come from configs/model/<its name>.json.

    Raises:
        ValueError: there are neither the folder nor the file, or the model is of no known family.
    """
    return _read(config.model, "model")


def trained_shape(config: BaseConfig, shape: ModelShape) -> ModelShape:
    """The model with what is added to train it: adapters, a multi-token head, or a reward model's head."""
    loss = config.preferences if isinstance(config, OfflineRunConfig) else None
    return config.policy.adapted(critic_shape(shape) if loss and loss.has_head else shape)


def planned_critic_shape(config: GrpoRunConfig) -> ModelShape:
    """The sizes of the critic's model with its value head, found like the sizes of the policy.

    Raises:
        ValueError: see `planned_shape`.
    """
    assert config.critic is not None, "the configuration has a critic"
    own = config.critic.model
    shape = _read(own, "critic.model") if own else planned_shape(config)
    return config.critic.trainer.adapted(critic_shape(shape))


def planned_teacher_shape(config: GrpoRunConfig, number: int) -> ModelShape:
    """The sizes of a teacher's model, which has a path, found like the sizes of the policy.

    Raises:
        ValueError: see `planned_shape`.
    """
    return _read(config.model.model_copy(update={"path": config.teachers[number].path}), f"teachers.{number}")


def _read(model: ModelConfig, key: str) -> ModelShape:
    stand_in = find_shipped(Path("configs", "model", f"{model.path.name}.json"))
    try:
        return read_shape(stand_in if not model.path.exists() and stand_in.is_file() else model.path)
    except ValueError as error:
        raise ValueError(str(error).replace("model.path", f"{key}.path", 1)) from error
