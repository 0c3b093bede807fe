"""Replaces `policy.parallel.layers: auto` by the number of layers of each part of the pipeline."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TypeVar

from megatron_rl.balance import flops_by_layer
from megatron_rl.balance.stages import Load, distribute_layers
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig, SftRunConfig
from megatron_rl.layout import FAMILIES
from megatron_rl.planning.shapes import planned_shape
from megatron_rl.types import ModelShape

Config = TypeVar("Config", bound=BaseConfig)


def with_layers(config: Config) -> Config:
    """The configuration with numbers in the place of `auto`.

    Raises:
        ValueError: the model has fewer layers than the pipeline has parts, or its configuration cannot be read.
    """
    parallel = config.policy.parallel
    if parallel.layers != "auto":
        return config
    layers = _distributed(planned_shape(config), _longest(config), parallel.mesh.num_chunks)
    policy = config.policy.model_copy(update={"parallel": parallel.model_copy(update={"layers": layers})})
    return config.model_copy(update={"policy": policy})


def _longest(config: BaseConfig) -> int:
    """The length of the longest possible sample in tokens."""
    if isinstance(config, GrpoRunConfig):
        return config.rollout.max_model_tokens
    assert isinstance(config, SftRunConfig)
    return config.sft.max_tokens


@lru_cache  # a search for layouts asks for the same numbers of parts again and again
def _distributed(shape: ModelShape, length: int, num_chunks: int) -> tuple[int, ...]:
    return distribute_layers(*_loads(shape, length), num_chunks)


@lru_cache
def _loads(shape: ModelShape, length: int) -> tuple[list[Load], Load, Load]:
    """The loads of the layers, of the embedding and of the output layer for a sample of this length."""
    family = FAMILIES[shape.family]
    parameters = [
        sum(prod(extents) for rule in family.layer_rules(shape, layer) for _, extents in rule.hf_names(shape))
        for layer in range(shape.num_layers)
    ]
    layers = [Load(*load) for load in zip(flops_by_layer(length, shape), parameters, strict=True)]
    matrix = shape.vocab_size * shape.hidden_size  # a last stage holds a copy of a tied embedding
    return layers, Load(0.0, matrix), Load(2.0 * length * matrix, matrix)
