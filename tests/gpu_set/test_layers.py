"""Transformer Engine's layers by their real constructors, in all ranks of each mesh: parameters, marks, fused norms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("te_layers.py")
DENSE = [
    {},
    {"tensor": 2, "pipeline": 2, "virtual": 2},
    {"tensor": 4},
    {"tensor": 2, "data": 2},
    {"tensor": 2, "sequence": False},
    {"tensor": 2, "context": 2},
    {"pipeline": 4, "data": 2},
]
MIXTURES = [
    *DENSE,
    {"tensor": 2, "data": 2, "expert": 2},
    {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 2},
    {"data": 4, "expert": 4},
    {"tensor": 2, "pipeline": 2, "data": 2, "expert": 4, "expert_tensor": 1},
]
MIXED = ("qwen3_moe", "mixtral")
FAMILIES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3_tied"), DENSE),
    **dict.fromkeys(MIXED, MIXTURES),
}
"""olmo2, olmo3 and deepseek_v3 have Megatron's local layers (layout/fused.py)."""


@pytest.mark.parametrize("family", FAMILIES)
def test_all_ranks_have_the_parameters_of_the_table_and_the_marks_that_gradients_need(family):
    meshes = FAMILIES[family]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), family, *map(json.dumps, meshes)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for mesh, found in zip(meshes, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert {"TELayerNormColumnParallelLinear", "TEDotProductAttention"} <= set(found["classes"]), mesh
        assert ("TEGroupedMLP" in found["classes"]) == (family in MIXED), mesh
        assert found["adds_up_gradients"] == [True], mesh
        norms = {name for name in found["summed"] if name.endswith("norm_weight") or "layernorm" in name}
        assert bool(norms) == (mesh.get("tensor", 1) > 1 and (mesh.get("sequence", True) or "qwen3" in family)), mesh
