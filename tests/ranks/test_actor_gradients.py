"""The whole gradient of a batch is that of transformers in float64, tensor by tensor, and in every layout it is as near
to the trainer's own in float64 as that of one process.

This implies the loss, the gradient norm and the log-probs of every family and layout; that updates follow from it is
shown in test_actor_layouts.py.
"""

from __future__ import annotations

from pathlib import Path

import cover
import numpy as np
import pytest
import torch
from sizes import VOCAB_SIZE
from test_actor_experts import plain_gradient
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from megatron_rl.config.policy import ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.tools.bench.compare_layouts import (
    NUM_MICROBATCHES,
    ONE_PROCESS,
    compare,
    deal_rows,
    difference,
    parse_layout,
    random_rows,
    relative,
    too_far,
)

DENSE = (
    *("tp2", "tp4", "pp2", "pp2-vpp2", "pp2@3,1", "cp2", "cp4", "dp2"),
    *("tp2-pp2", "tp2-cp2", "pp2-cp2", "dp2-cp2", "pp2-vpp2-cp2", "pp2-vpp2-dp2"),
)
LAYOUTS = {
    "qwen3": DENSE,
    "llama": ("tp2", "pp2", "cp2"),
    "qwen2": ("tp2", "pp2", "cp2"),
    "qwen2_windows": ("tp2", "pp2-vpp2", "cp2", "tp2-cp2"),
    "olmo2": ("tp2", "pp2", "cp2"),
    "olmo3": ("tp2", "pp2", "cp2", "tp2-cp2"),
    "mixtral": ("pp2", "cp2-ep2", "tp2-dp2-ep2", "tp2-dp2-ep2-etp1"),
    "qwen3_moe": (
        *("tp2", "dp2-ep2", "tp2-ep2-etp1", "pp2-vpp2", "pp2@1,3", "cp2-ep2", "tp2-dp2-ep2"),
        *("tp2-dp2-ep2-etp1", "pp2-dp2-ep2"),
    ),
    "qwen3_moe_not_normalised": ("tp2-cp2",),
    "deepseek_v3": (
        *("tp2", "pp2-vpp2", "cp2", "cp2-ep2", "dp2-ep2", "tp2-cp2", "tp2-ep2-etp1", "tp2-dp2-ep2"),
        *("tp2-dp2-ep2-etp1", "pp2-dp2-ep2"),
    ),
    "deepseek_v3_direct": ("tp2-cp2",),
    "kimi_k2": ("tp2-pp2",),
    "glm4_moe_lite": ("tp2-cp2", "dp2-ep2"),
    "glm4_moe": ("tp2", "pp2", "cp2", "cp2-ep2", "dp2-ep2", "tp2-pp2", "tp2-dp2-ep2-etp1"),
    "glm4_moe_plain": ("tp2-cp2", "tp2-ep2-etp1"),
    "gemma3": (
        *("tp2", "tp4", "pp2", "cp2", "cp4", "dp2", "tp2-pp2", "tp2-cp2", "pp2-cp2", "dp2-cp2"),
        *("pp2-vpp2", "pp2-vpp2-dp2"),
    ),
    "minimax_m2": (
        *("tp2", "pp2", "cp2", "cp4", "dp2-ep2", "tp2-pp2", "tp2-cp2", "pp2-cp2", "cp2-ep2", "pp2-vpp2"),
        *("tp2-dp2-ep2", "tp2-ep2-etp1", "tp2-dp2-ep2-etp1", "pp2-dp2-ep2"),
    ),
    "gpt_oss": ("tp2", "pp2", "cp2", "dp2-ep2", "tp2-pp2", "tp2-cp2", "tp2-dp2-ep2", "tp4-ep2-etp2"),
    "qwen3_next": ("tp2", "tp4", "pp2", "cp2", "dp2-ep2", "tp2-pp2", "tp2-cp2", "cp2-ep2"),
    "qwen3_5": ("tp2", "tp4", "pp2", "cp2", "cp4", "dp2", "tp2-pp2", "tp2-cp2", "pp2-vpp2-cp2"),
    "qwen3_5_moe": (
        *("tp2-cp2", "tp2-pp2", "pp2-cp2", "cp2-ep2", "dp2-ep2", "pp2-dp2-ep2", "tp2-ep2-etp1"),
        *("tp2-dp2-ep2", "tp2-dp2-ep2-etp1", "tp4-ep2-etp2"),
    ),
    "nemotron_h": (
        *("tp2", "tp4", "pp2@5,1", "cp2", "cp4", "dp2", "tp2-pp2", "tp2-cp2", "pp2-cp2", "dp2-cp2"),
        "pp2-vpp2@2,2,1,1",
    ),
    "nemotron_h_experts": (
        *("tp2-cp2", "tp2-pp2", "pp2-cp2", "cp2-ep2", "dp2-ep2", "pp2-dp2-ep2", "tp2-ep2-etp1"),
        *("tp2-dp2-ep2", "tp2-dp2-ep2-etp1", "tp4-ep2-etp2"),
    ),
}
"""qwen3 has heads of 16 and norms of q and k, qwen2_windows biases and sliding windows, qwen3_moe a dense layer and
three mixtures whose routers are away from ties; qwen2 has one embedding for both ends. qwen3_next has three layers with
linear attention and one with gated attention; with tp4 two ranks share each KV head. nemotron_h has layers with one
block each; at pp2@5,1 the last stage has one layer with Mamba-2."""
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]
ESSENTIAL = [
    *(("qwen3", layout) for layout in ("tp2-pp2", "pp2-vpp2-cp2")),
    *(("qwen3_moe", "tp2-dp2-ep2"), ("deepseek_v3", "pp2-vpp2"), ("qwen3_next", "tp2-cp2")),
    *(("nemotron_h", "tp2-cp2"), ("glm4_moe", "tp2-dp2-ep2-etp1"), ("gpt_oss", "tp2-cp2")),
]
RECOMPUTED = [
    ("llama", "tp2"),
    ("olmo2", "cp2"),
    ("olmo3", "tp2-cp2"),
    ("mixtral", "tp2-dp2-ep2"),
    ("deepseek_v3", "tp2-dp2-ep2"),
    ("gpt_oss", "tp2-dp2-ep2"),
    ("qwen3_next", "cp2-ep2"),
    ("qwen3_5_moe", "pp2-dp2-ep2"),
    ("gemma3", "pp2-vpp2"),
    ("minimax_m2", "pp2-vpp2"),
    ("nemotron_h", "tp2-cp2"),
    ("nemotron_h_experts", "pp2-dp2-ep2"),
]
"""In these a layer is computed again in the backward pass."""
WITHOUT_SEQUENCE = [("qwen3", "tp2"), ("llama", "tp2"), ("olmo2", "tp2"), ("olmo3", "tp2"), ("qwen3_5", "tp2")]
WITHOUT_SEQUENCE += [("nemotron_h", "tp2")]
"""In these TP is without sequence parallelism too."""


@pytest.fixture(scope="module")
def rows(groups):
    return random_rows(VOCAB_SIZE, num_rows=8, longest=64, seed=3) + groups


def numbers_of(
    trainers, folder, rows, parallel, num_microbatches, recompute="none", exact=False, weights=None, **settings
) -> list:
    """`settings` are more keys of `policy`."""
    shares = deal_rows(folder, parallel, rows, num_microbatches)
    model = ModelConfig(path=folder, weights=weights, dtype="float32", recompute=recompute)
    policy = PolicyConfig(parallel=parallel, **settings)
    arguments = dict(folder=folder, model=model, policy=policy, shares=shares, exact=exact)
    return trainers.run("one_update", parallel.mesh.world_size, **arguments)


@pytest.fixture(scope="module")
def numbers(trainers, folders, model_folder, rows):
    """The numbers of a layout, by the name of the model."""

    def of(name: str, *arguments, **settings):
        folder = model_folder if name == "qwen3" else folders[name]
        return numbers_of(trainers, folder, rows, *arguments, **settings)

    return of


@pytest.fixture(scope="module")
def of_one_process(numbers):
    """The numbers of one process by the name of the model, and whether they are computed in float64."""
    known = {}

    def of(name: str, exact: bool = False):
        if (name, exact) not in known:
            (known[name, exact],) = numbers(name, ParallelConfig(), 1, exact=exact)
        return known[name, exact]

    return of


@pytest.mark.parametrize("name", cover.essential(LAYOUTS, "qwen3", "mixtral"))
def test_one_process_has_the_gradient_of_transformers(folders, model_folder, rows, of_one_process, name):
    expected = plain_gradient(model_folder if name == "qwen3" else folders[name], rows, 0.0, 0.0)
    _, _, found = of_one_process(name)
    # One embedding for both ends has one gradient there.
    assert found.keys() - expected.keys() <= {"lm_head.weight"} and expected.keys() <= found.keys()
    for key in expected:
        assert relative(found[key], expected[key]) < 2e-5, key  # fp32 against float64, through four layers


def sharp_llama(folder: Path, num_layers: int) -> Path:
    """Large weights make attention sharp, as training does, so rounding grows with depth."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=192,
        vocab_size=VOCAB_SIZE,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@pytest.mark.deep
def test_the_trainer_in_float64_has_the_gradient_of_a_model_without_float32(trainers, rows, tmp_path, monkeypatch):
    def norm(module, hidden):
        return module.weight * hidden * (hidden.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()

    def rotary(module, hidden, position_ids):
        exponents = torch.arange(0, module.config.head_dim, 2).double() / module.config.head_dim
        angle = position_ids[..., None] / module.config.rope_parameters["rope_theta"] ** exponents
        return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()

    folder = sharp_llama(tmp_path, num_layers=8)
    ((_, _, found),) = numbers_of(trainers, folder, rows, ParallelConfig(), 1, exact=True)
    islands = plain_gradient(folder, rows, 0.0, 0.0)
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", rotary)
    expected = plain_gradient(folder, rows, 0.0, 0.0)
    # The weights of tokens are float32 numbers in the plan, the same for all tokens here.
    assert max(relative(found[key], expected[key]) for key in expected) < 3e-8
    assert max(relative(islands[key], expected[key]) for key in expected) > 1e-6, "transformers itself is no reference"


@pytest.mark.parametrize("name, layout", cover.essential(CASES, *ESSENTIAL))
def test_every_layout_has_the_gradient_of_one_process(numbers, of_one_process, name, layout):
    recompute = "full" if (name, layout) in RECOMPUTED else "none"
    results = numbers(name, parse_layout(layout), NUM_MICROBATCHES, recompute)
    check_equal(layout, results, of_one_process(name), of_one_process(name, exact=True))


@pytest.mark.parametrize("name, layout", cover.essential(WITHOUT_SEQUENCE, ("qwen3", "tp2")))
def test_the_gradient_is_the_same_without_sequence_parallelism(numbers, of_one_process, name, layout):
    parallel = parse_layout(layout).model_copy(update={"sequence": False})
    results = numbers(name, parallel, NUM_MICROBATCHES)
    check_equal(layout, results, of_one_process(name), of_one_process(name, exact=True))


def check_equal(layout: str, results, one, exact) -> None:
    assert {result[:2] for result in results} == {results[0][:2]}, "every rank reports the same bits"
    _, norm, gradient = results[0]
    assert too_far(difference(layout, results[0], exact), difference(ONE_PROCESS, one, exact)) == []
    assert [name for name, tensor in exact[2].items() if not np.abs(tensor).max()] == []
    # float64 adds in another order.
    assert norm == pytest.approx(np.sqrt(sum((x.astype(float) ** 2).sum() for x in gradient.values())), rel=1e-12)


@pytest.mark.deep
def test_over_30_layers_every_layout_is_as_near_to_float64_as_one_process(trainers, rows, tmp_path):
    """One process itself is 3e-5 from it: a bound for shallow models would not do."""
    folder = sharp_llama(tmp_path, num_layers=30)
    (exact,) = numbers_of(trainers, folder, rows, ParallelConfig(), 1, exact=True)
    (one,) = numbers_of(trainers, folder, rows, ParallelConfig(), 1)
    assert difference(ONE_PROCESS, one, exact).gradient_difference > 1e-5
    for layout in ("tp2", "pp2", "cp2", "dp2"):
        results = numbers_of(trainers, folder, rows, parse_layout(layout), NUM_MICROBATCHES)
        check_equal(layout, results, one, exact)


@pytest.mark.deep
def test_layouts_are_compared_in_processes_of_their_own(model_folder, rows):
    one, found = compare(model_folder, ["pp2@3,1"], rows)
    assert (one.layout, found.layout) == (ONE_PROCESS, "pp2@3,1")
    assert 1e-7 < one.gradient_difference < 1e-5 and too_far(found, one) == []


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp2xpp2", "'tp2xpp2' is no layout"),
        ("qp2", "the axes are tp, pp, vpp"),
        ("pp2@3,2", "hold 5 layers, the model has 4"),
        ("tp3", "4 attention heads, which policy.parallel.tensor=3"),
    ],
)
def test_a_wrong_layout_is_named(model_folder, layout, message):
    with pytest.raises(ValueError, match=message):
        compare(model_folder, [layout], [])
