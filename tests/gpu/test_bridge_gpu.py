"""The bridge on GPUs: colocated through CUDA IPC (one GPU is enough), and over NCCL (two). Not run yet.

Each prints seconds and GB/s: `pytest -s tests/gpu/test_bridge_gpu.py`.
"""

from __future__ import annotations

import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_rl.bridge.intake import Intake, Parameters
from megatron_rl.bridge.join import host_store
from megatron_rl.bridge.sender import BridgeSender
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.layout import Engines, megatron_shards, vllm_shards
from megatron_rl.types import Mesh

sys.path.append(str(Path(__file__).parent.parent / "unit" / "bridge"))
from bridge_models import SHAPES, cut, hf_weights  # noqa: E402

SHAPE = replace(SHAPES["qwen3"], hidden_size=2048, num_heads=16, num_kv_heads=8, head_dim=128, ffn_size=8192)
SHAPE = replace(SHAPE, num_layers=4, vocab_size=32000)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def train(setup: BridgeSetup, device: str, results) -> None:
    torch.cuda.set_device(device)
    weights = cut(megatron_shards(SHAPE, setup.mesh, 0), hf_weights(SHAPE, 0))
    sender = BridgeSender(setup, 0, {name: t.to(device, torch.bfloat16) for name, t in weights.items()})
    metrics = [sender.push(version) for version in range(5)]
    results.put(min((m["seconds"], m["bytes"]) for m in metrics[1:]))


def serve(setup: BridgeSetup, device: str, results) -> None:
    torch.cuda.set_device(device)
    expected = cut(vllm_shards(SHAPE, 1, 0), hf_weights(SHAPE, 0))
    live = {name: torch.zeros(t.shape, dtype=torch.bfloat16, device=device) for name, t in expected.items()}
    intake = Intake(setup, 0, 0, Parameters(live), torch.device(device))
    for version in range(5):
        intake.receive(version)
    wrong = [name for name, t in expected.items() if not torch.equal(live[name].cpu(), t.bfloat16())]
    results.put(wrong)


@pytest.mark.parametrize("way", ["cuda ipc", "nccl"])
def test_a_push_between_two_processes(way):
    if way == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL joins no two ranks on one GPU")
    store = host_store("127.0.0.1")
    setup = BridgeSetup(SHAPE, Mesh(), False, Engines(), "bfloat16", "127.0.0.1", store.port, timeout_s=120.0)
    context = multiprocessing.get_context("spawn")
    results = [context.Queue(), context.Queue()]
    devices = ["cuda:0", "cuda:0" if way == "cuda ipc" else "cuda:1"]
    processes = [
        context.Process(target=target, args=(setup, device, queue))
        for target, device, queue in zip((train, serve), devices, results, strict=True)
    ]
    for process in processes:
        process.start()
    seconds, num_bytes = results[0].get(timeout=180)
    assert results[1].get(timeout=60) == []
    for process in processes:
        process.join()
    print(f"\n{way}: {num_bytes / 1e9:.2f} GB in {seconds * 1e3:.1f} ms, {num_bytes / seconds / 1e9:.1f} GB/s")
