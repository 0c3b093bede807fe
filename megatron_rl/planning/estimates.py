"""The seconds of the trainers' part of a step on H100 GPUs, estimated from the model's sizes.

These are sums of the operations and bytes that must happen, divided by the rates of `planning/rates.py`, not
measurements. Invariants (tests/unit/planning): they equal calculations by hand; of the runs that others have published
the median of predicted / published is 0.95 to 1.1, and half of the runs are within 0.8 to 1.25.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from megatron_rl.algorithms.passes import Needs, num_forward_passes
from megatron_rl.balance import flops_by_layer, forward_flops, plan_microbatches, training_flops
from megatron_rl.balance.hardware import PEAK_FLOPS
from megatron_rl.config.optimizer import AdamConfig, OptimizerConfig
from megatron_rl.config.policy import ParallelConfig
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig, OfflineRunConfig
from megatron_rl.layout import Links
from megatron_rl.planning.parameters import BYTES, expert_data_ways, stage_parameters
from megatron_rl.planning.rates import H100, Rates
from megatron_rl.types import Mesh, MicrobatchPlan, Minibatches, ModelShape, StepBatch

EXPOSED = 0.5
"""The share of the communication of context and data parallelism that does not overlap with computation."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the trainers do in a step."""

    lengths: np.ndarray
    """int64 [S]: the lengths of the samples, in tokens."""
    num_updates: int
    num_passes: float
    """The forward passes over all samples in addition to the passes of the updates: what the objective needs
    (`algorithms.passes`), and the shares of the experts for the load-balancing loss."""
    num_epochs: int = 1


def largest_work(config: BaseConfig) -> Work:
    """The work of the policy's trainers if every sample has the largest length. The work of a critic and of a teacher
    is not counted."""
    balancing = int(config.policy.load_balancing_loss > 0)  # the experts' shares are counted in a pass of their own
    if isinstance(config, GrpoRunConfig):
        rollout, algorithm = config.rollout, config.algorithm
        num_samples = rollout.prompts_per_step * rollout.samples_per_group
        epochs, num_updates = algorithm.epochs, algorithm.num_updates
        own = [one for one in Needs.of(algorithm).passes(num_updates) if one.model != "teacher"]
        passes = num_forward_passes(own, algorithm.updates_per_step)
        lengths = np.full(num_samples, rollout.max_model_tokens)
        return Work(lengths, num_updates, epochs * balancing + passes, epochs)
    assert isinstance(config, OfflineRunConfig)
    offline, first_pass = config.offline, int(config.preferences is not None)  # preferences compare answers first
    lengths = np.full(offline.rows_per_step * config.samples_per_row, offline.max_tokens)
    return Work(lengths, 1, balancing + first_pass)


def planned_microbatches(config: BaseConfig, shape: ModelShape, parallel: ParallelConfig, work: Work) -> MicrobatchPlan:
    """The plan of an epoch with this work.

    Raises:
        ValueError: see `plan_microbatches`.
    """
    num_samples = len(work.lengths)
    per_group = config.rollout.samples_per_group if isinstance(config, GrpoRunConfig) else 1
    batch = StepBatch(
        names=[f"sample {i}" for i in range(num_samples)],
        group_of=np.arange(num_samples) // per_group,
        lengths=work.lengths,
        num_actions=np.ones(num_samples, np.int64),
        payloads=[None] * (num_samples // per_group),
        version=0,
        is_cut=np.zeros(num_samples, bool),
        rewards=np.zeros(num_samples),
    )
    active = np.ones(num_samples, bool)
    minibatches, recompute = Minibatches(work.num_updates // work.num_epochs), config.model.recompute
    return plan_microbatches(batch, active, shape, parallel, config.balance, minibatches, recompute=recompute)


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
    optimizer: OptimizerConfig = AdamConfig(),
    rates: Rates = H100,
) -> float:
    """The seconds of a step's forward passes and updates:

        C (1 + (p - 1) / (m v)) + (T + E + X / 2) + D / 2 + O

    C is the time of the FLOPs of the slowest stage at `Rates.dense` or `Rates.mixture` of the peak; the last stage also
    has the output layer. The factor describes a pipeline of p stages of v chunks with m micro-batches: its stages are
    idle for the share (p - 1) / (m v + p - 1) of the time (Narayanan et al. 2021, arXiv:2104.04473). T, E, X and D are
    the communication times of tensor, expert, context and data parallelism. Half of X and of D is taken to overlap
    with C, and nothing of the others. With N tokens of a step on a data- and context-parallel rank, L layers of a
    stage, H hidden, w bytes of an element, and groups of t, e, c and d ranks:

        T: attention and a dense MLP each gather and scatter N H w (t - 1) / t bytes in a pass of a layer.
        E: a mixture sends its active tokens to their experts and back: 2 N/t k H w / e bytes in a pass of a layer for
           each of the e - 1 others, at the same time to the ranks of the node and to the others. Each split expert
           gathers and scatters N/t k H w (g - 1) over its g ranks.
        X: the ring passes keys and values on: N K w (c - 1) bytes in a pass of a layer, with K elements of k and v. A
           layer with linear attention exchanges its heads' inputs and outputs: N P w (c - 1) / c bytes, with P elements
           of them.
        D: an update scatters gradients of 4 (or 2) bytes and gathers weights of w bytes, each (d - 1) / d of the
           rank's; for experts over their own group.

    A forward pass counts once, a recomputation once, the backward pass once in T and E and twice in X. A group that is
    larger than a node sends at the rate of a NIC, any other at the rate of NVLink. O is the time of copying an
    offloaded optimizer state from the node's memory to the GPU and back in each update, both ways at once. The products
    of Muon's iterations are left out.

    Args:
        num_microbatches: the number of micro-batches of a rank in an update.
    """
    mesh, width = parallel.mesh, BYTES[dtype]
    flops = work.num_passes * forward_flops(work.lengths, shape).sum()
    flops += work.num_epochs * training_flops(work.lengths, shape, recompute).sum()
    compute_s = flops / (mesh.world_size * PEAK_FLOPS * rates.fitting(shape)[0])
    compute_s *= _slowest_stage(int(work.lengths.max()), shape, mesh)
    compute_s *= 1 + (mesh.pipeline - 1) / (num_microbatches * mesh.virtual)
    sent_s = _sent_seconds(work, shape, mesh, width, recompute, BYTES[optimizer.gradients], rates)
    held = stage_parameters(shape, mesh)
    moved = max(one.state_bytes(mesh, dtype, optimizer) for one in held) if optimizer.is_offloaded else 0.0
    return float(compute_s + sent_s + work.num_updates * moved / rates.host_bytes_per_s)


def _sent_seconds(
    work: Work, shape: ModelShape, mesh: Mesh, width: int, recompute: str, gradient_width: int, rates: Rates
) -> float:
    """T + E + X / 2 + D / 2 of `training_seconds`."""
    links = Links(rates.gpus_per_node)
    nvlink, nic = rates.nvlink * links.nvlink_bytes_per_s, rates.nic * links.nic_bytes_per_s

    def rate(span: int) -> float:
        """The bytes per second of a group whose ranks lie within `span` neighbouring ranks."""
        return nvlink if span <= rates.gpus_per_node else nic

    tokens = work.lengths.sum() / (mesh.data * mesh.context)
    hidden, mixture = shape.hidden_size, shape.mixture
    backward = work.num_epochs
    forward = work.num_passes + backward * (1 + (recompute == "full"))
    mixtures = shape.num_mixtures / mesh.pipeline
    layers = shape.num_layers / mesh.pipeline
    of_blocks = 2 * (layers - mixtures) + mixtures  # attention in each layer, the MLP in layers without a mixture
    tensor_bytes = 2 * of_blocks * tokens * hidden * width * (mesh.tensor - 1) / mesh.tensor
    sent_s = (forward + backward) * tensor_bytes / rate(mesh.tensor)
    if mixture:
        routed = mixtures * tokens / mesh.tensor * mixture.num_active * hidden * width
        split = mesh.expert_ways
        inside = min(mesh.expert, max(1, rates.gpus_per_node // split))  # the ranks of a node that divide the experts
        for_each = (forward + backward) * 2 * routed / mesh.expert
        sent_s += max(for_each * (inside - 1) / nvlink, for_each * (mesh.expert - inside) / nic)
        sent_s += (forward + backward) * 2 * routed * (split - 1) / rate(split)
    ring, exchanged = 0.0, Counter[tuple[int, bool]]()
    for block, number in shape.attentions.items():
        exchanged[block.context_width, block.is_linear] += number
    for (numbers, is_linear), number in exchanged.items():
        passed = layers * tokens * numbers / mesh.tensor * width * (mesh.context - 1)
        ring += number / shape.num_layers * (passed / mesh.context if is_linear else passed)
    sent_s += EXPOSED * (forward + 2 * backward) * ring / rate(mesh.tensor * mesh.context)

    dense_ways, expert_ways = mesh.data * mesh.context, expert_data_ways(mesh)
    reduced = max(
        one.dense * (dense_ways - 1) / dense_ways + one.expert * (expert_ways - 1) / expert_ways
        for one in stage_parameters(shape, mesh)
    )
    reduced_s = work.num_updates * reduced * (gradient_width + width) / rate(mesh.stage_size if dense_ways > 1 else 1)
    return float(sent_s + EXPOSED * reduced_s)


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
