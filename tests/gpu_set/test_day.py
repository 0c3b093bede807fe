"""The parts of `gpu-day` on a CPU, with the GPU packages: with CUDA's torch and Transformer Engine."""

from __future__ import annotations

from threading import Event

import pytest

from megatron_rl.tools.bench.gpu_day.command import environment_of, job_of, run_job
from megatron_rl.tools.bench.gpu_day.parts import PARTS


@pytest.mark.parametrize("name", PARTS)
def test_a_part_passes_on_a_cpu(name, tmp_path):
    outcome = run_job(job_of(name, "cpu", tmp_path), tmp_path / name, environment_of("cpu"), Event())
    assert outcome.status == "passed", outcome.why
