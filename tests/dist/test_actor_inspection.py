"""What `explain` is told of tokens adds up to the step's loss and gradient, in every layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scenarios import Layout
from test_actor_layouts import LAYOUTS, ONE_UPDATE

from megatron_rl.types import TokenSpan

ALGORITHM = ONE_UPDATE["dual_clip"]
SAMPLE = 2


def parts_of(samples) -> list[TokenSpan]:
    """All samples, each sample, and one token of a sample."""
    everything = tuple(sample.index for sample in samples)
    first = int(samples[SAMPLE].tokens.action_mask.argmax())
    token = TokenSpan((samples[SAMPLE].index,), first, first + 1)
    return [TokenSpan(everything), *(TokenSpan((i,)) for i in everything), token]


def inspected(trainers, folder, samples, layout: Layout):
    given = dict(folder=folder, samples=samples, layout=layout, parts=parts_of(samples), algorithm=ALGORITHM)
    results = trainers.run("inspect", layout.mesh.world_size, **given)
    numbers = {index: told for (of_rank, _, _), _ in results for index, told in of_rank.items()}
    (_, gradients, untrained), metrics = results[0]
    assert all(other[1] == gradients and other[2] == untrained for other, _ in results), "all ranks are told the same"
    return numbers, gradients, untrained, metrics


@pytest.fixture(scope="module")
def whole(trainers, model_folder, samples):
    return inspected(trainers, model_folder, samples, Layout())


def test_parts_add_up_to_the_step(whole, samples):
    numbers, [everything, *_], untrained, metrics = whole
    assert numbers.keys() == {sample.index for sample in samples} and untrained == []
    assert sum(told["loss"].sum(dtype=np.float64) for told in numbers.values()) == pytest.approx(
        metrics["loss"], rel=1e-5
    )
    assert everything.norm == pytest.approx(metrics["grad_norm"], rel=1e-6)
    assert sum(everything.squares.values()) == pytest.approx(everything.norm**2, rel=1e-9)
    assert {"embedding", "norms", "layer 0 attention", "layer 3 mlp", "output layer"} <= everything.squares.keys()
    for group, rows in everything.rows.items():
        assert list(rows.values()) == sorted(rows.values(), reverse=True)
        assert 0 < sum(rows.values()) <= everything.squares[group] * (1 + 1e-9)
    for sample in samples:
        mask = sample.tokens.action_mask
        assert not numbers[sample.index]["slope"][~mask].any() and numbers[sample.index]["logp"][mask].all()


def test_a_part_has_the_gradient_of_a_step_in_which_all_other_weights_are_0(trainers, model_folder, samples, whole):
    alone = [replace(s, weight=s.weight if s.index == samples[SAMPLE].index else 0.0) for s in samples]
    results = trainers.run(
        "train_steps", 1, folder=model_folder, samples=alone, layout=Layout(), algorithm=ALGORITHM,
        pass_before_update=False, num_steps=1,
    )  # fmt: skip
    [(metrics, _)] = results[0][0]
    _, gradients, _, _ = whole
    assert gradients[1 + SAMPLE].norm == pytest.approx(metrics["grad_norm"], rel=1e-6)
    assert 0 < gradients[-1].norm < 10 * gradients[1 + SAMPLE].norm, "of one token"


@pytest.mark.parametrize(
    "name",
    ["tp2_pp2", *(pytest.param(n, marks=pytest.mark.deep) for n in ("pp2_vpp2_dp2_empty_microbatch", "tp2_cp2"))],
)
def test_every_layout_tells_the_same(trainers, model_folder, samples, whole, name):
    numbers, gradients, _, _ = inspected(trainers, model_folder, samples, LAYOUTS[name])
    expected_numbers, expected, _, _ = whole
    for index, told in expected_numbers.items():
        for column, values in told.items():
            np.testing.assert_allclose(numbers[index][column], values, rtol=1e-4, atol=1e-6)
    for got, one in zip(gradients, expected, strict=True):
        assert got.norm == pytest.approx(one.norm, rel=1e-5)
        assert got.squares == pytest.approx(one.squares, rel=1e-4, abs=1e-9 * one.norm**2)
        for group, rows in one.rows.items():
            largest = next(iter(rows))
            assert got.rows[group][largest] == pytest.approx(rows[largest], rel=1e-4)
