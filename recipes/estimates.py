"""What a step needs on GPUs, estimated from the model's sizes: memory by phase, and hours.

These are sums of the tensors that must exist and of the bytes and operations that must happen, not measurements. The
memory of CUDA, of the collectives' buffers and of the allocator's gaps comes on top. Invariant (tests/unit/recipes):
the sums are those of a calculation by hand for Qwen3-32B.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_rl.balance.flops import forward_flops, training_flops
from megatron_rl.balance.hardware import BANDWIDTH, DECODING_SHARE, PEAK_FLOPS, TRAINING_SHARE
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.types import Mesh, ModelShape

LOGIT_CHUNKS = 3 * 256 * 2**20
"""The bytes of the output layer's chunks (algorithms/logprobs.py): logits, their gradient, and one for the entropy."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The bytes of activations on one rank of a pipeline stage."""

    kept: float
    """What the backward passes of the micro-batches in flight need."""
    working: float
    """What the layer or output layer that is computed now needs."""

    @property
    def total(self) -> float:
        return self.kept + self.working


def layer_bytes_per_token(shape: ModelShape, mesh: Mesh, width: int) -> float:
    """The bytes that the backward pass of one layer needs for each token on one rank, with sequence parallelism and an
    attention kernel that keeps no scores: the inputs of norms, matrix products, rotary embedding, attention and
    activation (Korthikanti et al. 2022, arXiv:2205.05198, section 4, with gated MLPs)."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    experts = shape.experts
    ffn = experts.num_active * experts.ffn_size + experts.shared_ffn_size if experts else shape.ffn_size
    elements = 5 * shape.hidden_size + (query + 2 * key) + 2 * (query + key) + query + 3 * ffn
    return elements * width / mesh.tensor


def update_memory(shape: ModelShape, mesh: Mesh, stage: int, num_tokens: int, *, width: int, full: bool) -> StageMemory:
    """The activations of an update on a rank of a stage.

    Args:
        num_tokens: the tokens of a micro-batch, of all context-parallel ranks together.
        full: whether the layers run forward a second time, so that only their inputs are kept.
    """
    layers = -(-shape.num_layers // mesh.pipeline)
    in_flight = mesh.pipeline - stage  # of the schedule one-forward-one-backward
    num_own = num_tokens / mesh.context
    layer = layer_bytes_per_token(shape, mesh, width) * num_own
    inputs = shape.hidden_size * num_own * width / mesh.tensor
    last = LOGIT_CHUNKS + 2 * inputs * mesh.tensor if stage == mesh.pipeline - 1 else 0.0
    return StageMemory(in_flight * layers * (inputs if full else layer), max(2 * layer if full else layer, last))


def training_seconds(config: GrpoRunConfig, shape: ModelShape, lengths: np.ndarray) -> float:
    """The seconds of the forward passes and the update of a step at TRAINING_SHARE of the peak."""
    flops = training_flops(lengths, shape, config.model.recompute).sum()
    passes = (config.algorithm.updates_per_step > 1) + (config.algorithm.kl is not None)
    flops += passes * forward_flops(lengths, shape).sum()
    return float(flops / (config.policy.parallel.mesh.world_size * PEAK_FLOPS * TRAINING_SHARE))


def generation_seconds(config: GrpoRunConfig, shape: ModelShape, num_parameters: int, width: int) -> float:
    """The least seconds of a generation in which every answer has the longest length: each engine reads its weights
    once for each position, and each token reads the keys and values of those before it.

    The weights of all experts are read, because a batch of hundreds of answers needs nearly all of them.
    """
    rollout = config.rollout
    gpus = rollout.num_engines * rollout.tensor
    latent = shape.latent
    key_width = latent.kv_rank + latent.rope_dim if latent else 2 * shape.num_kv_heads * shape.head_dim
    answers = rollout.prompts_per_step * rollout.samples_per_prompt
    longest, prompt = rollout.max_response_tokens, rollout.max_prompt_tokens
    # A layer with a window reads no more than the window.
    positions = np.arange(longest, dtype=np.float64) + prompt
    whole = (shape.num_layers - len(shape.sliding_layers)) * positions.sum()
    window = len(shape.sliding_layers) * np.minimum(positions, shape.sliding_window or 0).sum()
    values = answers * key_width * width * (whole + window)
    weights = rollout.num_engines * longest * num_parameters * width
    return float((values + weights) / (gpus * BANDWIDTH * DECODING_SHARE))
