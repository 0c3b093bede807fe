"""The bridge inside vLLM: one of vLLM's weight transfer engines, which lives in each of its workers.

`register` is an entry point of `vllm.general_plugins`: every process of vLLM imports this module, so the module imports
only what vLLM's environment has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist
from vllm.distributed import get_world_group
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from megatron_rl.bridge.adapter_slot import SlotParameters, open_slots, pin, record_adapters
from megatron_rl.bridge.intake import Intake
from megatron_rl.bridge.model_parameters import ModelParameters, repacked_layers
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.bridge.unpacking import unpack
from megatron_rl.bridge.vllm_loaders import record_loading
from megatron_rl.layout import Engines, Recording
from megatron_rl.types import ModelShape

T = TypeVar("T")
BACKEND = "megatron_rl"


def register() -> None:
    """Make the bridge known to vLLM as `WeightTransferConfig(backend="megatron_rl")`."""
    if BACKEND not in WeightTransferEngineFactory._registry:  # vLLM calls its plugins more than once
        WeightTransferEngineFactory.register_engine(BACKEND, BridgeReceiver)


@dataclass
class JoinInfo(WeightTransferInitInfo):
    setup: dict[str, Any]
    """The value of `BridgeSetup.as_dict()`."""
    engine: int
    """The index of this engine in the setup."""


@dataclass
class PushInfo(WeightTransferUpdateInfo):
    version: int
    verify: bool = False
    """The whole push is verified, not only a sample."""


class BridgeReceiver(WeightTransferEngine[JoinInfo, PushInfo]):
    """One engine worker."""

    init_info_cls = JoinInfo
    update_info_cls = PushInfo
    supports_draft_weight_update = False
    _intake: Intake | None = None
    _parameters: ModelParameters | None = None
    brings_adapters = False
    """Whether the bridge that was joined brings adapters, and not the model's weights."""
    digests: dict[str, str] = {}
    """What the rank holds since the last push, by the modules that were verified."""

    def open_slots(self, model_runner: Any) -> None:
        """See `adapter_slot.open_slots`."""
        open_slots(model_runner)

    def pin(self) -> None:
        """See `adapter_slot.pin`."""
        pin(self._adapters())

    def record(self, shape: ModelShape) -> Recording:
        """What this rank holds of a checkpoint, or of the adapters if the model has some; see
        `recording.record_loading` and `adapter_slot.record_adapters`."""
        if shape.adapters is not None:
            return record_adapters(self._adapters(), shape, self.model_config.dtype)
        recording = record_loading(self.model, shape, self.model_config.dtype)
        return replace(recording, repacked=any(repacked_layers(self.model)))

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Join all trainer ranks and all other engines. An earlier joining ends.

        Raises:
            ValueError: a live parameter that the plan does not know, one that is missing or of another shape
                or dtype; an engine that is not of the setup's kind; or ranks that do not agree on the plan.
        """
        last_turns = self._on_all_ranks(lambda: self._join(init_info))
        if self._parameters is not None and last_turns:
            self._parameters.repack_after(last_turns)

    def _join(self, init_info: JoinInfo) -> dict[str, int]:
        """Returns the last turn that brings something to each layer that vLLM repacks."""
        self.shutdown()
        setup = BridgeSetup.from_dict(init_info.setup)
        parallel, engines = self.parallel_config, setup.engines
        mine = Engines(
            engines.num,
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.enable_expert_parallel,
            engines.num_chains,
        )
        if mine != engines:
            raise ValueError(f"engine {init_info.engine} is one of {mine}, the bridge is for {engines}")
        side, shards = f"engine {init_info.engine}, rank {parallel.rank}", setup.engine_shards(parallel.rank)
        self.brings_adapters = setup.shape.adapters is not None
        if self.brings_adapters:
            slot = SlotParameters(self._adapters(), shards, side)
            self._intake = Intake(setup, init_info.engine, parallel.rank, slot, self.device)
            return {}
        if self.device.type == "cpu":
            unpack(self.model, with_tower=bool(setup.shape.tower))
        parameters = ModelParameters(self.model, self.model_config, self.device, shards, side)
        self._intake = Intake(setup, init_info.engine, parallel.rank, parameters, self.device)
        self._parameters = parameters
        return parameters.last_turns(self._intake.turns)

    def _adapters(self) -> Any:
        """vLLM's LoRAModelManager."""
        return self.model.lora_manager

    def start_weight_update(self) -> None:
        """Nothing must be prepared, because parameters are written in place."""

    def finish_weight_update(self) -> None:
        """Nothing must be finished: `receive_weights` returns when all messages are written and acknowledged."""

    def receive_weights(self, update_info: PushInfo) -> None:
        """Write one whole push into the live parameters.

        Raises:
            RuntimeError: a rank died, stalled past the deadline, or pushed another version; the bytes differ from the
                sent ones; or a module does not hold what it should after vLLM has processed it.
        """
        self._on_all_ranks(lambda: self._receive(update_info.version, update_info.verify))

    def _receive(self, version: int, verify: bool) -> None:
        if self._intake is None:
            raise RuntimeError(
                "the engine has not joined the bridge; call init_weight_transfer_engine before update_weights"
            )
        self.digests = self._intake.receive(version, verify)

    def _on_all_ranks(self, call: Callable[[], T]) -> list[T]:
        """Call on every rank of the engine. Returns what the call returned on each rank, or nothing if it raised an
        error on some rank. The last rank raises the errors of all: vLLM reads the results of its ranks up to the first
        error, and takes the unread ones as the results of the next call."""
        if self.parallel_config.world_size == 1:
            return [call()]
        group = get_world_group()
        mine: tuple[str, T | None] = "", None
        try:
            mine = "", call()
        except Exception as caught:  # raised below, by the last rank
            mine = str(caught) or repr(caught), None
        of_ranks: list[Any] = [None] * group.world_size
        dist.all_gather_object(of_ranks, mine, group=group.cpu_group)
        errors = [error for error, _ in of_ranks if error]
        if not errors:
            return [value for _, value in of_ranks]
        if group.is_last_rank:
            raise RuntimeError("; ".join(dict.fromkeys(errors)))
        return []

    def shutdown(self) -> None:
        if self._intake is not None:
            self._intake.close()
            self._intake = self._parameters = None
