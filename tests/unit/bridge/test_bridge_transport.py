"""Sender and transport over real gloo, a thread a rank; the receiving loop is written out, without vLLM."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from megatron_rl.bridge.sender import BridgeSender
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.bridge.transport import GlooTransport, host_store
from megatron_rl.layout import FAMILIES, megatron_shards, slices, vllm_shards
from megatron_rl.layout.shards import local_extents
from megatron_rl.types import Mesh, ModelShape

SHAPE = ModelShape("qwen3", 2, 32, 4, 2, 16, 64, 40, 1e4, 1e-6, 128, False)


def hf_weights(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    sizes = FAMILIES["qwen3"].hf_tensors(SHAPE)
    return {name: torch.randn(size, generator=random) for name, size in sizes.items()}


def cut(shards, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    local = {name: torch.zeros(size) for name, size in local_extents(shards).items()}
    for shard in shards:
        local[shard.local_name][slices(shard.local_box)] = weights[shard.hf_name][slices(shard.hf_box)]
    return local


class SlowReceiver:
    """An engine rank without vLLM."""

    def __init__(self, setup: BridgeSetup, destination: int) -> None:
        self.shards = vllm_shards(setup.shape, setup.engine_tensor, destination % setup.engine_tensor)
        sizes = local_extents(self.shards)
        self.parameters = {name: torch.full(size, torch.nan) for name, size in sizes.items()}
        routes = {source: copies for (source, to), copies in setup.plan.routes.items() if to == destination}
        self.transport = GlooTransport(setup, setup.mesh.world_size + destination, routes)

    def receive(self, version: int) -> None:
        transport = self.transport
        for bucket in range(transport.num_buckets):
            for peer in transport.peers(bucket):
                transport.receive(peer, bucket).wait(transport.deadline)
                assert transport.header(peer).tolist() == [version, bucket]
                copies = transport.buckets[peer][bucket]
                for part, copy in zip(transport.payload(peer, bucket), copies, strict=True):
                    self.parameters[copy.destination_name][slices(copy.destination_box)] = part.float()
        transport.acknowledge(version)


@contextmanager
def joined(mesh: Mesh, num_engines: int, engine_tensor: int, **options):
    """All ranks, joined: senders, receivers, and a pool with a thread for each."""
    store = host_store("127.0.0.1")
    setup = BridgeSetup(SHAPE, mesh, False, num_engines, engine_tensor, "float32", "127.0.0.1", store.port)
    setup = replace(setup, **options)
    weights = hf_weights(0)
    with ThreadPoolExecutor(setup.world_size) as pool:
        senders = [
            pool.submit(BridgeSender, setup, rank, cut(megatron_shards(SHAPE, mesh, rank), weights))
            for rank in range(mesh.world_size)
        ]
        receivers = [pool.submit(SlowReceiver, setup, d) for d in range(num_engines * engine_tensor)]
        senders, receivers = [s.result() for s in senders], [r.result() for r in receivers]
        yield senders, receivers, pool
        for end in [*senders, *(receiver.transport for receiver in receivers)]:
            end.close()


@pytest.mark.parametrize("bucket_bytes", [2**28, 5000])
@pytest.mark.parametrize(
    ("mesh", "num_engines", "engine_tensor"),
    [
        (Mesh(), 1, 1),
        (Mesh(tensor=2, pipeline=2), 1, 2),
        (Mesh(tensor=2, data=2), 2, 1),
        (Mesh(data=2), 1, 4),
    ],
    ids=str,
)
def test_every_engine_rank_holds_its_shards(mesh, num_engines, engine_tensor, bucket_bytes, monkeypatch):
    """TP4 engines of a model with 2 KV heads replicate them; small buckets cut routes into many messages."""
    monkeypatch.setattr("megatron_rl.bridge.transport.BUCKET_BYTES", bucket_bytes)
    with joined(mesh, num_engines, engine_tensor) as (senders, receivers, pool):
        for version in (0, 1):
            weights = hf_weights(version)
            for rank, sender in enumerate(senders):
                for name, value in cut(megatron_shards(SHAPE, mesh, rank), weights).items():
                    sender._parameters[name].copy_(value)
            work = [pool.submit(sender.push, version) for sender in senders]
            work += [pool.submit(receiver.receive, version) for receiver in receivers]
            metrics = [w.result() for w in work][: len(senders)]
            for destination, receiver in enumerate(receivers):
                expected = cut(receiver.shards, weights)
                assert receiver.parameters.keys() == expected.keys()
                for name, value in expected.items():
                    assert torch.equal(receiver.parameters[name], value), (destination, name)
        written = sum(t.numel() for receiver in receivers for t in receiver.parameters.values())
        assert sum(m["bytes"] for m in metrics) == 4 * written


def test_bfloat16_on_the_wire_rounds_once():
    with joined(Mesh(tensor=2), 1, 1, dtype="bfloat16") as (senders, receivers, pool):
        work = [pool.submit(sender.push, 0) for sender in senders] + [pool.submit(receivers[0].receive, 0)]
        [w.result() for w in work]
        for name, value in cut(receivers[0].shards, hf_weights(0)).items():
            assert torch.equal(receivers[0].parameters[name], value.bfloat16().float()), name


@pytest.mark.parametrize("silent", ["receiver", "sender"])
def test_a_silent_peer_is_an_error_within_the_deadline(silent):
    with joined(Mesh(), 1, 1, timeout_s=1.0) as (senders, receivers, _):
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            receivers[0].receive(0) if silent == "sender" else senders[0].push(0)
        assert time.monotonic() - start < 5  # the deadline is 1 s; the rest is this machine's scheduling


def test_an_engine_of_another_version_is_an_error_to_the_sender():
    with joined(Mesh(), 1, 1) as (senders, receivers, pool):
        push = pool.submit(senders[0].push, 4)
        transport = receivers[0].transport
        transport.receive(0, 0).wait(transport.deadline)
        transport.acknowledge(3)
        with pytest.raises(RuntimeError, match="pushed version 4, rank 1 expected 3"):
            push.result()


def test_ranks_that_disagree_refuse_on_both_sides():
    store = host_store("127.0.0.1")
    setup = BridgeSetup(SHAPE, Mesh(), False, 1, 1, "float32", "127.0.0.1", store.port, timeout_s=10.0)
    trainer = cut(megatron_shards(SHAPE, Mesh(), 0), hf_weights(0))
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(BridgeSender, setup, 0, trainer)]
        ends += [pool.submit(SlowReceiver, replace(setup, dtype="bfloat16"), 0)]
        for rank, end in enumerate(ends):
            with pytest.raises(ValueError, match=f"rank {rank} says .* rank {1 - rank} says"):
                end.result()


def test_a_missing_rank_is_named():
    store = host_store("127.0.0.1")
    setup = BridgeSetup(SHAPE, Mesh(), False, 1, 1, "float32", "127.0.0.1", store.port, timeout_s=0.5)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] of 2 did not join the bridge within 0.5 s"):
        BridgeSender(setup, 0, cut(megatron_shards(SHAPE, Mesh(), 0), hf_weights(0)))


def test_an_unknown_or_missing_trainer_parameter_is_named():
    setup = BridgeSetup(SHAPE, Mesh(), False, 1, 1, "float32", "127.0.0.1", 1)
    good = cut(megatron_shards(SHAPE, Mesh(), 0), hf_weights(0))
    with pytest.raises(ValueError, match="trainer rank 0: parameter decoder.stray"):
        BridgeSender(setup, 0, good | {"decoder.stray": torch.zeros(1)})
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    with pytest.raises(ValueError, match=name):
        BridgeSender(setup, 0, {n: t for n, t in good.items() if n != name})


def test_no_default_group_is_made():
    with joined(Mesh(), 1, 1):
        assert not torch.distributed.is_initialized()
