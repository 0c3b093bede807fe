"""`policy.parallel.layers: auto` becomes numbers before anything else asks for the layers of a stage."""

from __future__ import annotations

import pytest

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.planning.parameters import rank_parameters
from megatron_rl.planning.shapes import planned_shape
from megatron_rl.planning.stages import with_layers

QWEN3_32B = ["configs/model/qwen3_32b.yaml", "configs/run/gsm8k_32b.yaml"]


def config_of(*overrides: str) -> GrpoRunConfig:
    return with_layers(load_config(GrpoRunConfig, [*QWEN3_32B, *overrides]))


def test_the_last_stage_has_fewer_layers():
    """The output layer of Qwen3-32B costs about as much as one and a half layers, and the embedding has as many
    parameters. Without `auto` the last of four stages would have 16 layers and the output layer."""
    config = config_of("policy.parallel={tensor: 4, pipeline: 4, layers: auto}")
    layers = config.policy.parallel.layers
    assert layers[-1] < layers[1] and layers[0] < layers[1] and sum(layers) == 64 and max(layers) == 17
    shape, mesh = planned_shape(config), config.policy.parallel.mesh
    fullest = max(rank_parameters(shape, mesh, 4 * stage).total for stage in range(4))
    even = config_of("policy.parallel={tensor: 4, pipeline: 4}").policy.parallel.mesh
    assert fullest < max(rank_parameters(shape, even, 4 * stage).total for stage in range(4))


def test_layers_that_do_not_divide_are_distributed():
    """94 layers on 4 stages."""
    config = with_layers(
        load_config(
            GrpoRunConfig,
            [
                "recipes/qwen3_235b_a22b/qwen3_235b_a22b-gspo-32n8g-cp4pp16ep2.yaml",
                "policy.parallel={tensor: 4, context: 1, pipeline: 4, expert: 1, expert_tensor: 1, layers: auto}",
            ],
        )
    )
    layers = config.policy.parallel.layers
    assert sum(layers) == 94 and max(layers) == 24 and layers[-1] < 24


def test_numbers_stay_and_auto_needs_no_pipeline():
    assert config_of("policy.parallel={tensor: 4, pipeline: 2, layers: [30, 34]}").policy.parallel.layers == (30, 34)
    assert config_of().policy.parallel.layers is None
    assert config_of("policy.parallel={tensor: 8, pipeline: 1, layers: auto}").policy.parallel.layers == (64,)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="64 layers.*for 80"):
        config_of("policy.parallel={pipeline: 20, virtual: 4, layers: auto}")


def test_a_critics_layers_are_distributed_without_an_output_layer():
    critic = "critic={parallel: {tensor: 4, pipeline: 4, layers: auto}}"
    layers = config_of("algorithm.adv_estimator={kind: gae}", critic).critic.parallel.layers
    assert sum(layers) == 64 and layers[-1] == max(layers) >= 16
