"""The memory of teachers' engines, and the seconds of teachers' work. Estimates, like everything here.

A teacher's work is counted as if it taught every row, because the rows of its data sets are not known.
"""

from __future__ import annotations

import numpy as np

from megatron_rl.balance import forward_flops
from megatron_rl.balance.hardware import PEAK_FLOPS
from megatron_rl.config.policy import ParallelConfig
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig
from megatron_rl.config.teachers import TeacherConfig, engine_config, served_teachers, teacher_on_ranks
from megatron_rl.planning.engine import (
    ACTIVATIONS,
    ENGINE_WORK_BYTES,
    activation_bytes,
    gpu_bytes,
    sequence_bytes,
    step_tokens,
    vllm_bytes,
)
from megatron_rl.planning.estimates import Work, training_seconds
from megatron_rl.planning.gpu import GpuMemory, MemoryPart, always
from megatron_rl.planning.parameters import BYTES, stage_parameters
from megatron_rl.planning.rates import Rates
from megatron_rl.planning.shapes import planned_shape, planned_teacher_shape
from megatron_rl.planning.transfer import planned_transfer
from megatron_rl.types import Mesh


def teachers_with_gpus(config: GrpoRunConfig) -> list[tuple[int, TeacherConfig]]:
    """The teachers whose engines have GPUs, with their numbers."""
    on_gpus = config.cluster.gpus_per_engine_rank > 0
    return [(i, one) for i, one in served_teachers(config) if one.path is not None and on_gpus]


def teacher_gpus(config: GrpoRunConfig) -> int:
    """The number of their GPUs; 0 if they share those of the trainers."""
    own = [] if config.cluster.colocate else teachers_with_gpus(config)
    return sum(one.num_engines * one.parallel.num_ranks for _, one in own)


def sleeping(config: GrpoRunConfig) -> tuple[MemoryPart, float]:
    """What all teachers' engines keep on a GPU that they share while they sleep, and the bytes in the node's memory."""
    numbers = [number for number, _ in teachers_with_gpus(config)] if config.cluster.colocate else []
    part = MemoryPart(always(len(numbers) * ENGINE_WORK_BYTES), "set algorithm.distillation.by to trainer")
    return part, sum(_weights(config, number) for number in numbers)


def _weights(config: GrpoRunConfig, number: int) -> float:
    """The bytes on the fullest rank of a teacher's engine."""
    own = engine_config(config, number)
    own = own.model_copy(update={"cluster": own.cluster.model_copy(update={"colocate": False})})
    return float(planned_transfer(own, planned_teacher_shape(config, number), Mesh()).engine_bytes.max())


def teacher_memory(config: GrpoRunConfig, lent: float) -> list[tuple[GpuMemory, float]]:
    """What the fullest rank of each teacher's engines needs at least, weights, work, and the keys and values of one
    text, and the bytes of its GPU.

    Args:
        lent: what trainers and other engines keep on a GPU that they share with a teacher while it scores.
    """
    found = []
    for number, teacher in teachers_with_gpus(config):
        own, shape = engine_config(config, number), planned_teacher_shape(config, number)
        width, tensor = BYTES[config.model.dtype], teacher.parallel.tensor
        layers = range(-(-shape.num_layers // teacher.parallel.pipeline))
        sizes = {
            "weights": _weights(config, number),
            ACTIVATIONS: activation_bytes(shape, own.rollout, step_tokens(own), width),
            "work of vLLM": ENGINE_WORK_BYTES,
            "keys and values of a text": sequence_bytes(shape, tensor, own.rollout.max_model_tokens, width, layers),
        }
        sizes["left by rollout.gpu_memory_utilization"] = max(0.0, gpu_bytes(own) - vllm_bytes(own) - lent)
        sizes["trainers and other engines that sleep"] = lent
        remedy = f"raise teachers.{number}.parallel.tensor or teachers.{number}.parallel.pipeline"
        parts = {name: MemoryPart(always(size), remedy) for name, size in sizes.items()}
        scores = " while it scores" if config.cluster.colocate else ""
        found.append((GpuMemory.of(f"engine of teacher {number}{scores}, at least", parts), gpu_bytes(own)))
    return found


def scoring_seconds(config: GrpoRunConfig, lengths: np.ndarray, rates: Rates) -> tuple[float, float]:
    """The seconds in which the slowest teacher's engines read texts of these lengths while others are generated, and in
    which teachers read them in turn with the policy's engines: the policy itself, and all that share their GPUs."""
    others, own = 0.0, 0.0
    for number, teacher in teachers_with_gpus(config):
        ranks = teacher.num_engines * teacher.parallel.num_ranks
        flops = float(forward_flops(lengths, planned_teacher_shape(config, number)).sum())
        seconds = flops / (ranks * rates.products * PEAK_FLOPS)
        if config.cluster.colocate:  # the weights of both sides change their places, and back
            own += seconds + 2 * _weights(config, number) / rates.host_bytes_per_s
        else:
            others = max(others, seconds)
    if any(one.is_policy for one in config.teachers):
        ranks = config.rollout.num_engines * config.rollout.engine_ranks
        own += float(forward_flops(lengths, planned_shape(config)).sum()) / (ranks * rates.products * PEAK_FLOPS)
    return others, own


def pass_seconds(
    config: BaseConfig, work: Work, parallel: ParallelConfig, num_microbatches: int, rates: Rates
) -> float:
    """The seconds of the passes of a teacher on the trainer's ranks, with its weights' way from the nodes' memory; 0 if
    there is none. With its own most probable tokens as support it has two."""
    if not isinstance(config, GrpoRunConfig) or teacher_on_ranks(config) is None:
        return 0.0
    assert config.algorithm.distillation is not None, "there is a teacher"
    passes = 1 + (config.algorithm.distillation.on_ranks == "teacher")
    shape, dtype = planned_teacher_shape(config, 0), config.model.dtype
    read_s = training_seconds(
        Work(work.lengths, 0, passes, 0), shape, parallel, num_microbatches, dtype=dtype, recompute="none", rates=rates
    )
    held = max(one.total for one in stage_parameters(shape, parallel.mesh)) * BYTES[dtype]
    return read_s + passes * held / rates.host_bytes_per_s
