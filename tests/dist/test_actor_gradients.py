"""The whole gradient of a batch is the same in every layout, tensor by tensor."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sizes import VOCAB_SIZE

from megatron_rl.config.policy import ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.tools import compare_layouts
from megatron_rl.tools.compare_layouts import NUM_MICROBATCHES, deal_rows, difference, load_rows, parse_layout, random_rows

DENSE = (
    *("tp2", "tp4", "pp2", "pp2-vpp2", "pp2@3,1", "cp2", "cp4", "dp2"),
    *("tp2-pp2", "tp2-cp2", "pp2-cp2", "dp2-cp2", "pp2-vpp2-cp2", "pp2-vpp2-dp2"),
)
LAYOUTS = {
    "qwen3": DENSE,
    "qwen2_windows": ("tp2", "pp2-vpp2", "cp2", "tp2-cp2"),
    "qwen3_moe": ("dp2-ep2", "tp2-ep2-etp1", "pp2-vpp2", "pp2@1,3", "cp2-ep2", "tp2-dp2-ep2"),
    "deepseek_v3": ("tp2", "pp2-vpp2", "cp2-ep2", "tp2-cp2", "tp2-dp2-ep2"),
}
"""qwen3 has heads of 16 and norms of q and k, qwen2_windows biases and sliding windows, qwen3_moe a dense layer and three
mixtures whose routers are away from ties."""
CASES = [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts]
RELATIVE = 1e-5
"""fp32 adds the same terms in another order."""


@pytest.fixture(scope="module")
def rows():
    return random_rows(VOCAB_SIZE, num_rows=14, longest=64, seed=3)


@pytest.fixture(scope="module")
def numbers(trainers, folders, model_folder, rows):
    """The numbers of a layout, by the name of the model."""

    def of(name: str, parallel: ParallelConfig, num_microbatches: int):
        folder = model_folder if name == "qwen3" else folders[name]
        shares = deal_rows(folder, parallel, rows, num_microbatches)
        model, policy = ModelConfig(path=folder, dtype="float32"), PolicyConfig(parallel=parallel)
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


@pytest.mark.parametrize("name, layout", CASES)
def test_every_layout_has_the_gradient_of_one_process(numbers, of_one_process, name, layout):
    results = numbers(name, parse_layout(layout), NUM_MICROBATCHES)
    assert {result[:2] for result in results} == {results[0][:2]}, "every rank reports the same bits"
    found = difference(layout, results[0], of_one_process(name))
    assert found.loss_difference < RELATIVE and found.norm_difference < RELATIVE
    assert found.gradient_difference < RELATIVE, found.tensor
    assert all(np.abs(tensor).max() > 0 for tensor in of_one_process(name)[2].values())


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
