"""In a quantised engine vLLM quantises pushed weights as if it had loaded them from a checkpoint."""

from __future__ import annotations

import pytest
import warm
from loaded_engine import checksums
from patience import deadline
from tiny_trainers import write_model
from vllm_workers import called_in_workers

from megatron_rl.types import Mesh


@pytest.mark.parametrize("tensor", [1, 2])
def test_pushed_weights_are_quantised_as_loaded_ones(make_stage, tmp_path, tensor):
    """After two pushes of different weights every quantised layer, with its scales, has the same bits as in an engine
    that loaded the second weights."""
    folders = [write_model(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    sizes = dict(max_prompt_tokens=16, max_response_tokens=8)
    stage = make_stage(
        folders[0], Mesh(tensor=2), dtype="bfloat16", tensor=tensor, quantization="fp8_per_channel", **sizes
    )
    seen = []
    for version, folder in enumerate(folders):
        stage.push(folder, version)
        seen.append(stage.run(called_in_workers(stage.engine, "compute_weight_checksums")))
    (ranks,) = warm.together(checksums, [(folders[1], "fp8_per_channel", tensor)], deadline(240))
    assert len(ranks) == tensor
    for before, now, expected in zip(*seen, ranks, strict=True):
        layers = [name for name in expected if "layers." in name]  # vLLM keeps the others packed on a CPU
        assert sum("weight_scale" in name for name in layers) == 8  # 2 layers x (qkv, o, gate and up, down)
        assert {name: now[name] for name in layers} == {name: expected[name] for name in layers}
        assert all(before[name] != now[name] for name in layers)
