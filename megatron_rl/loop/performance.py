"""How fast the trainers work."""

from __future__ import annotations

from megatron_rl.balance.hardware import PEAK_FLOPS
from megatron_rl.config.schema import BaseConfig
from megatron_rl.types import Metrics


def performance(config: BaseConfig, planned: Metrics, seconds: float) -> Metrics:
    """The metrics of a step's updates:

        perf/tokens_per_s  tokens without padding, on all ranks together
        perf/mfu           model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311): the FLOPs of forward and
                           backward pass, without recomputation, as a share of the peak of all ranks' H100 GPUs; absent
                           on CPUs

    Args:
        planned: the metrics of the step's plan.
        seconds: the time of the updates.
    """
    metrics = {"perf/tokens_per_s": planned["balance/tokens"] / seconds}
    if config.cluster.gpus_per_trainer:
        peak = config.policy.parallel.mesh.world_size * PEAK_FLOPS
        metrics["perf/mfu"] = planned["balance/model_flops"] / (seconds * peak)
    return metrics
