"""What `explain` is told of tokens adds up to the step's loss and gradient, in every layout."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from scenarios import Layout
from test_actor_layouts import LAYOUTS, ONE_UPDATE

from megatron_rl.config.algorithm import AlgorithmConfig
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


def test_tokens_have_advantages_of_their_own_with_a_critic(trainers, model_folder, samples):
    """The share of a sample has none to print."""
    valued = [replace(s, values=np.zeros(len(s.tokens.ids), np.float32)) for s in samples]
    valued = [replace(s, token_rewards=((len(s.tokens.ids) - 1, 1.0 + i),)) for i, s in enumerate(valued)]
    algorithm = AlgorithmConfig(adv_estimator={"kind": "gae", "gamma": 1.0, "lam": 0.5})
    given = dict(folder=model_folder, samples=valued, layout=Layout(), parts=[], algorithm=algorithm)
    [((numbers, _, _), _)] = trainers.run("inspect", 1, **given)
    for sample in valued:
        own, mask = numbers[sample.index]["advantage"], sample.tokens.action_mask
        assert len(own) == len(mask) and (len(set(own[mask])) > 1) == (mask.sum() > 1)


def test_untrained_tokens_are_found_by_the_median_of_all_rows(trainers, model_folder, tmp_path):
    """Nearly all rows of the second tensor rank are small, so that its own median would call none of them small."""
    folder = tmp_path / "small_rows"
    shutil.copytree(model_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    first = 6 * len(embedding) // 10
    embedding[first:] *= 1e-3
    save_file(tensors, folder / "model.safetensors")
    [found, again] = trainers.run("find_untrained", 2, folder=folder, layout=LAYOUTS["tp2"])
    assert found == again == list(range(first, len(embedding)))
