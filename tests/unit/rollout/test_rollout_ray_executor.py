"""The workers of vLLM's own Ray executor join the bridge like all others, also on several nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from patience import deadline
from tiny_references import reference_logp
from tiny_trainers import write_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
PROMPT = [5, 6, 7, 15]


def answer_of(program: str, *arguments: str) -> dict:
    """What a program of this folder prints as JSON."""
    command = [sys.executable, str(HERE / program), *arguments, ",".join(map(str, PROMPT))]
    path = os.pathsep.join(map(str, [HERE / "ray_on_cpu", HERE, HERE.parents[1], HERE.parents[2]]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_prestart_worker_first_driver": "0"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=deadline(240))
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))


def check_logp(answer: dict, folder: Path) -> None:
    """The answer's log-probs equal those of transformers with the folder's weights."""
    ids = np.array([*PROMPT, *answer["ids"]], np.int32)
    expected = reference_logp(AutoModelForCausalLM.from_pretrained(folder).float(), ids, 1.0)[len(PROMPT) :]
    np.testing.assert_allclose(answer["logp"], expected, atol=2e-5)  # in fp32 two ranks sum in another order


@pytest.mark.deep
def test_an_engine_that_is_wider_than_a_node_runs_on_its_planned_nodes(tmp_path):
    """It receives two pushes, and its answer is that of the second weights."""
    folders = [write_model(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    answer = answer_of("spanning_engine.py", *map(str, folders), str(tmp_path / "logs"))
    assert answer["nodes"] == answer["planned"] and len(set(answer["nodes"])) == 2
    check_logp(answer, folders[1])
