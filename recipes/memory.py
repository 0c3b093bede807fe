"""The memory of a trainer's GPU and of an engine's GPU by phase, computed from the model's sizes before anything runs.

These are sums of the tensors that must exist. The bytes of weights, gradients and optimizer state are exact; those of
activations are estimates for one kind of layers; those of NCCL and of vLLM's own work are the constants below. CUDA's
context and the gaps of the allocator are left out, because `cluster.gpu_memory_gb` leaves room for them.

Invariants (tests/unit/recipes, tests/dist): weights and gradients have the bytes that the actor allocates on every
rank, and so has the optimizer's state of the ranks that share it; activations are within 10 % of what autograd saves
on the local layers, with and without recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, get_args

import numpy as np

from megatron_rl.config.schema import BaseConfig, GrpoRunConfig, ModelConfig, ParallelConfig, RolloutConfig
from megatron_rl.layout import FAMILIES, Engines, Links, TransferPlan, padded_vocabulary, plan_weights, volume
from megatron_rl.layout.shards import is_vocabulary
from megatron_rl.types import Experts, Llama3Rope, Mesh, ModelShape, Phase

BYTES = {"float32": 4, "bfloat16": 2}
"""The bytes of a parameter of each dtype."""
COMMUNICATOR_BYTES = 512 * 2**20
"""The memory of one NCCL communicator on each of its ranks. This is an estimate from users' reports (NVIDIA/nccl#964,
NVIDIA/nccl#2363); nobody has measured it here."""
ENGINE_WORK_BYTES = 4e9
"""What an engine's rank needs for its activations, its CUDA graphs and its NCCL communicator. This is an estimate."""
CHUNK_BYTES = 256 * 2**20
"""The logits of one chunk of the output layer in fp32, as `algorithms.logprobs.CHUNK_BYTES` (which needs torch)."""
TOKEN_BYTES = 2 * 8 + 4 * 4
"""What the log-prob of a token keeps beside its hidden state: two indices, and four fp32 numbers."""
CHUNKS = 3
"""The output layer holds the logits of a chunk, their exponentials (for the entropy), and their gradient."""

PHASES: tuple[Phase, ...] = get_args(Phase)

TRAINER_LENDS = {"weights": (1, 1, 0), "gradients (fp32)": (1, 0, 0), "optimizer state": (1, 0, 0)}
ENGINE_LENDS = {"weights": (0, 1, 1), "KV cache": (0, 0, 1)}
"""The parts that trainers and engines which share GPUs lend each other, and whether they are there in each of PHASES
(`actor.phases.HOLDS`, `rollout.engine.HOLDS`)."""


@dataclass(frozen=True, slots=True)
class RankParameters:
    """The elements of the parameters of one trainer rank, with the padding of the vocabulary."""

    dense: int
    """The elements outside the routed experts: attention, norms, router, shared experts, embedding and output layer."""
    expert: int
    """The elements of the rank's routed experts."""
    padding: int = 0
    """The elements with which Megatron's distributed optimizer pads its buffers of weights and of gradients."""
    constant: int = 0
    """The elements of fp32 parameters that have no gradient, such as the bias of a router."""

    @property
    def total(self) -> int:
        return self.dense + self.expert + self.constant

    def weight_bytes(self, dtype: str) -> int:
        return (self.dense + self.expert + self.padding) * BYTES[dtype] + self.constant * 4

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the buffer of gradients, which is fp32 whatever the model's dtype is."""
        return (self.dense + self.expert + self.padding) * 4

    def state_bytes(self, mesh: Mesh, dtype: str) -> float:
        """The bytes of the optimizer's state on this rank: two fp32 moments, and an fp32 copy of bf16 weights.

        This is the mean of the ranks that share the state. Megatron gives each of them an equal interval of the padded
        buffer, so that a single rank may hold more by no more than the padding, which the others then hold.
        """
        dense_ways, expert_ways = optimizer_ways(mesh)
        return (self.dense / dense_ways + self.expert / expert_ways) * (8 if dtype == "float32" else 12)

    def held_bytes(self, mesh: Mesh, dtype: str) -> float:
        """The bytes of weights, gradients and optimizer state."""
        return self.weight_bytes(dtype) + self.gradient_bytes + self.state_bytes(mesh, dtype)


@lru_cache(maxsize=4096)
def rank_parameters(shape: ModelShape, mesh: Mesh, rank: int) -> RankParameters:
    """The parameters of a rank, counted from the rows of the family's table.

    With the distributed optimizer each chunk of the model has one buffer for its dense parameters and one for its
    experts. In a buffer every parameter begins at a multiple of 64 elements, and every bucket ends at a multiple of 128
    and of the number of ranks that share it. A tied embedding is a bucket of its own where first and last stage have
    separate copies of it. On GPUs gradients are reduced in more buckets (`overlap_grad_reduce`), whose padding is not
    counted.
    """
    dense_ways, expert_ways = optimizer_ways(mesh)
    rows = padded_vocabulary(shape, mesh.tensor) // mesh.tensor
    totals, constant = {False: 0, True: 0}, 0
    buckets: dict[tuple[str, bool, bool], int] = {}
    for placement, _, prefix in FAMILIES[shape.family].megatron_placed(shape, mesh, rank):
        in_vocabulary = is_vocabulary(placement.local_name)
        elements = rows * shape.hidden_size if in_vocabulary else sum(volume(local) for _, _, local in placement.pieces)
        number = 1 if placement.experts is None else len(placement.experts)
        if placement.float32:
            constant += elements * number
            continue
        of_experts = placement.experts is not None
        totals[of_experts] += elements * number
        chunk = prefix.partition(".")[0] if mesh.virtual > 1 else ""
        alone = in_vocabulary and shape.tied_embeddings and mesh.pipeline > 1
        # Without expert parallelism Megatron keeps the experts in the buffer of the dense parameters.
        bucket = (chunk, of_experts and mesh.expert > 1, alone)
        buckets[bucket] = buckets.get(bucket, 0) + _rounded(elements, 64) * number
    padding = 0
    if dense_ways > 1:
        ways = {False: dense_ways, True: expert_ways}
        buffers = sum(_rounded(size, math.lcm(ways[expert], 128)) for (_, expert, _), size in buckets.items())
        padding = buffers - sum(totals.values())
    return RankParameters(totals[False], totals[True], padding, constant)


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def optimizer_ways(mesh: Mesh) -> tuple[int, int]:
    """The number of ranks over which Megatron's distributed optimizer splits the state of a parameter, as (dense,
    expert).

    These are the ranks that hold the same parameter: the data x context ranks for a dense parameter, and the
    expert-data-parallel ranks for a parameter of an expert. Without data and context parallelism the actor uses the
    plain optimizer, which splits nothing.
    """
    dense = mesh.data * mesh.context
    return (dense, expert_data_ways(mesh)) if dense > 1 else (1, 1)


def expert_data_ways(mesh: Mesh) -> int:
    """Expert data parallelism: the number of ranks of a stage that hold the same part of the same experts."""
    return mesh.stage_size // (mesh.expert * mesh.expert_ways)


def checkpoint_bytes(shape: ModelShape, dtype: str) -> int:
    """The bytes of one checkpoint: the weights and the optimizer's state, once, whatever the layout. Adam's moments are
    fp32, and so is the copy of a bf16 weight."""
    state = 8 if dtype == "float32" else 12
    return FAMILIES[shape.family].num_parameters(shape) * (BYTES[dtype] + state)


def has_fused_layers(shape: ModelShape, model: ModelConfig) -> bool:
    """Whether the layers on GPUs are Transformer Engine's, if it is installed (`actor.model.uses_fused_layers`)."""
    if model.layers != "auto":
        return model.layers == "transformer_engine"
    rope = shape.rope_scaling
    is_known_rope = rope is None or rope == Llama3Rope(rope.factor, 1.0, 4.0, 8192)
    return model.dtype == "bfloat16" and not FAMILIES[shape.family].post_norm and is_known_rope


def layer_bytes(shape: ModelShape, parallel: ParallelConfig, layer: int, width: int, *, fused: bool) -> float:
    """The bytes that autograd keeps of one layer for its backward pass, for each token of the rank's context-parallel
    part, without recomputation and with an attention kernel that keeps no scores (Korthikanti et al. 2022,
    arXiv:2205.05198, section 4, counts the same for another layer).

    A mixture's tokens are taken to be spread evenly over the experts.

    Args:
        width: the bytes of an element.
        fused: the layers are Transformer Engine's: their kernels of norm, activation and rotary embedding keep their
            inputs only, which is an estimate from their descriptions. Otherwise they are Megatron's local layers with
            the norms and the attention of `actor`, of which every tensor that autograd saves is counted.
    """
    mesh = parallel.mesh
    split = 1 / mesh.tensor
    rows = split if parallel.sequence_parallel else 1.0  # of the tokens, between attention and MLP
    hidden, experts = shape.hidden_size, shape.experts
    widths, extra = _attention_widths(shape)
    query, key, value = (width_of_all * split for width_of_all in widths)
    projected = query + key + value
    if shape.latent is None and mesh.tensor > shape.num_kv_heads:  # ranks share KV heads, and gather q, k and v of all
        key = value = shape.head_dim
        projected = sum(widths)
    mixture = experts if shape.has_experts(layer) else None
    numbers = 0.0
    """The fp32 numbers for each token."""
    if fused:
        # The inputs of two norms, of two blocks, and the residual; q, k, v; q and k before and after their rotation;
        # the output of attention.
        elements = 5 * hidden * rows + projected + 2 * (query + key) + query
        mlp = 3  # gate and up, and their product
    else:
        # The inputs and outputs of two norms; q, k, v for the kernel; its output, packed and padded; the same unpadded.
        elements = 4 * hidden * rows + query + key + value + 2 * query
        numbers = 2 * rows + shape.num_heads * split
        mlp = 5  # gate and up, silu of gate, up once more, and the product
        norm = FAMILIES[shape.family].qk_norm
        if norm == "head":  # the input of k's norm is a view of q, k and v together
            elements += query + projected
            numbers += (query + key) / shape.head_dim
        elif norm == "full":
            elements += query + key
            numbers += 2
        if mesh.context > 1:  # the ring keeps k and v beside the rotated q and k
            elements += key
        if width == 2:  # cosine and sine are rounded in each layer
            elements += 2 * shape.head_dim
    elements += extra * rows
    if mixture is None:
        elements += mlp * shape.ffn_size * split
    else:
        elements += mixture.shared_ffn_size * mlp * split
        # The local experts also keep the product multiplied by the router's weight.
        of_mixture, more = _mixture_widths(mixture, mesh, hidden, mlp if fused else mlp + 1)
        elements, numbers = elements + of_mixture * rows, numbers + more * rows
    return elements * width + numbers * 4


def _mixture_widths(experts: Experts, mesh: Mesh, hidden: int, mlp: int) -> tuple[float, float]:
    """(elements, fp32 numbers) that the routed experts keep for each token of one tensor-parallel rank: the tokens that
    are sent to the rank, `mlp` times an expert's width of each of them, and the router's scores."""
    tokens = experts.num_active * mesh.expert_ways  # a token goes to all ranks that share an expert
    elements = tokens * (hidden + mlp * experts.ffn_size / mesh.expert_ways)
    return elements, 2.0 * experts.num_experts + 4.0 * experts.num_active


def _attention_widths(shape: ModelShape) -> tuple[tuple[int, int, int], int]:
    """The elements of q, k and v of one token over all heads; and those of latent attention's low-rank projections."""
    latent = shape.latent
    if latent is None:
        key = shape.num_kv_heads * shape.head_dim
        return (shape.num_heads * shape.head_dim, key, key), 0
    per_head = latent.nope_dim + latent.rope_dim
    low = 2 * (latent.query_rank + latent.kv_rank) + latent.rope_dim
    return (shape.num_heads * per_head, shape.num_heads * per_head, shape.num_heads * latent.value_dim), low


class Activations(NamedTuple):
    """The bytes of activations on one rank of a pipeline stage."""

    kept: float
    """What the backward passes of the micro-batches in flight need."""
    layer: float
    """What the layer that is computed now needs beside it: its gradients, and what is computed again."""
    output: float
    """What the output layer needs on the last stage: chunks of logits, hidden states, the gradient of its weight."""

    @property
    def computing(self) -> float:
        """Layers and output layer are never computed at once."""
        return max(self.layer, self.output)


def activations(
    shape: ModelShape, parallel: ParallelConfig, stage: int, num_tokens: int, *, width: int, recompute: str, fused: bool
) -> Activations:
    """The activations of an update on a rank of a stage.

    With one chunk a stage, a stage of a pipeline of p stages has p - stage micro-batches in flight (one forward, one
    backward). With v chunks it has 2 (p - stage - 1) + (v - 1) p + 1 passes of one chunk in flight (the interleaved
    schedule, Narayanan et al. 2021, arXiv:2104.04473), of which p after p belong to the same chunk.

    Args:
        num_tokens: the tokens of a micro-batch, of all context-parallel ranks together.
        recompute: `none`, or `full`: the layers run forward a second time, so that only their inputs are kept.
        fused: see `layer_bytes`.
    """
    mesh = parallel.mesh
    num_own = num_tokens / mesh.context
    inputs = shape.hidden_size * num_own * width / (mesh.tensor if parallel.sequence_parallel else 1)
    chunks = [mesh.layer_range(shape.num_layers, stage, chunk) for chunk in range(mesh.virtual)]
    sizes = {
        layer: layer_bytes(shape, parallel, layer, width, fused=fused) * num_own for chunk in chunks for layer in chunk
    }
    per_chunk = [len(chunk) * inputs if recompute == "full" else sum(sizes[n] for n in chunk) for chunk in chunks]
    in_flight = mesh.pipeline - stage
    if mesh.virtual > 1:
        in_flight = 2 * (mesh.pipeline - stage - 1) + (mesh.virtual - 1) * mesh.pipeline + 1
    kept = sum(per_chunk[number // mesh.pipeline % mesh.virtual] for number in range(in_flight))
    largest = max(sizes.values(), default=0.0)
    output = 0.0
    if stage == mesh.pipeline - 1:
        rows = padded_vocabulary(shape, mesh.tensor) // mesh.tensor
        chunk_bytes = min(CHUNK_BYTES, num_own * rows * 4)
        hidden = shape.hidden_size * num_own * width
        # The input of the last norm; hidden states of all tokens; two indices and four numbers of each token.
        kept += inputs + hidden + TOKEN_BYTES * num_own
        # The gradient of the weight is summed in fp32 and then rounded.
        output = CHUNKS * chunk_bytes + hidden + rows * shape.hidden_size * (4 + (width if width < 4 else 0))
    return Activations(kept, (2 if recompute == "full" else 1) * largest, output)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of one GPU."""

    name: str
    """Whose GPU it is."""
    parts: Mapping[str, tuple[float, float, float]]
    """The bytes of each part in each of PHASES."""

    @property
    def totals(self) -> tuple[float, ...]:
        """The bytes of each of PHASES."""
        return tuple(sum(values[phase] for values in self.parts.values()) for phase in range(len(PHASES)))

    def lending(self, there: Mapping[str, tuple[int, int, int]]) -> GpuMemory:
        """The memory of a side that gives the parts in `there` up in the phases that have a 0."""
        held = {name: there.get(name, (1, 1, 1)) for name in self.parts}
        parts = {name: tuple(a * b for a, b in zip(size, held[name])) for name, size in self.parts.items()}
        return replace(self, parts=parts)

    def beside(self, other: GpuMemory) -> GpuMemory:
        """Both sides on one GPU."""
        sides = {one.name.partition(",")[0]: one for one in (self, other)}
        parts = {f"{name}: {part}": size for name, one in sides.items() for part, size in one.parts.items()}
        return GpuMemory(f"{self.name}, and {other.name}", parts)


class Lines(NamedTuple):
    """The largest number of NCCL communicators that the bridge has on a trainer rank, and on an engine's rank. Each is
    for one pair of ranks on different nodes."""

    trainer: int = 0
    engine: int = 0


def planned_transfer(config: GrpoRunConfig, shape: ModelShape, mesh: Mesh) -> TransferPlan:
    """The bridge's plan for this mesh of the trainer."""
    rollout = config.rollout
    engines = Engines(
        rollout.num_engines,
        rollout.tensor,
        expert_parallel=rollout.expert_parallel,
        num_chains=config.bridge.chains,
    )
    colocated = config.cluster.colocate
    links = Links(config.cluster.gpus_per_node or 1, colocated=True) if colocated else Links()
    return plan_weights(shape, mesh, engines, dtype=config.model.dtype, links=links)


def bridge_lines(plan: TransferPlan, gpus_per_node: int, colocated: bool = False) -> Lines:
    """Count the pairs of ranks on different nodes. The trainer is taken to fill the first nodes, and the engines those
    after them, or the same ones. Inside a node the bridge maps memory and needs no communicator."""
    links = Links(gpus_per_node, colocated=colocated)
    pairs = np.unique(plan.source.astype(np.int64) * plan.num_destinations + plan.destination)
    source, destination = np.divmod(pairs, plan.num_destinations)
    far = links.node(source) != links.node(links.gpu(destination, plan.num_sources))
    fed = np.bincount(destination[far], minlength=1)
    # An engine in a chain also has a line to the one before it, or after it.
    chained = int(plan.engines.heads < plan.engines.num)
    return Lines(int(np.bincount(source[far], minlength=1).max()), int(fed.max()) + chained)


def num_communicators(mesh: Mesh) -> int:
    """The number of NCCL communicators of a trainer rank: those of its groups of more than one rank that Megatron's
    collectives use, and the one of all ranks."""
    dense, expert = mesh.data * mesh.context, expert_data_ways(mesh)
    groups = [mesh.world_size, mesh.tensor, mesh.pipeline, dense, mesh.context, mesh.tensor * mesh.pipeline]
    if mesh.expert > 1:
        groups += [mesh.expert, mesh.expert_ways, expert]
    return sum(size > 1 for size in groups)


def trainer_memory(
    shape: ModelShape,
    model: ModelConfig,
    parallel: ParallelConfig,
    num_tokens: int,
    bucket_bytes: float = 0.0,
    lines: int | None = None,
) -> GpuMemory:
    """The memory of a rank of the fullest stage.

    Args:
        num_tokens: the largest number of tokens of a micro-batch.
        bucket_bytes: the largest size of one of the bridge's messages.
        lines: the number of the bridge's NCCL communicators; None means that the trainers run on CPUs, with local
            layers and without NCCL.
    """
    mesh, width = parallel.mesh, BYTES[model.dtype]
    fused = lines is not None and has_fused_layers(shape, model)
    number = 0 if lines is None else num_communicators(mesh) + lines

    def of_stage(stage: int) -> GpuMemory:
        held = rank_parameters(shape, mesh, stage * mesh.stage_size)
        used = activations(shape, parallel, stage, num_tokens, width=width, recompute=model.recompute, fused=fused)
        computed = "output layer" if used.output > used.layer else "layer"
        parts = {
            "weights": _always(held.weight_bytes(model.dtype)),
            "gradients (fp32)": _always(held.gradient_bytes),
            "optimizer state": _always(held.state_bytes(mesh, model.dtype)),
            "activations kept for the backward passes": (used.kept, 0.0, 0.0),
            f"the {computed} being computed": (used.computing, 0.0, 0.0),
            f"{number} NCCL communicators": _always(number * COMMUNICATOR_BYTES),
            "two buffers of the bridge": _always(2 * bucket_bytes),
        }
        return GpuMemory(f"trainer, stage {stage}", {name: values for name, values in parts.items() if max(values)})

    return max((of_stage(stage) for stage in range(mesh.pipeline)), key=lambda memory: max(memory.totals))


def _always(num_bytes: float) -> tuple[float, float, float]:
    return (num_bytes, num_bytes, num_bytes)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    gpu: GpuMemory
    longest: int
    """The number of sequences of the largest length that the KV cache of an engine holds."""
    half: int
    """The number of sequences of half the largest length that it holds."""


def engine_memory(config: GrpoRunConfig, shape: ModelShape, plan: TransferPlan, lines: int) -> EngineMemory:
    """The memory of the fullest rank of an engine.

    vLLM takes `rollout.gpu_memory_utilization` of the GPU for weights, work and KV cache, and the bridge's memory comes
    beside it. Experts are repacked by vLLM on GPUs, so an engine of several ranks holds those that it received until
    the end of the push, and an engine of one rank those of one layer. Weights that vLLM quantises are counted as if
    they were not.
    """
    rollout, width = config.rollout, BYTES[config.model.dtype]
    weights = float(plan.engine_bytes.max())
    cache = max(0.0, rollout.gpu_memory_utilization * gpu_bytes(config) - weights - ENGINE_WORK_BYTES)
    received = engine_expert_bytes(shape, rollout, width)
    if rollout.tensor == 1 and shape.experts:
        received /= shape.num_layers - shape.experts.first_dense_layers
    parts = {
        "weights": _always(weights),
        "KV cache": _always(cache),
        "work of vLLM": _always(ENGINE_WORK_BYTES),
        "experts before vLLM repacks them": (0.0, received, 0.0),
        f"{lines} NCCL communicators of the bridge": _always(lines * COMMUNICATOR_BYTES),
        "two buffers of the bridge": _always(2 * config.bridge.bucket_mib * 2**20),
    }
    gpu = GpuMemory("engine", {name: values for name, values in parts.items() if max(values)})
    longest = rollout.max_model_tokens
    numbers = (int(cache // sequence_bytes(shape, rollout.tensor, n, width)) for n in (longest, max(1, longest // 2)))
    return EngineMemory(gpu, *numbers)


def engine_expert_bytes(shape: ModelShape, rollout: RolloutConfig, width: int) -> float:
    """The bytes of the routed experts on the fullest rank of an engine."""
    placed = FAMILIES[shape.family].vllm_placed(shape, rollout.tensor, 0, rollout.expert_parallel)
    elements = sum(
        len(placement.experts) * sum(volume(local) for _, _, local in placement.pieces)
        for placement, _, _ in placed
        if placement.experts is not None
    )
    return float(elements * width)


def sequence_bytes(shape: ModelShape, tensor: int, num_tokens: int, width: int) -> float:
    """The bytes of the keys and values of one sequence on one rank of an engine. Ranks share the KV heads, but each has
    at least one; latent attention keeps its low-rank projection on every rank."""
    latent = shape.latent
    numbers = 2 * max(shape.num_kv_heads // tensor, 1) * shape.head_dim
    if latent:
        numbers = latent.kv_rank + latent.rope_dim
    windows = len(shape.sliding_layers)
    tokens = (shape.num_layers - windows) * num_tokens + windows * min(num_tokens, shape.sliding_window or num_tokens)
    return float(tokens * numbers * width)


@dataclass(frozen=True, slots=True)
class RunMemory:
    """The memory of a run's ranks."""

    trainer: GpuMemory
    training_bytes: Mapping[str, float]
    """The bytes of a trainer rank in training, for each value of `model.recompute`."""
    trainer_limit: float
    """The bytes of memory that a trainer rank has; infinite on a CPU."""
    gpu_bytes: float
    """The bytes of memory of a whole GPU."""
    engine: EngineMemory | None
    """None if the run has no engines on GPUs."""
    is_shared: bool
    """Whether each trainer rank shares its GPU with a rank of an engine."""
    reference_bytes: float
    """What each trainer rank keeps of the reference policy in the memory of its node; 0 without a reference."""
    fused: bool
    """Whether the trainer's layers are Transformer Engine's."""

    @property
    def on_gpus(self) -> bool:
        return self.trainer_limit < math.inf

    @property
    def gpus(self) -> list[GpuMemory]:
        if self.engine is None:
            return [self.trainer]
        if self.is_shared:
            return [self.trainer.beside(self.engine.gpu)]
        return [self.trainer, self.engine.gpu]

    @property
    def problems(self) -> list[str]:
        """What does not fit, one sentence each with what to change."""
        found = []
        for gpu, limit in zip(self.gpus, (self.trainer_limit, self.gpu_bytes)):
            needed = max(gpu.totals)
            if needed > limit:
                phase = gpu.totals.index(needed)
                size, largest = max((values[phase], part) for part, values in gpu.parts.items())
                of_engine = "engine" in (gpu.name, largest.partition(":")[0])
                found.append(
                    f"{PHASES[phase]} needs {needed / 1e9:.1f} GB on a GPU of {limit / 1e9:.0f} GB ({gpu.name}), of "
                    f"which {size / 1e9:.1f} GB are {largest}; {_advice(largest.rpartition(': ')[2], of_engine)}"
                )
        if self.engine is not None and not self.engine.longest:
            cache = self.engine.gpu.parts.get("KV cache", _always(0.0))[PHASES.index("generating")]
            found.append(
                f"generating: an engine's KV cache of {cache / 1e9:.1f} GB a GPU holds no sequence of the largest "
                f"length; raise rollout.tensor or rollout.gpu_memory_utilization, or lower rollout.max_response_tokens"
            )
        return found


def _advice(part: str, of_engine: bool) -> str:
    """What makes the rank smaller whose largest part is this one."""
    if "communicators" in part:
        return "set bridge.chains, so that trainers send to fewer engines"
    if part == "two buffers of the bridge":
        return "lower bridge.bucket_mib"
    if of_engine:
        return "lower rollout.gpu_memory_utilization, which makes the KV cache smaller, or raise rollout.tensor"
    if part == "activations kept for the backward passes":
        return (
            "set model.recompute to full, lower balance.max_tokens_per_microbatch, or raise policy.parallel.tensor or "
            "policy.parallel.context"
        )
    if part.endswith("being computed"):
        return "lower balance.max_tokens_per_microbatch, or raise policy.parallel.tensor or policy.parallel.context"
    if part == "optimizer state":
        return "raise policy.parallel.data, policy.parallel.tensor or policy.parallel.pipeline"
    return "raise policy.parallel.tensor or policy.parallel.pipeline, or for a mixture policy.parallel.expert"


def run_memory(config: BaseConfig, shape: ModelShape) -> RunMemory:
    """The memory of a run's GPUs. On CPUs the trainer's numbers are those of the memory of one rank's process, without
    NCCL, and there is no limit.

    Raises:
        ValueError: trainer or engine cannot split the model in the configured way.
    """
    cluster, parallel, model = config.cluster, config.policy.parallel, config.model
    on_gpus = cluster.gpus_per_trainer > 0
    lines, engine, bucket_bytes, reference = Lines(), None, 0.0, 0.0
    if isinstance(config, GrpoRunConfig):
        bucket_bytes = config.bridge.bucket_mib * 2**20
        plan = planned_transfer(config, shape, parallel.mesh)
        if on_gpus:
            lines = bridge_lines(plan, cluster.gpus_per_node or 1, cluster.colocate)
        if cluster.gpus_per_engine_rank > 0:
            engine = engine_memory(config, shape, plan, lines.engine)
            if cluster.colocate:
                engine = replace(engine, gpu=engine.gpu.lending(ENGINE_LENDS))
        if config.algorithm.kl is not None:
            stages = range(parallel.mesh.pipeline)
            held = [rank_parameters(shape, parallel.mesh, stage * parallel.mesh.stage_size) for stage in stages]
            reference = float(max(one.total for one in held) * BYTES[model.dtype])

    def of_trainer(recompute: str) -> GpuMemory:
        chosen = model.model_copy(update={"recompute": recompute})
        num_tokens = config.balance.max_tokens_per_microbatch
        memory = trainer_memory(shape, chosen, parallel, num_tokens, bucket_bytes, lines.trainer if on_gpus else None)
        return memory.lending(TRAINER_LENDS) if cluster.colocate else memory

    return RunMemory(
        trainer=of_trainer(model.recompute),
        training_bytes={mode: of_trainer(mode).totals[0] for mode in ("none", "full")},
        trainer_limit=trainer_limit(config),
        gpu_bytes=gpu_bytes(config),
        engine=engine,
        is_shared=cluster.colocate,
        reference_bytes=reference,
        fused=on_gpus and has_fused_layers(shape, model),
    )


def trainer_limit(config: BaseConfig) -> float:
    """The bytes of memory that a trainer rank has; infinite on a CPU."""
    share = min(1.0, config.cluster.gpus_per_trainer)
    return gpu_bytes(config) * share if share else math.inf


def gpu_bytes(config: BaseConfig) -> float:
    return config.cluster.gpu_memory_gb * 1e9
