"""The sources of rows that a configuration names."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.config.data import DataConfig
from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data.forms import Reading
from megatron_rl.data.mixture import whole_shares
from megatron_rl.data.prompts import ImageRules, Rules
from megatron_rl.environments import object_columns, schemas_of
from megatron_rl.models.vision import vision_of
from megatron_rl.planning.shapes import planned_model
from megatron_rl.verifiers.columns import required_columns


@dataclass(frozen=True, slots=True)
class RowSource:
    key: str
    """The key of the configuration that names the source."""
    name: str
    """The name of the source in the stream of prompts: the name in a mixture, otherwise the key."""
    path: Path | str
    reading: Reading
    share: int = 1
    """The source's share of the prompts in lowest terms."""


def training_sources(data: DataConfig, environment: EnvironmentConfig | None = None) -> list[RowSource]:
    """
    Args:
        environment: `rollout.environment`, whose tools the chat template offers.

    Raises:
        ValueError: the shares of a mixture's sources have too many digits.
    """
    if not isinstance(data.train, tuple):
        reading = replace(_reading(data, environment), rated=data.easy_first_epochs > 0)
        return [RowSource("data.train", "data.train", data.train, reading)]
    of_run = _reading(data, environment)
    shares = whole_shares({source.label: source.weight or source.count or 0 for source in data.train})
    return [
        RowSource(
            key=f"data.train.{index}",
            name=source.label,
            path=source.path,
            reading=replace(
                of_run,
                columns=data.columns if source.columns is None else source.columns,
                system_prompt=data.system_prompt if source.system_prompt is None else source.system_prompt,
                chat_template=of_run.chat_template if source.chat_template is None else source.chat_template,
                dataset=source.label,
                rated=data.easy_first_epochs > 0,
            ),
            share=shares[source.label],
        )
        for index, source in enumerate(data.train)
    ]


def heldout_source(data: DataConfig, environment: EnvironmentConfig | None = None) -> RowSource | None:
    return RowSource("data.eval", "data.eval", data.eval, _reading(data, environment)) if data.eval else None


def prompt_rules(config: GrpoRunConfig) -> Rules:
    """The rules by which rows become prompts of a run."""
    rollout = config.rollout
    return Rules(
        max_prompt_tokens=rollout.max_prompt_tokens,
        on_bad_row=config.data.on_bad_row,
        required_columns=required_columns(config.rewards),
        thought_column=rollout.thought_column,
        prefix_values=rollout.prefix_values,
        objects=object_columns(rollout.environment),
        deduplicate=config.data.deduplicate,
        images=_images(config),
    )


def _images(config: GrpoRunConfig) -> ImageRules | None:
    """How the images of rows are read, if the model sees any."""
    vision = vision_of(config.model.path)
    if vision is None and not config.model.path.exists():
        with suppress(ValueError):  # it is told elsewhere
            vision = planned_model(config).vision
    return None if vision is None else ImageRules(vision, config.model.path, config.pictures_folder)


def _reading(data: DataConfig, environment: EnvironmentConfig | None) -> Reading:
    tools = schemas_of(environment)
    template = {**data.chat_template, "tools": tools} if tools else data.chat_template
    return Reading(data.columns, data.system_prompt, template, in_turns=environment is not None)
