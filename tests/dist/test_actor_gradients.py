"""The whole gradient of a batch is that of transformers in float64, tensor by tensor, and the same in every layout.

This implies the loss, the gradient norm and the log-probs of every family and layout; that updates follow from it is
shown in test_actor_layouts.py.
"""

from __future__ import annotations

import json

import cover
import numpy as np
import pytest
from sizes import VOCAB_SIZE
from test_actor_experts import plain_gradient

from megatron_rl.config.policy import ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.tools import compare_layouts
from megatron_rl.tools.compare_layouts import (
    NUM_MICROBATCHES,
    deal_rows,
    difference,
    load_rows,
    parse_layout,
    random_rows,
    relative,
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
    "mixtral": ("tp2", "pp2", "cp2-ep2", "dp2-ep2", "tp2-ep2-etp1", "tp2-dp2-ep2", "tp2-dp2-ep2-etp1"),
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
}
"""qwen3 has heads of 16 and norms of q and k, qwen2_windows biases and sliding windows, qwen3_moe a dense layer and
three mixtures whose routers are away from ties; qwen2 has one embedding for both ends."""
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]
ESSENTIAL = [
    *(("qwen3", layout) for layout in ("tp2-pp2", "tp2-cp2", "pp2-vpp2-cp2")),
    *(("qwen3_moe", layout) for layout in ("tp2-dp2-ep2", "cp2-ep2")),
    *(("deepseek_v3", layout) for layout in ("tp2-cp2", "pp2-vpp2")),
    *(("qwen2", "pp2"), ("qwen2_windows", "cp2"), ("olmo2", "tp2")),
]
RECOMPUTED = [
    ("llama", "tp2"),
    ("olmo2", "cp2"),
    ("olmo3", "tp2-cp2"),
    ("mixtral", "tp2-dp2-ep2"),
    ("deepseek_v3", "tp2-dp2-ep2"),
]
"""In these a layer is computed again in the backward pass."""
WITHOUT_SEQUENCE = [("qwen3", "tp2"), ("llama", "tp2"), ("olmo2", "tp2"), ("olmo3", "tp2")]
"""In these TP is without sequence parallelism too."""
RELATIVE = 1e-5
"""fp32 adds the same terms in another order."""


@pytest.fixture(scope="module")
def rows():
    return random_rows(VOCAB_SIZE, num_rows=14, longest=64, seed=3)


@pytest.fixture(scope="module")
def numbers(trainers, folders, model_folder, rows):
    """The numbers of a layout, by the name of the model."""

    def of(name: str, parallel: ParallelConfig, num_microbatches: int, recompute: str = "none"):
        folder = model_folder if name == "qwen3" else folders[name]
        shares = deal_rows(folder, parallel, rows, num_microbatches)
        model = ModelConfig(path=folder, dtype="float32", recompute=recompute)
        policy = PolicyConfig(parallel=parallel)
        return trainers.run(
            "one_update", parallel.mesh.world_size, folder=folder, model=model, policy=policy, shares=shares
        )

    return of


@pytest.fixture(scope="module")
def of_one_process(numbers):
    known = {}

    def of(name: str):
        if name not in known:
            known[name] = numbers(name, ParallelConfig(), 1)[0]
        return known[name]

    return of


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_process_has_the_gradient_of_transformers(folders, model_folder, rows, of_one_process, name):
    expected = plain_gradient(model_folder if name == "qwen3" else folders[name], rows, 0.0, 0.0)
    found = of_one_process(name)[2]
    # One embedding for both ends has one gradient there.
    assert found.keys() - expected.keys() <= {"lm_head.weight"} and expected.keys() <= found.keys()
    for key in expected:
        assert relative(found[key], expected[key]) < 2e-5, key  # fp32 against float64, through four layers


@pytest.mark.parametrize("name, layout", cover.essential(CASES, *ESSENTIAL))
def test_every_layout_has_the_gradient_of_one_process(numbers, of_one_process, name, layout):
    recompute = "full" if (name, layout) in RECOMPUTED else "none"
    check_equal(layout, numbers(name, parse_layout(layout), NUM_MICROBATCHES, recompute), of_one_process(name))


@pytest.mark.parametrize("name, layout", cover.essential(WITHOUT_SEQUENCE, ("qwen3", "tp2")))
def test_the_gradient_is_the_same_without_sequence_parallelism(numbers, of_one_process, name, layout):
    parallel = parse_layout(layout).model_copy(update={"sequence": False})
    check_equal(layout, numbers(name, parallel, NUM_MICROBATCHES), of_one_process(name))


def check_equal(layout: str, results, expected) -> None:
    assert {result[:2] for result in results} == {results[0][:2]}, "every rank reports the same bits"
    found = difference(layout, results[0], expected)
    assert found.loss_difference < RELATIVE and found.norm_difference < RELATIVE
    assert found.gradient_difference < RELATIVE, found.tensor
    assert all(np.abs(tensor).max() > 0 for tensor in expected[2].values())


@pytest.mark.deep
def test_the_command_compares_a_layout(model_folder, tmp_path, capsys):
    """It starts its own processes."""
    dump = tmp_path / "batch.npz"
    arguments = [str(model_folder), "--dump", str(dump), "--rows", "6", "--layouts", "pp2@3,1", "--json"]
    assert compare_layouts.main(arguments) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["layout"] == "pp2@3,1" and found["gradient_difference"] < RELATIVE
    assert len(load_rows(dump)) == 6


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp2xpp2", "'tp2xpp2' is no layout"),
        ("qp2", "the axes are tp, pp, vpp"),
        ("pp2@3,2", "hold 5 layers, the model has 4"),
        ("tp3", "4 attention heads, which policy.parallel.tensor=3"),
    ],
)
def test_a_wrong_layout_is_named(model_folder, capsys, layout, message):
    assert compare_layouts.main([str(model_folder), "--layouts", layout]) == 1
    assert message in capsys.readouterr().err
