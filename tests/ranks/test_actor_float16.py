"""Training in float16: gradients in every layout, a loss scale that all ranks share, and what it cannot hold."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import cover
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from scenarios import OPTIMIZER, Layout
from sizes import VOCAB_SIZE
from test_actor_experts import LOSSES

from megatron_rl.config.optimizer import AdamConfig, MuonConfig
from megatron_rl.config.policy import LoraConfig, MegatronConfig, ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.tools.bench.compare_layouts import (
    NUM_MICROBATCHES,
    ONE_PROCESS,
    deal_rows,
    difference,
    parse_layout,
    random_rows,
    too_far,
)
from megatron_rl.types import Mesh

GRADIENTS = [
    *(("qwen3", layout) for layout in ("tp2", "pp2-vpp2", "cp2", "dp2", "tp2-pp2")),
    *(("qwen3_moe", layout) for layout in ("dp2-ep2", "tp2-dp2-ep2")),
    *(("deepseek_v3", "tp2-dp2-ep2"), ("gpt_oss", "tp2-cp2"), ("qwen3_next", "tp2-cp2"), ("olmo2", "tp2")),
]


@pytest.fixture(scope="module")
def numbers(trainers, folders, model_folder):
    """The numbers of a layout by the name of the model; with experts, also of the auxiliary losses of their routers."""
    rows, known = random_rows(VOCAB_SIZE, num_rows=8, longest=64, seed=3), {}

    def of(name: str, layout: str = "", dtype: str = "float16", exact: bool = False) -> list:
        key = (name, layout, dtype, exact)
        if key not in known:
            folder = model_folder if name == "qwen3" else folders[name]
            parallel = parse_layout(layout) if layout else ParallelConfig()
            policy = PolicyConfig(parallel=parallel, **(LOSSES if name == "qwen3_moe" else {}))
            known[key] = trainers.run(
                "one_update",
                parallel.mesh.world_size,
                folder=folder,
                model=ModelConfig(path=folder, dtype=dtype),
                policy=policy,
                shares=deal_rows(folder, parallel, rows, NUM_MICROBATCHES if layout else 1),
                exact=exact,
            )
        return known[key]

    return of


@pytest.mark.parametrize("name, layout", cover.essential(GRADIENTS, ("qwen3_moe", "dp2-ep2")))
def test_every_layout_is_as_near_to_float64_as_one_process(numbers, name, layout):
    exact = numbers(name, dtype="float32", exact=True)[0]
    one = difference(ONE_PROCESS, numbers(name)[0], exact)
    results = numbers(name, layout)
    assert {result[:2] for result in results} == {results[0][:2]}, "every rank reports the same bits"
    assert too_far(difference(layout, results[0], exact), one) == []


@pytest.mark.deep
def test_float16_is_nearer_to_float64_than_bfloat16(numbers):
    """It has three more bits, so rounding is an eighth."""
    exact = numbers("qwen3", dtype="float32", exact=True)[0]
    far, near = (difference("", numbers("qwen3", dtype=dtype)[0], exact) for dtype in ("bfloat16", "float16"))
    assert near.gradient_difference < far.gradient_difference / 4


def scaled(layout: Layout, initial: float, **settings) -> Layout:
    settings = {"initial_loss_scale": initial, "hysteresis": 1, **settings}
    return replace(layout, dtype="float16", megatron=MegatronConfig(optimizer=settings))


LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(Mesh(tensor=2), num_microbatches=2),
    "dp2": Layout(Mesh(data=2), num_microbatches=2),
    "pp2": Layout(Mesh(pipeline=2, virtual=2), num_microbatches=2),
    "cp2": Layout(Mesh(context=2), num_microbatches=2),
}
FIRST = 2.0**12


@pytest.mark.parametrize("name", cover.essential(LAYOUTS, "dp2"))
def test_a_skipped_update_is_none(trainers, model_folder, samples, tmp_path, name):
    """The updates 0 and 3 are skipped. The others are, to the bit, those of a run without them, which begins with the
    scale that they leave: it is a power of two. A run that is resumed, or that continues a mirror, between the skipped
    ones continues to the bit."""
    arguments = dict(folder=model_folder, samples=samples)
    layout, size = scaled(LAYOUTS[name], FIRST, loss_scale_window=2), LAYOUTS[name].mesh.world_size
    checkpoint = tmp_path / "after 2"
    skipping = trainers.run(
        "float16_scenarios.updates", size, layout=layout, num_updates=6, spoilt=(0, 3), checkpoint=checkpoint, **arguments
    )
    plain = trainers.run("float16_scenarios.updates", size, layout=layout, num_updates=4, **arguments)
    assert len({str(metrics) for metrics, *_ in skipping}) == 1, "all ranks report the same"
    for (metrics, changed, state, made), (expected, _, expected_state, _) in zip(skipping, plain, strict=True):
        assert [update["update_skipped"] for update in metrics] == [1, 0, 0, 1, 0, 0]
        scales = [FIRST * factor for factor in (1, 0.5, 0.5, 1, 0.5, 0.5)]  # two in a row double it
        assert [update["loss_scale"] for update in metrics] == scales
        assert changed == [False, True, True, False, True, True] and made == 4
        assert not {"grad_norm", "lr", "param_norm"} & metrics[0].keys() and {"loss", "ratio/mean"} <= metrics[0].keys()
        whole = [update for update in metrics if not update["update_skipped"]]
        for one, other in zip(whole, expected, strict=True):
            assert one | {"loss_scale": 0} == other | {"loss_scale": 0}
        assert state.keys() == expected_state.keys()
        assert all(np.array_equal(state[key], expected_state[key]) for key in state)
    resumed = trainers.run(
        "float16_scenarios.updates",
        size,
        layout=layout,
        num_updates=4,
        spoilt=(1,),
        checkpoint=checkpoint,
        resumed=True,
        **arguments,
    )
    for (metrics, _, state, _), (again, _, same, _) in zip(skipping, resumed, strict=True):
        assert [update["loss_scale"] for update in again] == [update["loss_scale"] for update in metrics[2:]]
        assert [update.get("grad_norm") for update in again] is not None
        assert all(np.array_equal(state[key], same[key]) for key in state) and state.keys() == same.keys()
