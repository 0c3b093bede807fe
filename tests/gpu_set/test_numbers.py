"""The gradients of Transformer Engine's layers in every kind of layout, with PyTorch in the place of their kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("te_numbers.py")
LAYOUTS = {
    "llama": ["tp2-cp2", "tp2 whole"],
    "qwen2": ["tp2", "pp2"],
    "qwen2_windows": ["tp2"],
    "qwen3_moe": ["tp2-cp2", "tp2-dp2-ep2-etp1"],
    "mixtral": ["tp2-dp2-ep2"],
    "deepseek_v3": ["tp2", "tp2-cp2", "tp2-dp2-ep2 recomputed", "tp2-dp2-ep2-etp1", "pp2-vpp2", "dp2-ep2"],
    "deepseek_v3_direct": ["tp2-cp2"],
    "kimi_k2": ["tp2-pp2", "cp2"],
    "glm4_moe_lite": ["tp2-cp2"],
    "glm4_moe": ["tp2-cp2", "tp4", "tp2-dp2-ep2-etp1"],
    "qwen2_5_vl": ["tp2", "tp2-cp2", "pp2-vpp2", "tp2 recomputed"],
    "qwen3_vl": ["tp2", "cp2", "tp2-cp2", "pp2 recomputed", "dp2"],
    "qwen3_vl_moe": ["tp2-cp2", "tp2-dp2-ep2", "tp2-dp2-ep2 recomputed"],
    "llama with adapters": ["tp2-cp2", "tp2 whole", "pp2 recomputed", "tp2 unchanged", "tp2 whole unchanged"],
    "qwen2 with some": ["tp2-pp2"],
    "qwen3_moe with adapters": ["tp2-cp2", "tp2-dp2-ep2 recomputed", "tp2-dp2-ep2-etp1", "tp2-dp2-ep2 unchanged"],
    "qwen3_moe with some": ["tp2-dp2-ep2"],
    "deepseek_v3 with adapters": ["tp2-cp2", "tp2-dp2-ep2 recomputed", "tp2-pp2", "pp2-vpp2", "dp2-ep2 unchanged"],
    "deepseek_v3_direct with adapters": ["tp2-cp2"],
    "glm4_moe with adapters": ["tp4", "tp2-dp2-ep2-etp1"],
    "llama with a base in fp8": ["tp2", "pp2 recomputed"],
    "deepseek_v3 with a base in fp8": ["tp2-dp2-ep2"],
}
"""`whole`: without sequence parallelism. `recomputed`: layers are computed again in the backward pass. `unchanged`:
with B = 0 and with adapters that are off, the log-probs are the base model's, bit for bit. Models with adapters have
the gradients of A and B, and `some` are for three kinds of layers."""


@pytest.fixture(scope="module")
def faults():
    done = subprocess.run([sys.executable, str(SCRIPT), json.dumps(LAYOUTS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", LAYOUTS)
def test_gradients_are_as_near_to_float64_as_one_process_of_local_layers(faults, family):
    assert faults[family] == []
