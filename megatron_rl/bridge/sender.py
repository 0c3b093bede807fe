"""The trainer's side of the bridge: each Megatron rank packs its own shards and sends them to who needs them.

No rank gathers a tensor, and among data-parallel replicas only the one that the plan names sends a shard.
Invariants (tests/unit/bridge): every parameter of the rank is covered by the family's table, by name and
shape.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.bridge.transport import GlooTransport
from megatron_rl.layout import check_parameters, megatron_shards, slices
from megatron_rl.types import Metrics


class BridgeSender:
    """One trainer rank. The parameters are live: each push sends what they hold then."""

    def __init__(self, setup: BridgeSetup, rank: int, parameters: Mapping[str, Tensor]) -> None:
        """Join the group, with all other trainer ranks and all engines.

        Args:
            rank: the global trainer rank, as `Mesh.coordinates` counts.
            parameters: the rank's own shards by Megatron's local names.

        Raises:
            ValueError: a parameter that the plan does not know, one that is missing or of another shape; or
                ranks that do not agree on the plan.
        """
        shards = megatron_shards(setup.shape, setup.mesh, rank, setup.fused_norms)
        live = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        check_parameters(shards, live, f"trainer rank {rank}")
        self._parameters = parameters
        routes = {setup.mesh.world_size + to: copies for to, copies in setup.plan.sent_by(rank).items()}
        self._transport = GlooTransport(setup, rank, routes)

    @torch.no_grad()
    def push(self, version: int) -> Metrics:
        """Send the weights as `version`; returns when every engine that this rank serves holds them.

        Returns:
            `bytes` that this rank sent, `seconds` that it took.

        Raises:
            RuntimeError: an engine died, or did not take the weights within the deadline.
        """
        start, transport = time.perf_counter(), self._transport
        for bucket in range(transport.num_buckets):
            sent = []
            for peer in transport.peers(bucket):
                transport.header(peer).copy_(torch.tensor([version, bucket]))
                copies = transport.buckets[peer][bucket]
                for part, copy in zip(transport.payload(peer, bucket), copies, strict=True):
                    part.copy_(self._parameters[copy.source_name].detach()[slices(copy.source_box)])
                sent.append(transport.send(peer, bucket))
            for work in sent:
                work.wait(transport.deadline)
        transport.await_acknowledgements(version)
        return {"seconds": time.perf_counter() - start, "bytes": transport.num_bytes}

    def close(self) -> None:
        self._transport.close()
