"""The estimates for GPUs, against a calculation by hand for Qwen3-32B on TP4 x PP4."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.load import validate
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.layout import read_shape
from megatron_rl.recipes.estimates import (
    generation_seconds,
    layer_bytes_per_token,
    training_seconds,
    update_memory,
)
from megatron_rl.types import Mesh

CONFIGS = Path(__file__).parents[3] / "configs" / "model"
SHAPE = read_shape(CONFIGS / "Qwen3-32B.json")
MESH = Mesh(tensor=4, pipeline=4)


def test_a_layer_by_hand():
    """Inputs of two norms and two blocks and the residual: 5 x 5120; q, k, v: 8192 + 2 x 1024; q and k before and after
    their norm's rotation: 2 x 9216; attention's output: 8192; gate, up and their product: 3 x 25600."""
    elements = 25_600 + 10_240 + 18_432 + 8_192 + 76_800
    assert layer_bytes_per_token(SHAPE, MESH, 2) == elements * 2 / 4 == 69_632


def test_stages_hold_as_many_micro_batches_as_are_in_flight():
    first = update_memory(SHAPE, MESH, 0, 16_384, width=2, full=True)
    assert first.kept == 4 * 16 * 5120 * 16_384 * 2 / 4  # four micro-batches, 16 layers, one input each
    assert first.working == 2 * 69_632 * 16_384
    last = update_memory(SHAPE, MESH, 3, 16_384, width=2, full=True)
    assert last.kept == first.kept / 4
    whole = update_memory(SHAPE, MESH, 0, 16_384, width=2, full=False)
    assert whole.kept == 4 * 16 * 69_632 * 16_384


def test_a_mixture_has_the_activations_of_its_active_experts():
    shape = read_shape(CONFIGS / "Qwen3-30B-A3B.json")
    elements = 5 * 2048 + (4096 + 2 * 512) + 2 * 4608 + 4096 + 3 * 8 * 768
    assert layer_bytes_per_token(shape, Mesh(), 2) == 2 * elements


def config(**algorithm) -> GrpoRunConfig:
    return validate(
        GrpoRunConfig,
        {
            "run": {"name": "x", "steps": 1},
            "model": {"path": "nowhere", "dtype": "bfloat16"},
            "data": {"train": "rows"},
            "policy": {"parallel": {"tensor": 4}},
            "rollout": {
                "num_engines": 2,
                "tensor": 4,
                "prompts_per_step": 4,
                "samples_per_prompt": 2,
                "max_prompt_tokens": 10,
                "max_response_tokens": 3,
            },
            "balance": {"max_tokens_per_microbatch": 16},
            "algorithm": algorithm,
        },
    )


def test_generation_by_hand():
    """Three positions: two engines read 1,000 parameters of 2 bytes at each; eight answers read the keys and values of
    10, 11 and 12 tokens, 64 layers x 2 x 8 x 128 numbers of 2 bytes each. Eight GPUs."""
    num_bytes = 2 * 3 * 1000 * 2 + 8 * (10 + 11 + 12) * 64 * 2 * 8 * 128 * 2
    assert generation_seconds(config(), SHAPE, 1000, 2) == pytest.approx(num_bytes / (8 * 3.35e12 * 0.6))


def test_a_window_bounds_what_is_read():
    from dataclasses import replace

    windowed = replace(SHAPE, sliding_window=11, sliding_layers=tuple(range(32)))
    whole, half = generation_seconds(config(), SHAPE, 0, 2), generation_seconds(config(), windowed, 0, 2)
    assert half / whole == pytest.approx((33 + 32) / 66)  # in half of the layers 10, 11 and 11 tokens


def test_more_than_one_update_needs_a_forward_pass_before_them():
    lengths = np.full(8, 100)
    one, two = (training_seconds(config(updates_per_step=n), SHAPE, lengths) for n in (1, 2))
    assert two / one == pytest.approx(4 / 3)
    penalised = training_seconds(config(updates_per_step=2, kl={}), SHAPE, lengths)
    assert penalised / one == pytest.approx(5 / 3)
