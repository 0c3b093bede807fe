"""Mixtures of experts in every layout: what they report of their experts, their auxiliary losses, and the replay of an
engine's choices."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import cover
import numpy as np
import pytest
import torch
import transformers
from shares import TrainSample
from sizes import VOCAB_SIZE
from test_actor_families import BALANCED
from transformers_models import open_model

from megatron_rl.config.policy import ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.models import read_shape
from megatron_rl.tools.bench.compare_layouts import (
    NUM_MICROBATCHES,
    deal_rows,
    difference,
    parse_layout,
    random_rows,
    relative,
)
from megatron_rl.types import Tokens

LAYOUTS = {
    "qwen3_moe": ("one", "pp2_dp2_ep2", "tp2_dp2_ep2_whole", "tp2_pp2_vpp2"),
    "deepseek_v3": ("one", "tp2_cp2", "tp2_pp2"),
}
"""With padding (TP, CP), empty micro-batches (DP), recomputation (tp2_pp2), and stages that hold a dense layer and
stages that hold none."""
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]


@torch.no_grad()
def expert_loads(folder: Path, samples: list[TrainSample]) -> np.ndarray:
    """int64 [layers with experts, experts]: the number of tokens that each expert gets in transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    routers = [module.gate for _, module in model.named_modules() if hasattr(module, "gate")]
    num_experts = len(routers[0].weight)
    loads = np.zeros((len(routers), num_experts), np.int64)
    for load, router in zip(loads, routers, strict=True):

        def count(module, arguments, output, load=load) -> None:
            load += output[2].flatten().bincount(minlength=num_experts).numpy()

        router.register_forward_hook(count)
    for sample in samples:
        model(torch.from_numpy(sample.tokens.ids.astype(np.int64))[None])
    return loads


@pytest.mark.parametrize(
    "name, layout_name", cover.essential(CASES, ("qwen3_moe", "pp2_dp2_ep2"), ("deepseek_v3", "one"))
)
def test_the_load_of_the_experts_is_reported(trainers, folders, grouped_samples, name, layout_name):
    layout, samples = BALANCED[layout_name], grouped_samples
    results = trainers.run(
        "train", layout.mesh.world_size, folder=folders[name], samples=samples, layout=layout, num_updates=1
    )
    loads = expert_loads(folders[name], samples)
    assert all(loads.sum(1) % sum(len(sample.tokens.ids) for sample in samples) == 0)
    for _, (metrics,) in results:
        # Counts are integers, so only the last quotients round.
        ratios = loads.max(1) / loads.mean(1)
        assert metrics["experts/load/max"] == pytest.approx(ratios.max(), rel=1e-12)
        assert metrics["experts/load_mean"] == pytest.approx(ratios.mean(), rel=1e-12)
        assert metrics["experts/unused"] == pytest.approx((loads == 0).mean(), rel=1e-12)
        assert ratios.max() > ratios.mean()


def test_a_dense_model_has_no_such_metric(trainers, model_folder, long_samples):
    layout = BALANCED["one"]
    ((_, (metrics,)),) = trainers.run(
        "train", 1, folder=model_folder, samples=long_samples, layout=layout, num_updates=1
    )
    assert not [name for name in metrics if name.startswith("experts/")]


RELATIVE = 1e-5
"""fp32 adds the same terms in another order."""


@pytest.fixture(scope="module")
def rows(groups) -> list[Tokens]:
    return random_rows(VOCAB_SIZE, num_rows=10, longest=48, seed=5) + groups


@pytest.fixture(scope="module")
def numbers(trainers, folders, rows):
    """Loss, gradient norm and gradient of every rank, by the name of the model and the layout."""

    def of(name: str, layout: str, num_microbatches: int = NUM_MICROBATCHES, recompute="none", rows=rows, **settings):
        parallel = parse_layout(layout) if layout else ParallelConfig()
        return trainers.run(
            "one_update",
            parallel.mesh.world_size,
            folder=folders[name],
            model=ModelConfig(path=folders[name], dtype="float32", recompute=recompute),
            policy=PolicyConfig(parallel=parallel, **settings),
            shares=deal_rows(folders[name], parallel, rows, num_microbatches),
        )

    return of


def plain_gradient(folder: Path, rows: list[Tokens], balance: float, z: float) -> dict[str, np.ndarray]:
    """The gradient of the mean negative log-prob and of the auxiliary losses, in float64 with transformers: all rows
    at once, as the papers write the losses."""
    model = open_model(folder, torch.float64, experts_implementation="eager")
    routers = [module.gate for _, module in model.named_modules() if hasattr(module, "gate")]
    seen = [[] for _ in routers]
    for router, calls in zip(routers, seen, strict=True):
        router.register_forward_hook(lambda _, inputs, output, calls=calls: calls.append((inputs[0], output[2])))
    loss, num_tokens = 0.0, sum(int(row.action_mask.sum()) for row in rows)
    for row in rows:
        ids = torch.from_numpy(row.ids.astype(np.int64))
        logp = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])
        loss = loss - logp[torch.from_numpy(row.action_mask[1:])].sum() / num_tokens
    for router, calls in zip(routers, seen, strict=True):
        hidden = torch.cat([states.reshape(-1, states.shape[-1]) for states, _ in calls])
        logits = hidden.double() @ router.weight.double().T
        num_experts = len(router.weight)
        share = torch.cat([chosen.flatten() for _, chosen in calls]).bincount(minlength=num_experts).double()
        score = logits.sigmoid() if hasattr(router, "e_score_correction_bias") else logits.softmax(-1)
        score = score / score.sum(-1, keepdim=True)
        loss = loss + balance * num_experts * (share / share.sum() * score.mean(0)).sum()
        loss = loss + z * logits.logsumexp(-1).square().mean()
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found |= as_saved(name, parameter.grad.numpy(), model.config.model_type)
    return found


def as_saved(name: str, tensor: np.ndarray, family: str) -> dict[str, np.ndarray]:
    """transformers stacks the experts of a layer, and their gates on their up-projections; files have single ones."""
    of_mixtral = family in ("mixtral", "minimax_m2")
    gate, up, down = ("w1", "w3", "w2") if of_mixtral else ("gate_proj", "up_proj", "down_proj")
    if of_mixtral:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if family == "nemotron_h":
        name = name.replace("model.", "backbone.", 1)
    layer, _, kind = name.partition(".experts.")
    if family == "gpt_oss" and kind:
        return of_gpt_oss(f"{layer}.experts.", kind, tensor)
    if kind == "gate_up_proj":
        halves = zip((gate, up), np.split(tensor, 2, axis=1), strict=True)
        return {f"{layer}.experts.{i}.{half}.weight": part for half, parts in halves for i, part in enumerate(parts)}
    if kind in ("up_proj", "down_proj"):
        own = {"up_proj": up, "down_proj": down}[kind]
        return {f"{layer}.experts.{i}.{own}.weight": part for i, part in enumerate(tensor)}
    return {name: tensor}


def of_gpt_oss(prefix: str, kind: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Matrices are transposed there, and rows of gate and up are by turns."""
    end = "bias" if kind.endswith("_bias") else "weight"
    tensor = tensor if end == "bias" else tensor.swapaxes(1, 2)
    parts = {"down": tensor} if kind.startswith("down") else {"gate": tensor[:, ::2], "up": tensor[:, 1::2]}
    return {f"{prefix}{i}.{part}_proj.{end}": one for part, all_E in parts.items() for i, one in enumerate(all_E)}


LOSSES = dict(load_balancing_loss=0.4, router_z_loss=0.05)
"""So large that they are a good part of the gradient of the routers."""
WITH_LOSSES = [
    *(("qwen3_moe", layout) for layout in ("pp2-vpp2", "cp2-ep2", "tp2-dp2-ep2", "tp2-ep2-etp1")),
    *(("deepseek_v3", layout) for layout in ("tp2-cp2", "pp2-vpp2")),
]


@pytest.fixture(scope="module")
def of_one_process(numbers):
    known = {}

    def of(name: str):
        if name not in known:
            known[name] = numbers(name, "", 1, **LOSSES)[0]
        return known[name]

    return of


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_the_auxiliary_losses_have_the_gradient_of_their_definition(folders, rows, of_one_process, name):
    _, _, gradient = of_one_process(name)
    expected = plain_gradient(folders[name], rows, LOSSES["load_balancing_loss"], LOSSES["router_z_loss"])
    without = plain_gradient(folders[name], rows, 0.0, 0.0)
    routers = [key for key in expected if key.endswith("mlp.gate.weight")]
    assert len(routers) == 3
    for key in gradient.keys() & expected.keys():
        # fp32 against float64, through four layers
        assert relative(gradient[key], expected[key]) < 2e-5, key
    assert all(relative(without[key], expected[key]) > 0.1 for key in routers)


@pytest.mark.parametrize("name, layout", cover.essential(WITH_LOSSES, ("qwen3_moe", "cp2-ep2")))
def test_the_auxiliary_losses_are_the_same_in_every_layout(numbers, of_one_process, name, layout):
    results = numbers(name, layout, **LOSSES)
    found = difference(layout, results[0], of_one_process(name))
    assert found.norm_difference < RELATIVE and found.gradient_difference < RELATIVE, found.tensor


@pytest.mark.deep
def test_recomputation_attaches_the_auxiliary_losses_once(trainers, folders, long_samples):
    none, full = (
        trainers.run(
            "train",
            2,
            folder=folders["qwen3_moe"],
            samples=long_samples,
            layout=replace(BALANCED["tp2"], recompute=recompute),
            num_updates=1,
            **LOSSES,
        )[0][1][0]
        for recompute in ("none", "full")
    )
    assert none["grad_norm"] == pytest.approx(full["grad_norm"], rel=RELATIVE)
    assert none["experts/auxiliary_loss"] == pytest.approx(full["experts/auxiliary_loss"], rel=RELATIVE)


def random_routes(folder: Path, rows: list[Tokens]) -> list[Tokens]:
    """The rows with choices that no router would make. The last token of each row has none; the first row has none at
    all, and the second one those of its first half. Answers to one prompt have the same ones in it, except the last."""
    shape, experts = read_shape(folder), read_shape(folder).mixture

    def routes(row: Tokens, number: int) -> np.ndarray | None:
        rng = np.random.default_rng((row.ids[0], number == len(rows) - 1))
        every = np.tile(np.arange(experts.num_experts, dtype=np.uint8), (len(row.ids), shape.num_layers, 1))
        every = rng.permuted(every, axis=-1)
        return (
            None if number == 0 else every[: (len(row.ids) - 1) // (2 if number == 1 else 1), :, : experts.num_active]
        )

    return [replace(row, routes=routes(row, number)) for number, row in enumerate(rows)]


class GivenRouter(torch.nn.Module):
    """A router of transformers whose choice is given for the first tokens of a row."""

    def __init__(self, router: torch.nn.Module, folder: Path, layer: int) -> None:
        super().__init__()
        self.router, self.layer, self.experts = router, layer, read_shape(folder).mixture
        self.routes: np.ndarray | None = None

    def forward(self, hidden):
        _, _, own = self.router(hidden)
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.router.weight.T + getattr(self.router, "bias", 0.0)
        chosen = own.clone()
        if self.routes is not None:
            chosen[: len(self.routes)] = torch.from_numpy(self.routes[:, self.layer].astype(np.int64))
        weight = (logits.sigmoid() if self.experts.score == "sigmoid" else logits.softmax(-1)).gather(1, chosen)
        if self.experts.normalised:
            weight = weight / weight.sum(-1, keepdim=True)
        return logits, weight * self.experts.scaling_factor, chosen


def replayed_gradient(folder: Path, rows: list[Tokens]) -> tuple[float, dict[str, np.ndarray]]:
    """The mean negative log-prob with the rows' choices and its gradient, in float64 with transformers."""
    model = open_model(folder, torch.float64, experts_implementation="eager")
    routers = []
    for number, layer in enumerate(model.model.layers):
        for name in ("gate", "router"):
            if hasattr(layer.mlp, name):
                routers.append(GivenRouter(getattr(layer.mlp, name), folder, number))
                setattr(layer.mlp, name, routers[-1])
    loss, num_tokens = 0.0, sum(int(row.action_mask.sum()) for row in rows)
    for row in rows:
        for router in routers:
            router.routes = row.routes
        ids = torch.from_numpy(row.ids.astype(np.int64))
        logp = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])
        loss = loss - logp[torch.from_numpy(row.action_mask[1:])].sum() / num_tokens
    loss.backward()
    named = ((re.sub(r"(gate|router)\.router\.", r"\1.", name), p.grad) for name, p in model.named_parameters())
    return loss.item(), {name: gradient.numpy() for name, gradient in named if gradient is not None}


REPLAYED = {
    "qwen3_moe": ("pp2", "pp2-vpp2", "cp2-ep2", "tp2-ep2-etp1", "tp2-dp2-ep2"),
    "qwen3_moe_not_normalised": (),
    "deepseek_v3": ("tp2-cp2", "pp2-vpp2", "tp2-dp2-ep2"),
    "gpt_oss": ("cp2-ep2", "tp2-dp2-ep2"),
}


@pytest.fixture(scope="module")
def replayed(numbers, folders, rows):
    known = {}

    def of(name: str):
        if name not in known:
            routed = random_routes(folders[name], rows)
            known[name] = routed, numbers(name, "", 1, rows=routed, routing_replay=True)[0]
        return known[name]

    return of


@pytest.mark.parametrize("name", cover.essential(REPLAYED, *list(REPLAYED)[:3]))
def test_replayed_choices_have_the_gradient_of_plain_pytorch(numbers, folders, rows, replayed, name):
    routed, (loss, _, gradient) = replayed(name)
    expected_loss, expected = replayed_gradient(folders[name], routed)
    assert loss == pytest.approx(expected_loss, rel=RELATIVE)
    own_loss, own = replayed_gradient(folders[name], rows)
    assert abs(own_loss - expected_loss) > 20 * RELATIVE * expected_loss
    for key in gradient.keys() & expected.keys():
        assert relative(gradient[key], expected[key]) < 2e-5, key  # fp32 against float64, through four layers
    routers = [key for key in expected if key.endswith(("mlp.gate.weight", "mlp.router.weight"))]
    assert routers and all(relative(own[key], expected[key]) > 0.1 for key in routers)


REPLAYED_IN = [
    *((name, layout, "full") for name in REPLAYED for layout in REPLAYED[name]),
    *(("qwen3_moe", "cp2-ep2", "none"), ("deepseek_v3", "pp2-vpp2", "none")),
]


@pytest.mark.parametrize(
    "name, layout, recompute",
    cover.essential(
        REPLAYED_IN,
        ("qwen3_moe", "cp2-ep2", "none"),
        ("deepseek_v3", "pp2-vpp2", "full"),
    ),
)
def test_replayed_choices_have_the_same_gradient_in_every_layout(numbers, replayed, name, layout, recompute):
    """With recomputation a pipeline stage recomputes a micro-batch while it works on others."""
    routed, expected = replayed(name)
    results = numbers(name, layout, rows=routed, recompute=recompute, routing_replay=True)
    found = difference(layout, results[0], expected)
    assert found.loss_difference < RELATIVE and found.norm_difference < RELATIVE
    assert found.gradient_difference < RELATIVE, found.tensor


@pytest.mark.parametrize("layout_name", cover.essential(["one", "tp2_cp2", "pp2_dp2_ep2", "tp2_pp2"]))
def test_the_shares_of_replayed_and_of_differing_choices_are_reported(trainers, folders, grouped_samples, layout_name):
    """Each sample's choices are the trainer's own but for one of the last known token, in the last layer, which has no
    effect on later tokens."""
    folder, layout = folders["qwen3_moe"], BALANCED[layout_name]
    samples = own_routes(folder, grouped_samples)
    results = trainers.run(
        "train",
        layout.mesh.world_size,
        folder=folder,
        samples=samples,
        layout=layout,
        num_updates=2,
        routing_replay=True,
    )
    num_tokens = sum(len(sample.tokens.ids) for sample in samples)
    num_known = sum(len(sample.tokens.routes) for sample in samples)
    num_changed = sum(len(sample.tokens.routes) > 0 for sample in samples)
    for _, (metrics, _) in results:
        assert metrics["routing/replayed"] == pytest.approx(num_known / num_tokens, rel=1e-12)
        assert metrics["routing/differing"] == pytest.approx(num_changed / (3 * 2 * num_known), rel=1e-12)


@torch.no_grad()
def own_routes(folder: Path, samples: list[TrainSample]) -> list[TrainSample]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda module, inputs, output: seen.append(output[2].numpy()))
    found = []
    for sample in samples:
        seen.clear()
        model(torch.from_numpy(sample.tokens.ids.astype(np.int64))[None])
        routes = np.stack([np.zeros_like(seen[0]), *seen], 1)[:-1].astype(np.uint8)  # the first layer is dense
        if len(routes):
            last = routes[-1, -1]
            last[0] = next(expert for expert in range(4) if expert not in last)
        found.append(replace(sample, tokens=replace(sample.tokens, routes=routes)))
    return found


def test_choices_that_the_model_cannot_have_made_are_refused_by_name(trainers, folders, long_samples):
    errors = trainers.run(
        "refuse_routes", 2, folder=folders["qwen3_moe"], samples=own_routes(folders["qwen3_moe"], long_samples)
    )
    for no_expert, no_layers in errors:
        assert "sample prompt2#0: the engine chose the expert 4, but the model has 4" in no_expert
        assert "sample prompt0#0: the engine's choices of experts have 3 layers with 2 experts" in no_layers
