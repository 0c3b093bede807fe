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
LATENT = ("deepseek_v3", "deepseek_v3_direct", "glm4_moe_lite")
MIXED = ("qwen3_moe", "mixtral", "glm4_moe", *LATENT)
WITH_HEAD_NORMS = ("qwen3", "qwen3_tied", "qwen3_moe", "glm4_moe")
FAMILIES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3_tied"), DENSE),
    **dict.fromkeys(MIXED, MIXTURES),
}
"""kimi_k2 has deepseek_v3's table. olmo2, olmo3, gpt_oss and the families with linear attention have Megatron's local
layers (models/fused.py)."""
ADAPTED = ("qwen3", "qwen2", "qwen3_moe", "deepseek_v3", "glm4_moe")


def build(family: str, meshes: list[dict]) -> list[dict]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), family, *map(json.dumps, meshes)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_all_ranks_have_the_parameters_of_the_table_and_the_marks_that_gradients_need(family):
    meshes = FAMILIES[family]
    for mesh, found in zip(meshes, build(family, meshes), strict=True):
        assert {"TELayerNormColumnParallelLinear", "TEDotProductAttention"} <= set(found["classes"]), mesh
        assert ("TEGroupedMLP" in found["classes"]) == (family in MIXED), mesh
        assert ("TELinear" in found["classes"]) == (family in LATENT), mesh
        assert found["adds_up_gradients"] == [True], mesh
        norms = {name for name in found["summed"] if name.endswith("norm_weight") or "layernorm" in name}
        are_summed = mesh.get("sequence", True) or family in WITH_HEAD_NORMS
        assert bool(norms) == (mesh.get("tensor", 1) > 1 and are_summed), mesh


@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_have_them_too_and_of_frozen_weights_nothing_is_summed(family):
    meshes = FAMILIES[family]
    for mesh, found in zip(meshes, build(f"{family} with adapters", meshes), strict=True):
        has_other_tokens = mesh.get("tensor", 1) > 1 and mesh.get("sequence", True)
        assert bool(found["summed"]) == has_other_tokens, mesh
        assert all(".lora_" in name for name in found["summed"]), mesh
