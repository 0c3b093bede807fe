from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_rl.actor import platform

without_cuda = pytest.mark.skipif(platform.HAS_CUDA, reason="with CUDA nothing is replaced")


@without_cuda
def test_cuda_means_cpu_inside_the_block_only():
    with platform.running():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.empty(2, device=torch.device("cuda", 0)).device.type == "cpu"
        assert torch.ones(1).cuda().device.type == "cpu"
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert torch.ones(1).type(torch.int).dtype == torch.int
    assert torch.ones(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


@pytest.mark.deep
def test_importing_the_actor_is_quiet():
    process = subprocess.run(
        [sys.executable, "-c", "import megatron_rl.actor.actor"], capture_output=True, text=True, timeout=120
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


def test_peak_memory_stays_after_the_memory_is_freed():
    """In a process of its own, which is small before."""
    code = (
        "from megatron_rl.processes import peak_memory_bytes\n"
        "before = peak_memory_bytes()\nheld = b'x' * 100_000_000\ndel held\nprint(before, peak_memory_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert 1e6 < before < after and after >= 100_000_000
