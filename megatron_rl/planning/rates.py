"""The rates of H100 nodes, as shares of what the data sheets say. Times are estimated with them.

Where one H100 has measured a rate, its number is here. The others are fitted to runs that others have published:
training and pushes to some of the rows of tests/unit/planning/published.py, decoding and whole steps to one half of
them, which the other half judges.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import BaseConfig
from megatron_rl.types import ModelShape


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares are of the bf16 peak (989 TFLOP/s), of the memory's bandwidth (3.35 TB/s), of NVLink (450 GB/s) and of a
    NIC (50 GB/s)."""

    dense: float = 0.42
    """What the training of a dense model reaches, without the communication that is counted on its own."""
    mixture: float = 0.36
    """The same for a mixture of experts."""
    dense_fp8: float = 0.85
    """`dense` and `mixture` with Transformer Engine's fp8 (`policy.megatron.transformer`)."""
    mixture_fp8: float = 0.42
    products: float = 0.65
    """What an engine's products reach. With the sizes of six recipes most reached 0.63 to 0.76 on an H100."""
    bandwidth: float = 0.4
    """What the decoding of a dense model reaches, with all that vLLM does between two tokens."""
    mixture_bandwidth: float = 0.3
    """The same for a mixture of experts."""
    nvlink: float = 0.8
    nic: float = 0.85
    host_bytes_per_s: float = 55e9
    """Bytes per second between a GPU and pinned memory of its node, in each direction: measured on one H100."""
    all_reduce_s: float = 20e-6
    """The latency of an all-reduce of a decoding step, in seconds, in a node."""
    all_reduce_across_s: float = 100e-6
    """The same over several nodes. The published steps fit as well with 50 to 150 microseconds, the more the faster the
    memory is taken to be read."""
    turn_s: float = 5.0
    """What a step takes besides its parts if generation and training take turns, in seconds: data, rewards, and the
    change from one to the other. Parts of steps that others have published add up to 3 to 14 s less than the whole."""
    push_bytes_per_s: float = 120e9
    """The bytes of a model per second in pushes of other systems that send from shard to shard over NCCL, however many
    GPUs there are."""
    gpus_per_node: int = 8

    @classmethod
    def of(cls, config: BaseConfig) -> Rates:
        """The rates for a run, with the measured ones of `cluster.calibration` if it is given.

        Raises:
            ValueError: the file has a name that is not a rate's, or a value that is not a positive number.
        """
        path = config.cluster.calibration
        rates = replace(cls(**(_measured(path) if path else {})), gpus_per_node=config.cluster.gpus_per_node or 8)
        if config.policy.megatron.transformer.get("fp8"):
            rates = replace(rates, dense=rates.dense_fp8, mixture=rates.mixture_fp8)
        return rates

    def fitting(self, shape: ModelShape) -> tuple[float, float]:
        """(what training reaches of the peak, what decoding reaches of the bandwidth) with a model."""
        return (self.mixture, self.mixture_bandwidth) if shape.mixture else (self.dense, self.bandwidth)


H100 = Rates()
"""The planner's own rates."""


def _measured(path: Path) -> dict[str, Any]:
    try:
        given: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cluster.calibration: {path} cannot be read as JSON: {error}") from error
    known = [field.name for field in fields(Rates) if field.name != "gpus_per_node"]
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"cluster.calibration: {path} has {name}, which is no rate; these are: {known}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"cluster.calibration: {name} in {path} is {value!r}, and must be above 0")
    return given
