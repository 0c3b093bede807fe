"""Replaces `layers: auto` of policy and critic by the number of layers of each part of the pipeline."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, TypeVar

from megatron_rl.balance import flops_by_layer
from megatron_rl.balance.stages import Load, distribute_layers
from megatron_rl.config.critic import CriticConfig
from megatron_rl.config.policy import PolicyConfig
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig, OfflineRunConfig
from megatron_rl.models import FAMILIES
from megatron_rl.planning.shapes import planned_critic_shape, planned_shape
from megatron_rl.types import ModelShape

Config = TypeVar("Config", bound=BaseConfig)
Side = TypeVar("Side", PolicyConfig, CriticConfig)


def with_layers(config: Config) -> Config:
    """The configuration with numbers in the place of `auto`.

    Raises:
        ValueError: the model has fewer layers than the pipeline has parts, or its configuration cannot be read.
    """
    changed: dict[str, Any] = {}
    policy, critic = config.policy, config.critic if isinstance(config, GrpoRunConfig) else None
    if policy.parallel.layers == "auto":
        changed["policy"] = _with_layers(policy, planned_shape(config), _longest(config))
    if critic is not None and isinstance(config, GrpoRunConfig) and critic.parallel.layers == "auto":
        changed["critic"] = _with_layers(critic, planned_critic_shape(config), _longest(config))
    return config.model_copy(update=changed) if changed else config


def _with_layers(side: Side, shape: ModelShape, length: int) -> Side:
    layers = _distributed(shape, length, side.parallel.mesh.num_chunks)
    return side.model_copy(update={"parallel": side.parallel.model_copy(update={"layers": layers})})


def _longest(config: BaseConfig) -> int:
    """The length of the longest possible sample in tokens."""
    if isinstance(config, GrpoRunConfig):
        return config.rollout.max_model_tokens
    assert isinstance(config, OfflineRunConfig)
    return config.offline.max_tokens


@lru_cache  # a search for layouts asks for the same numbers of parts again and again
def _distributed(shape: ModelShape, length: int, num_chunks: int) -> tuple[int, ...]:
    return distribute_layers(*_loads(shape, length), num_chunks)


@lru_cache
def _loads(shape: ModelShape, length: int) -> tuple[list[Load], Load, Load]:
    """The loads of the layers, of the embedding and of the output layer for a sample of this length."""
    family = FAMILIES[shape.family]
    of_kind = {
        layer: sum(prod(size) for rule in family.layer_rules(layer) for _, size in rule.hf_names(shape.sizes(layer)))
        for layer in set(shape.layers)
    }
    parameters = [of_kind[layer] for layer in shape.layers]
    layers = [Load(*load) for load in zip(flops_by_layer(length, shape), parameters, strict=True)]
    matrix = shape.vocab_size * shape.hidden_size  # a last stage holds a copy of a tied embedding
    head = shape.num_outputs * shape.hidden_size
    return layers, Load(0.0, matrix), Load(2.0 * length * head, head)
