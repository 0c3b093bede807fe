from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch

from megatron_rl.actor import platform, state

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


IMPORT = """
import sys
from megatron_rl.actor import platform
with platform.importing():
    import megatron_rl.actor.actor
assert platform.HAS_CUDA or "torch._dynamo" not in sys.modules, "torch's compiler, for which a CPU has no use"
"""


@pytest.mark.skipif(platform.HAS_CUDA, reason="the compiler is used there")
def test_the_compiler_is_left_out_inside_the_block_only():
    compiler = torch.compile
    with platform.importing():
        assert torch.compile(len) is len and torch.compile(mode="default")(len) is len
    assert torch.compile is compiler


@pytest.mark.deep
def test_importing_the_actor_is_quiet_and_leaves_out_the_compiler():
    process = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=120)
    said = [line for line in process.stderr.splitlines() if "No CUDA runtime is found" not in line]  # torch's, on nvcc
    assert (process.returncode, process.stdout, said) == (0, "", [])


@pytest.mark.parametrize("ordered, mine, seen", [(True, None, "1"), (False, None, None), (True, "8", "8")])
def test_one_hardware_queue_is_for_groups_that_rely_on_order(monkeypatch, ordered, mine, seen):
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, mine or "")
    if mine is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(platform, "HAS_CUDA", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda rank: None)
    monkeypatch.setattr(platform.dist, "init_process_group", lambda **how: None)
    platform.start(0, 1, platform.dist.HashStore(), ordered=ordered)
    assert os.environ.get(name) == seen


def test_peak_memory_stays_after_the_memory_is_freed():
    """In a process of its own, which is small before."""
    code = (
        "from megatron_rl.processes import peak_memory_bytes\n"
        "before = peak_memory_bytes()\nheld = b'x' * 100_000_000\ndel held\nprint(before, peak_memory_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert 1e6 < before < after and after >= 100_000_000


@pytest.mark.parametrize("has_cuda, cuda", [(False, torch.ones(16, dtype=torch.uint8)), (True, None)])
def test_generators_of_the_other_kind_of_device_are_left_as_they_are(monkeypatch, has_cuda, cuda):
    """A checkpoint of a CPU on a GPU, and the other way round."""
    tracker = state.get_cuda_rng_tracker()
    saved = state.random_state()
    monkeypatch.setattr(platform, "HAS_CUDA", has_cuda)
    tracker.set_states({"model-parallel-rng": torch.zeros(16, dtype=torch.uint8)})
    torch.rand(1), random.random()
    state.restore_random(saved | {"cuda": cuda})
    assert list(tracker.get_states()) == ["model-parallel-rng"], "Megatron's are not the saved ones"
    assert torch.equal(torch.get_rng_state(), saved["torch"]) and random.getstate() == saved["python"]
    monkeypatch.setattr(platform, "HAS_CUDA", False)
    state.restore_random(saved | {"cuda": None})
    assert tracker.get_states() == saved["megatron"]
