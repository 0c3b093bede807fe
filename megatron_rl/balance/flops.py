"""Floating-point operations of a training step, counted from the model's shape.

Only matrix products are counted, with two operations for each multiplication and addition. The rest (norms, softmax,
rotary embedding, optimizer) is below one percent for models of practical size.

Invariant (tests/unit/balance): the counts agree within 2 % with torch's FlopCounterMode on plain implementations of
every kind of layer, for forward pass, backward pass and recomputation.

Shape letters: S samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_rl.types import ModelShape


def forward_flops(lengths_S: np.ndarray, shape: ModelShape) -> NDArray[np.float64]:
    """The FLOPs of one forward pass over samples of these lengths, float64 [S]."""
    return _layers(lengths_S, shape) + _output(lengths_S, shape)


def training_flops(lengths_S: np.ndarray, shape: ModelShape, recompute: str = "none") -> NDArray[np.float64]:
    """The FLOPs of forward and backward pass, float64 [S]. The backward pass needs twice as many as the forward pass.

    Args:
        lengths_S: the number of tokens of each sample.
        recompute: `none` or `full`. With `full` the layers, but not the output layer, run forward a second time.
    """
    passes = {"none": 3, "full": 4}[recompute]
    return passes * _layers(lengths_S, shape) + 3 * _output(lengths_S, shape)


def attention_flops(lengths_S: np.ndarray, shape: ModelShape) -> NDArray[np.float64]:
    """The forward FLOPs of attention scores and weighted values, float64 [S].

    A causal kernel computes half of a sample's L x L pairs of tokens. In a layer with a window of W tokens it computes
    W pairs for each token after the first W, which makes L^2 / 2 - (L - W)^2 / 2 pairs in all.
    """
    tokens_S = np.asarray(lengths_S, np.float64)
    latent = shape.latent
    key_and_value = latent.nope_dim + latent.rope_dim + latent.value_dim if latent else 2 * shape.head_dim
    pairs_S = shape.num_layers * tokens_S**2 / 2
    if shape.sliding_window is not None:
        pairs_S -= len(shape.sliding_layers) * np.maximum(tokens_S - shape.sliding_window, 0) ** 2 / 2
    return 2 * shape.num_heads * key_and_value * pairs_S


def layer_flops_per_token(shape: ModelShape) -> int:
    """The forward FLOPs of one token in the weight matrices of all layers."""
    hidden, experts = shape.hidden_size, shape.experts
    dense = 3 * hidden * shape.ffn_size  # gate, up, down
    if experts is None:
        mlps = shape.num_layers * dense
    else:
        router = hidden * experts.num_experts
        mixture = router + 3 * hidden * (experts.num_active * experts.ffn_size + experts.shared_ffn_size)
        mlps = experts.first_dense_layers * dense + (shape.num_layers - experts.first_dense_layers) * mixture
    return 2 * (shape.num_layers * _projections(shape) + mlps)


def _projections(shape: ModelShape) -> int:
    """The number of multiplications of one token in one layer's attention projections."""
    hidden, heads, latent = shape.hidden_size, shape.num_heads, shape.latent
    if latent is None:  # q and o, k and v; num_heads * head_dim may differ from the hidden size
        return 2 * hidden * (heads + shape.num_kv_heads) * shape.head_dim
    query_width = heads * (latent.nope_dim + latent.rope_dim)
    query = latent.query_rank * (hidden + query_width) if latent.query_rank else hidden * query_width
    key_and_value = hidden * (latent.kv_rank + latent.rope_dim)
    key_and_value += latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
    return query + key_and_value + heads * latent.value_dim * hidden


def _layers(lengths_S: np.ndarray, shape: ModelShape) -> NDArray[np.float64]:
    return layer_flops_per_token(shape) * np.asarray(lengths_S, np.float64) + attention_flops(lengths_S, shape)


def _output(lengths_S: np.ndarray, shape: ModelShape) -> NDArray[np.float64]:
    return 2.0 * shape.hidden_size * shape.vocab_size * np.asarray(lengths_S, np.float64)
