"""Muon's formulas by hand, who works on which matrix, and what is refused."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rl.actor import platform  # noqa: F401  before Megatron: it silences its import
from megatron_rl.actor.optimizer.matrices import Owner, deal
from megatron_rl.actor.optimizer.muon import accumulate, orthogonalise, scale, scaled
from megatron_rl.config.optimizer import AdamConfig, MuonConfig, moments
from megatron_rl.config.policy import PolicyConfig
from megatron_rl.models import is_matrix

OF_3, OF_4 = 1.19326944, 0.97648192
"""One iteration on the singular values 3 and 4, which are 0.6 and 0.8 of the norm 5:
3.4445 x 0.6 - 4.7750 x 0.216 + 2.0315 x 0.07776 and 3.4445 x 0.8 - 4.7750 x 0.512 + 2.0315 x 0.32768."""


def matrix(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def close(found: torch.Tensor, *rows) -> bool:
    return torch.allclose(found, matrix(*rows), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "given, expected",
    [
        ([[3, 0], [0, 4]], [[OF_3, 0], [0, OF_4]]),
        ([[0, -4], [3, 0]], [[0, -OF_4], [OF_3, 0]]),
        ([[3, 0], [0, 4], [0, 0]], [[OF_3, 0], [0, OF_4], [0, 0]]),
        ([[3, 0, 0], [0, 0, 4]], [[OF_3, 0, 0], [0, 0, OF_4]]),
        ([[0, 0], [0, 0]], [[0, 0], [0, 0]]),
    ],
)
def test_one_iteration_by_hand(given, expected):
    assert close(orthogonalise(matrix(*given), 1), *expected)


def test_five_iterations_bring_singular_values_near_one():
    random = torch.Generator().manual_seed(0)
    for rows, columns in ((8, 8), (5, 30), (30, 5)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(rows, columns, generator=random), 5))
        assert len(values) == min(rows, columns) and values.min() > 0.6 and values.max() < 1.25


def test_scales_by_hand():
    assert scale("moonlight", 100, 25) == scale("moonlight", 25, 100) == 2.0  # 0.2 sqrt(100)
    assert scale("original", 100, 25) == 2.0 and scale("original", 25, 100) == 1.0


@pytest.mark.parametrize("nesterov", [True, False])
def test_two_steps_by_hand(nesterov):
    """The first step orthogonalises 1.5 times the gradient, or the gradient, which is the same. In the second one the
    old momentum counts half."""
    cfg = MuonConfig(momentum=0.5, nesterov=nesterov, num_iterations=1)
    momentum, first = torch.zeros(2, 2), matrix([3, 0], [0, 4])
    direction = accumulate(first, momentum, cfg)
    assert close(momentum, [3, 0], [0, 4])
    assert close(direction, [4.5, 0], [0, 6]) if nesterov else close(direction, [3, 0], [0, 4])
    factor = 0.2 * math.sqrt(2)
    assert close(scaled(direction, cfg), [factor * OF_3, 0], [0, factor * OF_4])
    # 0.5 x (3, 4) + (1, -1) = (2.5, 1), and with Nesterov (1, -1) + 0.5 x (2.5, 1).
    direction = accumulate(matrix([1, 0], [0, -1]), momentum, cfg)
    assert close(momentum, [2.5, 0], [0, 1])
    assert close(direction, [2.25, 0], [0, -0.5]) if nesterov else close(direction, [2.5, 0], [0, 1])
    direction.zero_()
    assert close(momentum, [2.5, 0], [0, 1]), "what is orthogonalised is no view of the state"


@st.composite
def dealt(draw) -> dict[str, list[Owner]]:
    """Parameters in buckets, each of which is cut into one part for each rank."""
    num_ranks, owners = draw(st.integers(1, 5)), {}
    for bucket in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
        part = -(-sum(sizes) // num_ranks)
        begin = 0
        for number, size in enumerate(sizes):
            cuts = [0, *(cut - begin for cut in range(0, sum(sizes) + part, part) if begin < cut < begin + size), size]
            owners[f"{bucket}.{number}"] = [
                Owner((begin + start) // part, start, stop) for start, stop in pairwise(cuts)
            ]
            begin += size
    return owners


@given(dealt())
def test_every_parameter_has_one_worker_among_its_owners(owners):
    workers = deal(owners)
    assert workers.keys() == owners.keys() and all(workers[name] in found for name, found in owners.items())
    assert deal(dict(reversed(owners.items()))) == workers, "all ranks choose the same"


def test_the_work_is_shared_evenly():
    """Rank 0 has one parameter for itself, so that the two largest of the others go to rank 1."""
    owners = {
        name: [Owner(0, 0, size // 2), Owner(1, size // 2, size)] for name, size in (("a", 8), ("b", 6), ("c", 4))
    }
    workers = deal(owners | {"alone": [Owner(0, 0, 10)]})
    assert {name: worker.rank for name, worker in workers.items()} == {"alone": 0, "a": 1, "b": 1, "c": 0}


@pytest.mark.parametrize(
    "name, num_dims, expected",
    [
        ("decoder.layers.0.self_attention.linear_qkv.weight", 2, True),
        ("chunk1.decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight", 2, True),
        ("model.layers.3.mlp.gate.weight", 2, True),
        ("decoder.layers.0.self_attention.linear_qkv.bias", 1, False),
        ("decoder.final_layernorm.weight", 1, False),
        ("embedding.word_embeddings.weight", 2, False),
        ("chunk1.output_layer.weight", 2, False),
        ("lm_head.weight", 2, False),
        ("value_head.weight", 2, False),
        ("score.weight", 2, False),
        ("chunk0.visual.blocks.0.attn.qkv.weight", 2, False),
    ],
)
def test_matrices_are_what_layers_multiply_with(name, num_dims, expected):
    assert is_matrix(name, num_dims) == expected


def test_the_state_has_megatrons_names():
    assert moments("muon", True) == ("momentum_buffer",)
    assert moments("muon", False) == moments("adam", True) == moments("adam", False) == ("exp_avg", "exp_avg_sq")


def test_without_a_kind_the_optimizer_is_adam():
    assert PolicyConfig(optimizer={"lr": 0.1, "betas": (0.8, 0.9)}).optimizer == AdamConfig(lr=0.1, betas=(0.8, 0.9))
    found = PolicyConfig(optimizer={"kind": "muon", "lr": 0.1, "adam": {"eps": 1e-4}}).optimizer
    assert isinstance(found, MuonConfig) and found.adam_rule.eps == 1e-4 and not found.is_streamed


@pytest.mark.parametrize("key, value", [("offload", True), ("moments", "bfloat16")])
def test_keys_of_adam_alone_are_refused(key, value):
    with pytest.raises(ValidationError, match=f"optimizer.{key} belongs to kind adam alone; leave it out, or set kind"):
        PolicyConfig(optimizer={"kind": "muon", key: value})
