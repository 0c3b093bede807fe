"""Floating-point operations of one training step, counted from the model's shape.

Matrix products only, one multiply and one add each: what is left (norms, softmax, rotary embedding,
optimizer) is below a percent at the sizes that matter.

Invariant: equals what a profiler counts on a plain implementation, the causal half of the attention aside.
"""

from __future__ import annotations

import numpy as np

from megatron_rl.types import ModelShape


def linear_flops_per_token(shape: ModelShape) -> int:
    """Forward FLOPs of the matrices that every token passes: attention projections, gated MLP, output layer.
    The heads' width `num_heads * head_dim` need not be the hidden size."""
    query_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = shape.hidden_size * (2 * query_size + 2 * kv_size)  # q, o and k, v
    mlp = 3 * shape.hidden_size * shape.ffn_size  # gate, up, down
    return 2 * (shape.num_layers * (attention + mlp) + shape.hidden_size * shape.vocab_size)


def attention_flops(lengths: np.ndarray, shape: ModelShape) -> np.ndarray:
    """Forward FLOPs of the scores and of the weighted values, [S]: of the L x L pairs a causal kernel
    computes half."""
    lengths = np.asarray(lengths, np.float64)
    return 2 * shape.num_layers * shape.num_heads * shape.head_dim * lengths**2


def training_flops(lengths: np.ndarray, shape: ModelShape) -> np.ndarray:
    """FLOPs of forward and backward (twice the forward) of samples of these lengths, float64 [S]."""
    lengths = np.asarray(lengths, np.float64)
    return 3 * (linear_flops_per_token(shape) * lengths + attention_flops(lengths, shape))
