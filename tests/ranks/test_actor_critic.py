"""A critic has the values and gradients of plain PyTorch in every layout."""

from __future__ import annotations

import math
from statistics import fmean, pvariance

import cover
import numpy as np
import pytest
import torch
from epoch_scenarios import Composition, minibatches_of, plans_of
from scenarios import OPTIMIZER, Layout, denominators
from test_actor_layouts import LAYOUTS, learning_rate

from megatron_rl.algorithms.value_loss import value_loss
from megatron_rl.config.policy import MegatronConfig, ParallelConfig
from megatron_rl.models import read_shape
from megatron_rl.types import Mesh

CHOSEN = ["one_many_microbatches", "tp2", "tp2_no_sequence", "tp2_pp2_vpp2", "cp2_dp2_empty_microbatch", "pp2_cp2"]
RELATIVE_OF_UPDATE = (2e-6, 1e-5, 5e-5, 2e-4)
"""As in test_actor_layouts.py: fp32 adds the same terms in another order, and Adam makes a deviation grow."""


@pytest.fixture(scope="module")
def critic_folder(model_folder, tmp_path_factory):
    """A model with a value head, as transformers saves it."""
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("critic")
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(model_folder, dtype=torch.float32, num_labels=1)
    model.score.weight.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def returns(samples):
    rng = np.random.default_rng(5)
    return {s.index: rng.normal(0.5, 1, len(s.tokens.ids)).astype(np.float32) for s in samples}


def plain_pytorch(folder, samples, returns, minibatches=None):
    """[(values by sample, the losses and gradient norms of the updates)] of two steps of two updates, one sample at a
    time.

    Args:
        minibatches: the samples of each update of a single step, with the mean over their tokens as loss.
    """
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)

    def values(sample):
        """The value at each token: that of the state before it."""
        hidden = model.model(torch.from_numpy(sample.tokens.ids.astype(np.int64))[None]).last_hidden_state[0]
        return torch.cat([torch.zeros(1), model.score(hidden)[:-1, 0]])

    steps = []
    all_updates = [[range(len(samples))] * 2] * 2 if minibatches is None else [minibatches]
    for step, of_step in enumerate(all_updates):
        with torch.no_grad():
            old = [values(sample) for sample in samples]
        updates = []
        for number, members in enumerate(of_step):
            loss, own = torch.zeros(()), [samples[i] for i in members]
            weight = 1 / denominators(own).num_tokens
            for sample, old_L in zip(own, [old[i] for i in members], strict=True):
                mask_L = torch.from_numpy(sample.tokens.action_mask)
                target_L = torch.from_numpy(returns[sample.index])
                loss_L, _ = value_loss(values(sample), old_L, target_L, clip=0.2)
                loss = loss + weight * loss_L[mask_L].sum()
            optimizer.zero_grad()
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(2 * step + number + 1)
            optimizer.step()
            updates.append((loss.item(), grad_norm.item()))
        steps.append((dict(zip([s.index for s in samples], old, strict=True)), updates))
    return steps


@pytest.fixture(scope="module")
def reference(critic_folder, samples, returns):
    return plain_pytorch(critic_folder, samples, returns)


@pytest.mark.parametrize("name", cover.essential(CHOSEN, "cp2_dp2_empty_microbatch"))
def test_values_and_gradients_are_those_of_plain_pytorch(
    trainers, critic_folder, samples, returns, reference, name, tmp_path
):
    layout = LAYOUTS[name]
    export = tmp_path / "hf"
    arguments = {"folder": critic_folder, "samples": samples, "layout": layout, "returns": returns, "export": export}
    ranks = trainers.run("critic_scenarios.learn", layout.mesh.world_size, **arguments)
    relative = iter(RELATIVE_OF_UPDATE)
    for number, (expected, updates) in enumerate(reference):
        found = {}
        for steps in ranks:
            found |= steps[number][0]
        assert sorted(found) == sorted(s.index for s in samples)
        for sample in samples:
            values = expected[sample.index].numpy()
            # Weights that have moved carry the deviation of their updates.
            assert found[sample.index][1:] == pytest.approx(values[1:], abs=1e-5 if number == 0 else 1e-3)
        described, told = ranks[0][number][1:]
        assert all(steps[number][1:] == ranks[0][number][1:] for steps in ranks), "every rank reports the same bits"
        flat = [(float(expected[s.index][t]), float(returns[s.index][t])) for s in samples for t in _actions(s)]
        unexplained, variance = pvariance([r - v for v, r in flat]), pvariance([r for _, r in flat])
        assert described["explained_variance"] == pytest.approx(1 - unexplained / variance, abs=1e-3)
        assert described["value_mean"] == pytest.approx(fmean(v for v, _ in flat), abs=1e-3)
        for (loss, grad_norm), update in zip(updates, told, strict=True):
            tolerance = next(relative)
            assert update["loss"] == pytest.approx(loss, rel=tolerance, abs=1e-6)
            assert update["grad_norm"] == pytest.approx(grad_norm, rel=tolerance)
    assert ranks[0][0][2][1]["clipfrac"] > 0, "the clip is felt"
    assert read_shape(export).value_head
    check_export(export, samples)


@pytest.mark.deep
def test_a_value_head_is_gathered_before_it_is_used(trainers, critic_folder, samples, returns):
    """Each parameter is a bucket of its own, so the head's arrives with no other."""
    runs = []
    for overlap in (False, True):
        ddp = {"overlap_grad_reduce": True, "overlap_param_gather": overlap, "bucket_size": 1}
        layout = Layout(Mesh(data=2), megatron=MegatronConfig(ddp=ddp))
        arguments = {"folder": critic_folder, "samples": samples, "layout": layout, "returns": returns}
        runs.append(trainers.run("critic_scenarios.learn", 2, **arguments))
    for steps, expected in zip(*runs, strict=True):
        for (values, *told), (values2, *told2) in zip(steps, expected, strict=True):
            assert told == told2
            assert all(np.array_equal(values[index], values2[index]) for index in values | values2)


def _actions(sample):
    return np.flatnonzero(sample.tokens.action_mask)


def check_export(folder, samples) -> None:
    """transformers reads what is exported, the head included."""
    from transformers import AutoModelForSequenceClassification

    model, told = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert model.score.weight.shape == (1, 32) and model.score.weight.abs().sum() > 0


@pytest.mark.deep
def test_a_model_without_a_head_begins_with_zeros(trainers, tied_model_folder, samples, returns):
    layout = Layout(Mesh(tensor=2, pipeline=2), num_microbatches=2)
    arguments = {"folder": tied_model_folder, "samples": samples, "layout": layout, "returns": returns}
    ranks = trainers.run("critic_scenarios.learn", 4, **arguments)
    first, second = ({k: v for steps in ranks for k, v in steps[number][0].items()} for number in range(2))
    assert all((values == 0).all() for values in first.values())
    assert all(np.abs(values[1:]).max() > 1e-3 for values in second.values())
    targets = [float(returns[s.index][t]) for s in samples for t in _actions(s)]
    weighted = math.fsum(s.weight * float(returns[s.index][t]) ** 2 / 2 for s in samples for t in _actions(s))
    assert ranks[0][0][1]["return_mean"] == pytest.approx(fmean(targets), rel=1e-5)
    assert ranks[0][0][2][0]["loss"] == pytest.approx(weighted, rel=1e-5)
    assert denominators(samples).num_tokens == len(targets)


@pytest.mark.parametrize("mesh", cover.essential([Mesh(), Mesh(tensor=2, data=2)], Mesh()), ids=str)
def test_a_critic_goes_on_bit_for_bit(trainers, critic_folder, samples, returns, mesh, tmp_path):
    layout = Layout(mesh, num_microbatches=2)
    arguments = {"folder": critic_folder, "samples": samples, "layout": layout, "returns": returns}
    arguments["checkpoint"] = tmp_path / "step_000001"
    went_on = trainers.run("critic_scenarios.save_and_go_on", mesh.world_size, **arguments)
    resumed = trainers.run("critic_scenarios.resume", mesh.world_size, **arguments)
    for (values, *rest), (again, *others) in zip(went_on, resumed, strict=True):
        assert rest == others and values.keys() == again.keys()
        assert all(np.array_equal(values[k], again[k]) for k in values)


@pytest.mark.parametrize(
    "name", cover.essential(["one_many_microbatches", "tp2_pp2_vpp2", "cp2_dp2_empty_microbatch"], "tp2_pp2_vpp2")
)
def test_each_epoch_learns_the_returns_in_its_own_mini_batches(trainers, critic_folder, samples, returns, name):
    layout, composition = LAYOUTS[name], Composition()
    minibatches = minibatches_of(plans_of(critic_folder, samples, composition, ParallelConfig()))
    [(_, expected)] = plain_pytorch(critic_folder, samples, returns, minibatches)
    arguments = {"samples": samples, "returns": returns, "composition": composition}
    ranks = trainers.run(
        "critic_scenarios.learn_epochs", layout.mesh.world_size, folder=critic_folder, layout=layout, **arguments
    )
    assert all(told == ranks[0] for told in ranks), "every rank reports the same bits"
    for (loss, grad_norm), update, relative in zip(expected, ranks[0][1:], RELATIVE_OF_UPDATE, strict=True):
        assert update["loss"] == pytest.approx(loss, rel=relative, abs=1e-6)
        assert update["grad_norm"] == pytest.approx(grad_norm, rel=relative)
