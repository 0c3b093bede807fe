"""vLLM's CUDA configuration from our options, and its CUDA classes against the tables of `layout`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("vllm_classes.py")
LAYOUTS = [{}, {"tensor": 2}, {"tensor": 4}, {"tensor": 2, "pipeline": 2}]
EXPERTS = [{"tensor": 2, "expert": 2}, {"tensor": 4, "expert": 4}]
FP8 = [{"tensor": 2, "quantization": "fp8"}, {"quantization": "fp8_per_channel"}]
FEW = [{}, {"tensor": 2, "pipeline": 2}, EXPERTS[0]]
DENSE = ("llama", "qwen2", "qwen3", "olmo3")
CASES = {
    "llama": [*LAYOUTS, *FP8],
    "qwen2": [*LAYOUTS, *FP8],
    "qwen3": [*LAYOUTS, *FP8],
    "qwen3_moe": [*LAYOUTS, *EXPERTS, *FP8],
    "mixtral": [*LAYOUTS, *EXPERTS, *FP8],
    "deepseek_v3": [*LAYOUTS, *EXPERTS],  # after fp8 vLLM compiles a kernel for its latent attention, on a GPU
    "kimi_k2": FEW,
    "glm4_moe_lite": FEW,
    "glm4_moe": [*LAYOUTS, *EXPERTS, *FP8],
    "gpt_oss": [*LAYOUTS, *EXPERTS],
    "qwen3_next": FEW,
    "qwen3_5_moe_text": FEW,
    "olmo3": LAYOUTS,
}


def found_by(*arguments: str):
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_vllm_makes_a_configuration_for_cuda_from_every_recipe():
    found = found_by("configure")
    assert len(found) >= 10
    for recipe, engine in found.items():
        assert engine["made"] == engine["wanted"], recipe
        for key in ("quantization", "routes", "tokens"):
            assert engine[key][0] == engine[key][1], recipe
        assert engine["transfer"] == "megatron_rl" and engine["logprobs"] == "processed_logprobs", recipe
        assert engine["graphs"] != "NONE" and not engine["eager"], recipe


@pytest.mark.parametrize("family", CASES)
def test_a_recording_of_the_classes_for_cuda_equals_the_table(family):
    cases = CASES[family]
    for options, found in zip(cases, found_by("record", family, *map(json.dumps, cases)), strict=True):
        assert found["differing"] == [], options
        assert all(name.startswith("FlashAttn") or name == "FlashAttentionImpl" for name in found["classes"]), options
        # Triton's kernels, which vLLM chooses on an H100, read bf16 experts in the checkpoint's form.
        experts = [name for name in found["repacked"] if "experts" in name]
        assert bool(experts) == (family not in DENSE and "quantization" in options), options
