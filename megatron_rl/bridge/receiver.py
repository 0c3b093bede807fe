"""The engine's side of the bridge: one of vLLM's weight transfer engines, living in each of its workers.

`register` is the entry point `vllm.general_plugins`: every process of vLLM imports this module, so it imports
nothing that vLLM has not. Invariants (tests/unit/bridge): every parameter of the worker is written by the
plan, or an error names it; what arrives is of the version that was asked for.

On a CPU vLLM packs linear weights for oneDNN and drops the originals. Joining gives the layers their
parameters back and lets the forward read them directly, so that a push is a copy into live parameters, as on
a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.bridge.transport import GlooTransport
from megatron_rl.layout import check_parameters, slices, vllm_shards

BACKEND = "megatron_rl"


def register() -> None:
    """Make the bridge known to vLLM as `WeightTransferConfig(backend="megatron_rl")`."""
    if BACKEND not in WeightTransferEngineFactory._registry:  # vLLM calls its plugins more than once
        WeightTransferEngineFactory.register_engine(BACKEND, BridgeReceiver)


@dataclass
class JoinInfo(WeightTransferInitInfo):
    setup: dict[str, Any]
    """BridgeSetup.as_dict()"""
    engine: int
    """Index of this engine among the setup's."""


@dataclass
class PushInfo(WeightTransferUpdateInfo):
    version: int


class BridgeReceiver(WeightTransferEngine[JoinInfo, PushInfo]):
    """One engine worker."""

    init_info_cls = JoinInfo
    update_info_cls = PushInfo
    supports_draft_weight_update = False
    _transport: GlooTransport | None = None

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Join the group, with all trainer ranks and all other engines.

        Raises:
            ValueError: a live parameter that the plan does not know, one that is missing or of another shape
                or dtype; or ranks that do not agree on the plan.
        """
        setup = BridgeSetup.from_dict(init_info.setup)
        assert self.parallel_config.tensor_parallel_size == setup.engine_tensor, setup
        tensor_rank = self.parallel_config.rank
        if self.device.type == "cpu":
            unpack_linears(self.model)
        self._parameters = dict(self.model.named_parameters())
        side = f"engine {init_info.engine}, tensor rank {tensor_rank}"
        live = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        check_parameters(vllm_shards(setup.shape, setup.engine_tensor, tensor_rank), live, side)
        for name, parameter in self._parameters.items():
            if parameter.dtype != getattr(torch, setup.dtype):
                raise ValueError(f"{side}: {name} is {parameter.dtype}, the bridge brings {setup.dtype}")
        me = setup.engine_rank(init_info.engine, tensor_rank)
        self._transport = GlooTransport(setup, setup.mesh.world_size + me, setup.plan.received_by(me))

    def start_weight_update(self) -> None:
        """Nothing to prepare: parameters are written in place."""

    def finish_weight_update(self) -> None:
        """Nothing to finish: `receive_weights` returns when all is written and acknowledged."""

    @torch.no_grad()
    def receive_weights(self, update_info: PushInfo) -> None:
        """Write one whole push into the live parameters.

        Raises:
            RuntimeError: a trainer rank died, stalled past the deadline, or pushed another version.
        """
        transport = self._transport
        assert transport is not None, "init_transfer_engine comes first"
        for bucket in range(transport.num_buckets):
            peers = transport.peers(bucket)
            for work in [transport.receive(peer, bucket) for peer in peers]:
                work.wait(transport.deadline)
            for peer in peers:
                version, number = transport.header(peer).tolist()
                if (version, number) != (update_info.version, bucket):
                    transport.acknowledge(update_info.version)
                    raise RuntimeError(
                        f"the engine was to receive version {update_info.version}, trainer rank {peer} "
                        f"pushed version {version} (message {number} for {bucket}); push and receive must "
                        "name the same version"
                    )
            for peer in peers:
                copies = transport.buckets[peer][bucket]
                for part, copy in zip(transport.payload(peer, bucket), copies, strict=True):
                    self._parameters[copy.destination_name][slices(copy.destination_box)].copy_(part)
        transport.acknowledge(update_info.version)

    def shutdown(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None


def unpack_linears(model: nn.Module) -> None:
    """Undo vLLM's oneDNN packing: full-size parameters (their values are the next push's) read by `F.linear`.

    `cpu_linear` is what vLLM's unquantised linear and output layers call as their forward on a CPU.
    """
    for layer in model.modules():
        if not hasattr(layer, "cpu_linear"):
            continue
        layer.cpu_linear = nn.functional.linear
        if layer.weight.numel() == 0:
            shape = (layer.output_size_per_partition, layer.input_size_per_partition)
            layer.weight = nn.Parameter(torch.empty(shape, dtype=layer.weight.dtype), requires_grad=False)
