"""Each update of each epoch is the one of plain PyTorch, in every layout: the mini-batches of an epoch are its own, and
log-probs, values and advantages of the step's start stay with their tokens on whatever rank."""

from __future__ import annotations

from dataclasses import replace

import cover
import numpy as np
import pytest
from epoch_scenarios import Composition, minibatches_of, plans_of
from scenarios import Layout
from test_actor_experts import own_routes
from test_actor_layouts import AT_TOKENS, LAYOUTS, RELATIVE_OF_UPDATE, RICH, plain_pytorch, rewarded

from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.optimizer import MuonConfig
from megatron_rl.config.policy import LoraConfig, ParallelConfig
from megatron_rl.types import Mesh

__all__ = ["rewarded"]

TWO_BY_TWO = Composition()
RELATIVE = (*RELATIVE_OF_UPDATE, 2e-4)
ALGORITHMS = {
    "dual_clip": AlgorithmConfig(),
    "statistics": RICH["clip_cov"],
    "gae": AT_TOKENS["gae"],
    "engine": AlgorithmConfig(anchor="engine", correction=None, kl={}),
    "interpolated": AlgorithmConfig(anchor="interpolated"),
}
SPREAD = ("one_many_microbatches", "tp2_pp2_vpp2", "pp2_vpp2_dp2_empty_microbatch", "cp2_dp2_empty_microbatch", "dp2")


@pytest.fixture(scope="module", params=ALGORITHMS)
def expected(request, model_folder, rewarded):
    algorithm = ALGORITHMS[request.param]
    samples = rewarded if algorithm.is_per_token else [replace(s, token_rewards=None, values=None) for s in rewarded]
    minibatches = minibatches_of(plans_of(model_folder, samples, TWO_BY_TWO, ParallelConfig()))
    return algorithm, samples, plain_pytorch(model_folder, samples, 4, algorithm, minibatches=minibatches)


def test_the_second_epoch_has_other_mini_batches(model_folder, samples):
    first, second, *later = minibatches_of(plans_of(model_folder, samples, TWO_BY_TWO, ParallelConfig()))
    assert sorted(first + second) == sorted(sum(later, [])) == list(range(12)) and later != [first, second]


@pytest.mark.parametrize("name", cover.essential(SPREAD, "pp2_vpp2_dp2_empty_microbatch"))
def test_updates_of_all_epochs_are_those_of_plain_pytorch(trainers, model_folder, expected, name):
    algorithm, samples, reference = expected
    layout = LAYOUTS[name]
    arguments = {"folder": model_folder, "samples": samples, "layout": layout, "composition": TWO_BY_TWO}
    ranks = trainers.run("epoch_scenarios.train_epochs", layout.mesh.world_size, algorithm=algorithm, **arguments)
    assert all(metrics == ranks[0][0] for metrics, _ in ranks), "every rank reports the same bits"
    for update, plain, relative in zip(ranks[0][0], reference, RELATIVE, strict=True):
        for metric in ("loss", "grad_norm", "lr"):
            assert update[metric] == pytest.approx(plain[metric], rel=relative, abs=1e-6 if metric == "loss" else 0)


@pytest.mark.parametrize("bounds", [{"kl": 1e-9}, {"ratio": 1.0001}])
def test_an_update_beyond_the_bound_is_not_made_and_the_first_epoch_always_is(trainers, model_folder, samples, bounds):
    layout = LAYOUTS["pp2_dp2_empty_microbatch"]
    algorithm = AlgorithmConfig(epochs=2, stop_epochs=bounds)
    arguments = {"folder": model_folder, "samples": samples, "layout": layout, "composition": TWO_BY_TWO}
    ranks = trainers.run("epoch_scenarios.train_epochs", layout.mesh.world_size, algorithm=algorithm, **arguments)
    for metrics, _ in ranks:
        assert ["stopped" in one for one in metrics] == [False, False, True, True]
        assert metrics[2]["ppo_kl"] > 0 and "grad_norm" not in metrics[2]


VARIED = {
    "lora": ("llama", LAYOUTS["tp2_dp2_empty_microbatch"], {"lora": LoraConfig(rank=4, alpha=8)}),
    "muon": ("llama", LAYOUTS["tp2_dp2_empty_microbatch"], {"optimizer": MuonConfig(lr=1e-2)}),
    "experts_replayed": (
        "qwen3_moe",
        Layout(Mesh(data=2, expert=2), num_microbatches=2),
        {"routing_replay": True},
    ),
}


@pytest.mark.parametrize("name", cover.essential(VARIED, "experts_replayed"))
def test_adapters_muon_and_replayed_experts_train_alike_in_one_process(trainers, folders, samples, name):
    model, layout, settings = VARIED[name]
    folder = folders[model]
    if "routing_replay" in settings:
        samples = own_routes(folder, samples)
    arguments = {"folder": folder, "samples": samples, "composition": TWO_BY_TWO, **settings}
    ((one, _),) = trainers.run("epoch_scenarios.train_epochs", 1, layout=Layout(), **arguments)
    found, _ = trainers.run("epoch_scenarios.train_epochs", layout.mesh.world_size, layout=layout, **arguments)[0]
    for update, alone, relative in zip(found, one, RELATIVE, strict=True):
        for metric in ("loss", "grad_norm"):
            assert update[metric] == pytest.approx(alone[metric], rel=10 * relative, abs=1e-6)
    assert np.std([one["grad_norm"] for one in found]) > 0
