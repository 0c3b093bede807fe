"""The parts of tools/bench/gpu_day/command.py on a GPU, and what needs two GPUs. Not run yet.

The measured numbers are printed: `pytest -s tests/gpu`.
"""

from __future__ import annotations

from threading import Event

import pytest
import torch

from megatron_rl.tools.bench.gpu_day.command import environment_of, job_of, run_job
from megatron_rl.tools.bench.gpu_day.parts import PARTS, push_between
from megatron_rl.tools.bench.gpu_day.sizes import SIZES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", PARTS)
def test_a_part_passes(name, tmp_path):
    outcome = run_job(job_of(name, "cuda", tmp_path), tmp_path / name, environment_of("cuda"), Event())
    print(f"\n{name}: {dict(outcome.numbers)}")
    assert outcome.status == "passed", outcome.why


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL joins no two ranks on one GPU")
def test_a_push_over_nccl():
    found = push_between(["cuda:0", "cuda:1"], SIZES["cuda"].pushed, share_memory=False)
    print(f"\n{dict(found.numbers)}")
    assert found.problems == []
