"""The memory of the GPUs of an engine by phase, and the sequences that its KV cache holds.

The bytes of weights and of the KV cache are exact; the bytes of vLLM's own work are a constant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig
from megatron_rl.layout import TransferPlan
from megatron_rl.models import FAMILIES, engine_layers, is_linear_weight, volume
from megatron_rl.models.vision import tower_in_engine
from megatron_rl.planning.adapters import slot_bytes
from megatron_rl.planning.gpu import GpuMemory, MemoryPart, always
from megatron_rl.planning.parameters import BYTES
from megatron_rl.planning.transfer import BRIDGE, planned_transfer
from megatron_rl.types import HOLDS, ModelShape

ENGINE_WORK_BYTES = 4e9
"""What an engine's rank needs for its logits, its CUDA graphs and its NCCL communicator. This is an estimate."""
RESERVED_BYTES = 5.5e9
"""What a GPU reports above `cluster.gpu_memory_gb`. vLLM takes its share of all that the GPU reports."""
LARGE_GPU = 70 * 2**30
"""vLLM computes more tokens in a step on GPUs with at least these bytes (`EngineArgs.get_batch_defaults`)."""
LARGEST_HOPPER_GB = 144
"""`cluster.gpu_memory_gb` above this means a Blackwell."""
INCOMPLETE = 0.5
"""The largest part of what a push brings that an engine's rank holds in layers that are not complete. It was 0.08 to
0.50 in the plans that were computed; the most if four stages of the trainer feed a stage of it."""
SLOT = "slot of the adapters"
ACTIVATIONS, IMAGES = "activations of a step of vLLM", "outputs of the vision tower"
PARTS = {"weights": "weights", SLOT: "weights", "KV cache": "kv_cache"}
"""What engines that share their GPUs give up, by its names in HOLDS, for each row."""
SMALLER = (
    "lower rollout.gpu_memory_utilization, which makes the KV cache smaller, or raise rollout.parallel.tensor or "
    "rollout.parallel.pipeline"
)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    stages: tuple[GpuMemory, ...]
    """The fullest rank of each pipeline stage."""
    longest: int
    """The number of sequences of the largest length that the KV cache of an engine holds."""
    half: int
    """The number of sequences of half the largest length that it holds."""

    @property
    def gpu(self) -> GpuMemory:
        """The fullest rank of the engine."""
        return max(self.stages, key=lambda stage: max(stage.totals))

    def sharing(self, teachers: MemoryPart, kept: float) -> EngineMemory:
        """The memory of an engine that shares its GPUs with trainers.

        Args:
            teachers: what the engines of teachers keep on the GPU while they sleep.
            kept: the bytes that they keep in the node's memory meanwhile, for each GPU; above 0 the engine's weights
                are there, too, while a teacher scores.
        """
        holds = HOLDS["engine"]
        present = {row: [phase for phase, held in holds.items() if part in held] for row, part in PARTS.items()}
        # No push brings the base model of adapters again, nor a frozen vision tower; a trained one is counted, too.
        keeps = kept or any({SLOT, IMAGES} & stage.parts.keys() for stage in self.stages)
        copied = ["weights", SLOT] if keeps else []
        stages = [stage.sharing(present, copied=copied, to="trainers") for stage in self.stages]
        if kept:
            stages = [stage.beside("teachers that sleep", teachers, kept) for stage in stages]
        return replace(self, stages=tuple(stages))


def gpu_bytes(config: BaseConfig) -> float:
    """The bytes of memory of a whole GPU that a plan may use."""
    return config.cluster.gpu_memory_gb * 1e9


def vllm_bytes(config: GrpoRunConfig) -> float:
    """The bytes of a GPU that vLLM takes for weights, work and KV cache."""
    return config.rollout.gpu_memory_utilization * (gpu_bytes(config) + RESERVED_BYTES)


def step_tokens(config: GrpoRunConfig) -> int:
    """The largest number of tokens that an engine computes in one step, as vLLM chooses it for GPUs. It chooses half as
    many for an A100 of 80 GB, which counts as an H100 here."""
    rollout = config.rollout
    if (given := rollout.vllm.get("max_num_batched_tokens")) is not None:
        assert isinstance(given, int), "the configuration refuses other values"
        return given
    tokens = 16_384 if gpu_bytes(config) >= LARGE_GPU else 8_192
    tokens *= 2 if rollout.vllm.get("performance_mode") == "throughput" else 1
    return min(tokens, rollout.max_sequences * rollout.max_engine_tokens)


def repacks_experts(config: GrpoRunConfig) -> bool:
    """Whether vLLM gives the experts of a push another form. Triton's kernels, which vLLM chooses up to Hopper, read
    the checkpoint's form; FlashInfer's, which it chooses on Blackwell, do not."""
    rollout = config.rollout
    if rollout.quantization is not None:
        return True
    backend = rollout.vllm.get("moe_backend", "auto")
    if backend == "auto":
        return config.cluster.gpu_memory_gb > LARGEST_HOPPER_GB
    return backend not in ("triton", "batched_triton")


def engine_memory(config: GrpoRunConfig, shape: ModelShape, plan: TransferPlan, bridge_bytes: float) -> EngineMemory:
    """The memory of the fullest rank of each pipeline stage of an engine.

    vLLM takes its share of the GPU (`vllm_bytes`); the bridge's memory is added to it. A sequence needs the same number
    of KV cache blocks on each stage, so the stage with room for the fewest sequences decides, and the other stages have
    unused room. If vLLM repacks experts, a rank holds a layer's experts until all ranks of the engine have the layer
    (`megatron-rl plan-sync --repacked` computes their bytes), and each verified layer is built a second time. With
    adapters that vLLM serves no weights arrive, and it has one or two slots for them (`RolloutConfig.num_adapters`).
    """
    shape = config.pushed(shape)
    rollout, width = config.rollout, BYTES[config.model.dtype]
    longest, stages = rollout.max_model_tokens, range(rollout.parallel.pipeline)
    layers = [engine_layers(shape.num_layers, rollout.parallel.pipeline, stage) for stage in stages]
    weights = _weight_bytes(config, shape).reshape(rollout.parallel.pipeline, rollout.parallel.tensor).max(1)
    if shape.vision is not None and not shape.tower:  # no push brings it
        tower = tower_in_engine(dict(shape.vision.tower), rollout.parallel.tensor, 0)
        weights += width * sum(volume(local) for placed in tower for _, _, local in placed.pieces)
    slots = rollout.num_adapters * np.array([slot_bytes(shape, plan.engines, width, stage) for stage in stages])
    work = ENGINE_WORK_BYTES + activation_bytes(shape, rollout, step_tokens(config), width)
    caches = np.maximum(0.0, vllm_bytes(config) - weights - slots - work)
    numbers = (
        min(
            int(
                caches[stage]
                // sequence_bytes(shape, rollout.parallel.tensor, n, cache_bytes(rollout, width), layers[stage])
            )
            for stage in stages
        )
        for n in (longest, max(1, longest // 2))
    )
    gpus = [
        _stage_memory(
            config,
            shape,
            plan,
            stage,
            bridge_bytes,
            {"weights": float(weights[stage]), SLOT: float(slots[stage]), "KV cache": float(caches[stage])},
        )
        for stage in stages
    ]
    return EngineMemory(tuple(gpus), *numbers)


def _weight_bytes(config: GrpoRunConfig, shape: ModelShape) -> np.ndarray:
    """The bytes of the weights on each rank of an engine, float64 [world_size]. Online quantisation keeps the weights
    of linear layers in one byte; embedding, output layer, norms and routers stay as they are. The quantisations to four
    bits are counted as eight."""
    rollout, width = config.rollout, BYTES[config.model.dtype]
    if rollout.quantization is None:
        return planned_transfer(config, shape.base, config.policy.parallel.mesh).engine_bytes
    sizes = np.zeros(rollout.engine_ranks)
    for rank in range(rollout.engine_ranks):
        placed = FAMILIES[shape.family].vllm_placed(
            shape.base, rollout.parallel.tensor, rank, rollout.parallel.expert_parallel, rollout.parallel.pipeline
        )
        for placement, _, _ in placed:
            name, _, local = placement.pieces[0]
            is_linear = is_linear_weight(name, len(local), shape)
            elements = placement.num_experts * sum(volume(piece) for _, _, piece in placement.pieces)
            sizes[rank] += elements * (1 if is_linear else 4 if placement.float32 else width)
    return sizes


def _stage_memory(
    config: GrpoRunConfig,
    shape: ModelShape,
    plan: TransferPlan,
    stage: int,
    bridge_bytes: float,
    lasting: Mapping[str, float],
) -> GpuMemory:
    """
    Args:
        lasting: the bytes of what vLLM has allocated before a run.
    """
    rollout, width = config.rollout, BYTES[config.model.dtype]
    is_plain = bool(shape.adapters) or not repacks_experts(config)
    received = 0.0 if is_plain else engine_expert_bytes(shape, rollout, width, stage)
    layer = received
    bucket_bytes, chained = config.bridge.bucket_mib * 2**20, plan.engines.are_chained
    layers = engine_layers(shape.num_layers, rollout.parallel.pipeline, stage)
    layer /= max(1, sum(shape.layers[n].mixture is not None for n in layers))
    parts = {
        **{part: MemoryPart(always(size), SMALLER) for part, size in lasting.items()},
        ACTIVATIONS: MemoryPart(
            always(activation_bytes(shape, rollout, step_tokens(config), width)),
            "lower rollout.vllm.max_num_batched_tokens",
        ),
        IMAGES: MemoryPart(
            always(0.0 if stage else _image_bytes(config, shape)), "lower rollout.vllm.max_num_batched_tokens"
        ),
        "work of vLLM": MemoryPart(always(ENGINE_WORK_BYTES), SMALLER),
        "experts before vLLM repacks them": MemoryPart((0.0, max(layer, INCOMPLETE * received), 0.0), SMALLER),
        "a layer's experts, made again to verify them": MemoryPart((0.0, layer, 0.0), SMALLER),
        BRIDGE: MemoryPart(always(bridge_bytes), "set bridge.chains, so that trainers send to fewer engines"),
        f"{'three' if chained else 'two'} buffers of the bridge": MemoryPart(
            always((2 + chained) * bucket_bytes), "lower bridge.bucket_mib"
        ),
    }
    return GpuMemory.of(f"engine, stage {stage}" if rollout.parallel.pipeline > 1 else "engine", parts)


def _image_bytes(config: GrpoRunConfig, shape: ModelShape) -> float:
    """The bytes of vLLM's cache of tower outputs, which holds as many tokens as a step computes, or the longest prompt
    (`compute_mm_encoder_budget`)."""
    if shape.vision is None:
        return 0.0
    num_tokens = max(step_tokens(config), config.rollout.max_engine_tokens)
    return float(num_tokens * shape.hidden_size * (1 + shape.vision.num_deep) * BYTES[config.model.dtype])


def activation_bytes(shape: ModelShape, rollout: RolloutConfig, num_tokens: int, width: int) -> float:
    """The bytes of the activations of one step on one rank of an engine: residual, hidden states and their norm, and
    the inside of the widest MLP. Every rank computes all tokens."""
    hidden, ways = shape.hidden_size, (rollout.parallel.tensor, rollout.parallel.expert_parallel)
    inside = max(mlp.inner_width(hidden, *ways) for mlp in {layer.mlp for layer in shape.layers})
    return num_tokens * width * (3 * hidden + inside)


def engine_expert_bytes(shape: ModelShape, rollout: RolloutConfig, width: int, stage: int) -> float:
    """The bytes of the routed experts on the fullest rank of a pipeline stage of an engine."""
    first = stage * rollout.parallel.tensor
    placed = FAMILIES[shape.family].vllm_placed(
        shape, rollout.parallel.tensor, first, rollout.parallel.expert_parallel, rollout.parallel.pipeline
    )
    elements = sum(
        placement.num_experts * sum(volume(local) for _, _, local in placement.pieces)
        for placement, _, _ in placed
        if placement.experts is not None
    )
    return float(elements * width)


def sequence_bytes(shape: ModelShape, tensor: int, num_tokens: int, width: int, layers: range) -> float:
    """The bytes of the keys and values of one sequence in some layers on one rank of an engine. A layer with linear
    attention has states of a constant size in their place."""
    kept = Counter(shape.layers[n].attention for n in layers)
    return float(sum(number * block.kept_bytes(num_tokens, tensor, width) for block, number in kept.items()))


def weight_bytes(rollout: RolloutConfig, width: int) -> int:
    """The bytes of a number of an engine's weights: one if vLLM quantises them (`rollout.quantization`), although it
    leaves embeddings, output layer and norms as they are."""
    return width if rollout.quantization is None else 1


def cache_bytes(rollout: RolloutConfig, width: int) -> int:
    """The bytes of a number in the KV cache: one with vLLM's fp8 caches."""
    return 1 if str(rollout.vllm.get("kv_cache_dtype", "")).startswith("fp8") else width
