"""The workers of vLLM's own Ray executor join the bridge like all others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from patience import deadline
from tiny_references import reference_logp
from tiny_trainers import write_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent


def test_an_engine_under_vllms_ray_executor_takes_pushes(tmp_path):
    """After two pushes its log-probs equal those of transformers with the second weights."""
    folders = [write_model(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    prompt = [5, 6, 7, 15]
    program = [sys.executable, str(HERE / "ray_engine.py"), *map(str, folders), ",".join(map(str, prompt))]
    environment = os.environ | {"PYTHONPATH": f"{HERE / 'ray_on_cpu'}:{HERE.parents[1]}", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=deadline(240))
    assert run.returncode == 0, run.stderr
    answer = json.loads(next(line for line in run.stdout.splitlines() if line.startswith('{"executor"')))
    assert answer["executor"].startswith("Ray")
    ids = np.array([*prompt, *answer["ids"]], np.int32)
    expected = reference_logp(AutoModelForCausalLM.from_pretrained(folders[1]).float(), ids, 1.0)[len(prompt) :]
    np.testing.assert_allclose(answer["logp"], expected, atol=2e-5)  # in fp32 two ranks sum in another order
