"""The seconds of a step on H100 GPUs, estimated from the model's sizes.

These are sums of the operations and bytes that must happen, divided by the rates of `balance/hardware.py` and
`layout.Links`, not measurements. Invariant (tests/unit/planning): they equal calculations by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_rl.algorithms.needs import Needs
from megatron_rl.balance import flops_by_layer, forward_flops, plan_microbatches, training_flops
from megatron_rl.balance.hardware import BANDWIDTH, DECODING_SHARE, HOST_LINK, PEAK_FLOPS, TRAINING_SHARE
from megatron_rl.config.optimizer import AdamConfig, OptimizerConfig
from megatron_rl.config.policy import ParallelConfig
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig, SftRunConfig
from megatron_rl.layout import Links
from megatron_rl.planning.engine import state_bytes
from megatron_rl.planning.parameters import BYTES, expert_data_ways, stage_parameters
from megatron_rl.types import Mesh, MicrobatchPlan, ModelShape, StepBatch


@dataclass(frozen=True, slots=True)
class Work:
    """What the trainers do in a step if every sample has the largest length."""

    lengths: np.ndarray
    """int64 [S]: the lengths of the samples, in tokens."""
    num_updates: int
    num_passes: float
    """The forward passes over all samples in addition to the passes of the updates: what the objective needs
    (`algorithms.needs.Needs.num_passes`), and the shares of the experts for the load-balancing loss."""


def largest_work(config: BaseConfig) -> Work:
    """The work of the policy's trainers; a critic's work is not counted."""
    balancing = int(config.policy.load_balancing_loss > 0)  # the experts' shares are counted in a pass of their own
    if isinstance(config, GrpoRunConfig):
        rollout, algorithm = config.rollout, config.algorithm
        num_samples = rollout.prompts_per_step * rollout.samples_per_group
        passes = balancing + Needs.of(algorithm).num_passes(algorithm.updates_per_step)
        return Work(np.full(num_samples, rollout.max_model_tokens), algorithm.updates_per_step, passes)
    assert isinstance(config, SftRunConfig)
    return Work(np.full(config.sft.rows_per_step, config.sft.max_tokens), 1, balancing)


def largest_plan(config: BaseConfig, shape: ModelShape, parallel: ParallelConfig) -> MicrobatchPlan:
    """The plan of a step if every sample has the largest length.

    Raises:
        ValueError: see `plan_microbatches`.
    """
    work = largest_work(config)
    num_samples = len(work.lengths)
    per_group = config.rollout.samples_per_group if isinstance(config, GrpoRunConfig) else 1
    batch = StepBatch(
        names=[f"sample {i}" for i in range(num_samples)],
        group_of=np.arange(num_samples) // per_group,
        index_in_group=np.arange(num_samples) % per_group,
        lengths=work.lengths,
        num_actions=np.ones(num_samples, np.int64),
        payloads=[None] * (num_samples // per_group),
        version=0,
        is_cut=np.zeros(num_samples, bool),
        rewards=np.zeros(num_samples),
    )
    active = np.ones(num_samples, bool)
    recompute = config.model.recompute
    return plan_microbatches(batch, active, shape, parallel, config.balance, work.num_updates, recompute=recompute)


def most_microbatches(plan: MicrobatchPlan) -> int:
    """The number of micro-batches of a rank in the longest optimizer step."""
    return max(len(minibatch[0]) for minibatch in plan.minibatches)


def training_seconds(
    work: Work,
    shape: ModelShape,
    parallel: ParallelConfig,
    num_microbatches: int,
    *,
    dtype: str,
    recompute: str,
    gpus_per_node: int,
    optimizer: OptimizerConfig = AdamConfig(),
) -> float:
    """The seconds of a step's forward passes and updates:

        C (1 + (p - 1) / (m v)) + (T + E + X) + D + O

    C is the time of the FLOPs of the slowest stage at TRAINING_SHARE of the peak; the last stage also has the output
    layer. The factor describes a pipeline of p stages of v chunks with m micro-batches: its stages are idle for the
    share (p - 1) / (m v + p - 1) of the time (Narayanan et al. 2021, arXiv:2104.04473). T, E, X and D are the
    communication times of tensor, expert, context and data parallelism. Nothing is taken to overlap, although on GPUs D
    overlaps with C in part. With N tokens of a step on a data- and context-parallel rank, L layers of a stage, H
    hidden, w bytes of an element, and groups of t, e, c and d ranks:

        T: attention and a dense MLP each gather and scatter N H w (t - 1) / t bytes in a pass of a layer.
        E: a mixture sends its active tokens to their experts and back: 2 N/t k H w (e - 1) / e bytes in a pass of a
           layer, and each split expert gathers and scatters N/t k H w (g - 1) over its g ranks.
        X: the ring passes keys and values on: N K w (c - 1) bytes in a pass of a layer, with K elements of k and v. A
           layer with linear attention exchanges its heads' inputs and outputs: N P w (c - 1) / c bytes, with P elements
           of them.
        D: an update scatters gradients of 4 bytes and gathers weights of w bytes, each (d - 1) / d of the rank's; for
           experts over their own group.

    A forward pass counts once, a recomputation once, the backward pass once in T and E and twice in X. A group that is
    larger than a node sends at the rate of a NIC, any other at the rate of NVLink. O is the time of copying an
    offloaded optimizer state from the node's memory to the GPU and back in each update, both ways at once. The products
    of Muon's iterations are left out.

    Args:
        num_microbatches: the number of micro-batches of a rank in an update.
    """
    mesh, links, width = parallel.mesh, Links(gpus_per_node), BYTES[dtype]
    flops = work.num_passes * forward_flops(work.lengths, shape).sum()
    flops += training_flops(work.lengths, shape, recompute).sum()
    compute_s = flops / (mesh.world_size * PEAK_FLOPS * TRAINING_SHARE)
    compute_s *= _slowest_stage(int(work.lengths.max()), shape, mesh)
    compute_s *= 1 + (mesh.pipeline - 1) / (num_microbatches * mesh.virtual)

    def rate(span: int) -> float:
        """The bytes per second of a group whose ranks lie within `span` neighbouring ranks."""
        return links.nvlink_bytes_per_s if span <= gpus_per_node else links.nic_bytes_per_s

    tokens = work.lengths.sum() / (mesh.data * mesh.context)
    hidden, experts = shape.hidden_size, shape.experts
    forward = work.num_passes + 1 + (recompute == "full")
    mixtures = sum(shape.has_experts(layer) for layer in range(shape.num_layers)) / mesh.pipeline
    layers = shape.num_layers / mesh.pipeline
    of_blocks = 2 * (layers - mixtures) + mixtures  # attention in each layer, the MLP in layers without a mixture
    tensor_bytes = 2 * of_blocks * tokens * hidden * width * (mesh.tensor - 1) / mesh.tensor
    sent_s = (forward + 1) * tensor_bytes / rate(mesh.tensor)
    if experts:
        routed = mixtures * tokens / mesh.tensor * experts.num_active * hidden * width
        split = mesh.expert_ways
        sent_s += (forward + 1) * 2 * routed * (mesh.expert - 1) / mesh.expert / rate(mesh.expert * split)
        sent_s += (forward + 1) * 2 * routed * (split - 1) / rate(split)
    ring = layers * tokens * 2 * shape.num_kv_heads * shape.head_dim / mesh.tensor * width * (mesh.context - 1)
    if delta := shape.delta:
        linear = len(shape.linear_layers) / shape.num_layers
        heads = 2 * (delta.key_width + delta.value_width + delta.num_value_heads)
        exchanged = layers * tokens * heads / mesh.tensor * width * (mesh.context - 1) / mesh.context
        ring = (1 - linear) * ring + linear * exchanged
    sent_s += (forward + 2) * ring / rate(mesh.tensor * mesh.context)

    held = stage_parameters(shape, mesh)
    dense_ways, expert_ways = mesh.data * mesh.context, expert_data_ways(mesh)
    reduced = max(
        one.dense * (dense_ways - 1) / dense_ways + one.expert * (expert_ways - 1) / expert_ways for one in held
    )
    sent_s += work.num_updates * reduced * (4 + width) / rate(mesh.stage_size if dense_ways > 1 else 1)
    moved = max(one.state_bytes(mesh, dtype, optimizer) for one in held) if optimizer.is_offloaded else 0.0
    return float(compute_s + sent_s + work.num_updates * moved / HOST_LINK)


def _slowest_stage(length: int, shape: ModelShape, mesh: Mesh) -> float:
    """The forward FLOPs of the slowest stage, divided by the mean of the stages, for samples of one length."""
    of_layer = flops_by_layer(length, shape)
    total = float(forward_flops(np.array([length]), shape)[0])
    stages = [
        sum(of_layer[n] for chunk in range(mesh.virtual) for n in mesh.layer_range(shape.num_layers, stage, chunk))
        for stage in range(mesh.pipeline)
    ]
    stages[-1] += total - sum(of_layer)
    return float(max(stages) / total * mesh.pipeline)


def generation_seconds(
    config: GrpoRunConfig, shape: ModelShape, num_parameters: int, width: int, at_once: float = math.inf
) -> float:
    """The least seconds of a generation if every answer has the longest length: each engine reads its weights once for
    each position of a batch, and each token reads the keys and values of the tokens before it. With pipeline stages the
    answers are in as many batches as there are stages.

    The weights of all experts are read, because a batch of hundreds of answers needs nearly all of them.

    Args:
        at_once: the number of answers that an engine decodes at once. An engine with more answers reads its weights
            as often as for several batches after each other.
    """
    rollout = config.rollout
    gpus = rollout.num_engines * rollout.engine_ranks
    latent = shape.latent
    key_width = latent.kv_rank + latent.rope_dim if latent else 2 * shape.num_kv_heads * shape.head_dim
    answers = rollout.prompts_per_step * rollout.samples_per_prompt
    longest, prompt = rollout.max_response_tokens, rollout.max_prompt_tokens
    # A layer with a window reads no more than the window.
    positions = np.arange(longest, dtype=np.float64) + prompt
    whole = (shape.num_layers - len(shape.sliding_layers) - len(shape.linear_layers)) * positions.sum()
    window = len(shape.sliding_layers) * np.minimum(positions, shape.sliding_window or 0).sum()
    values = answers * key_width * width * (whole + window)
    if shape.delta:  # each token reads and writes its states
        values += answers * longest * len(shape.linear_layers) * 2 * state_bytes(shape, 1, width)
    batches = rollout.pipeline * max(1.0, answers / rollout.num_engines / at_once)
    weights = rollout.num_engines * batches * longest * num_parameters * width
    return float((values + weights) / (gpus * BANDWIDTH * DECODING_SHARE))
