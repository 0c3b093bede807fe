"""Floating-point operations of a training step, counted from the model's shape.

Only matrix products are counted, with two operations for each multiplication and addition. The rest (norms, softmax,
rotary embedding, optimizer) is below one percent for models of practical size.

Invariant (tests/unit/balance): the counts agree within 2 % with torch's FlopCounterMode on plain implementations of
every kind of layer, for forward pass, backward pass and recomputation.

Shape letters: S samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_rl.types import ModelShape

DELTA_CHUNK = 64
"""The tokens of a chunk of linear attention, as `actor.delta_net.CHUNK` (which needs torch)."""


def forward_flops(lengths_S: np.ndarray, shape: ModelShape) -> NDArray[np.float64]:
    """The FLOPs of one forward pass over samples of these lengths, float64 [S]."""
    return _layers(lengths_S, shape) + _output(lengths_S, shape)


def training_flops(lengths_S: np.ndarray, shape: ModelShape, recompute: str = "none") -> NDArray[np.float64]:
    """The FLOPs of forward and backward pass, float64 [S]. The backward pass needs twice as many as the forward pass.
    With adapters the weights are frozen, and their products are computed once in the backward pass, for the gradient of
    the input. The products of the adapters themselves are left out: a layer of 5120 x 5120 with rank 32 has 1.25 %.

    Args:
        lengths_S: the number of tokens of each sample.
        recompute: `none` or `full`. With `full` the layers, but not the output layer, run forward a second time.
    """
    passes = {"none": 3, "full": 4}[recompute]
    flops_S = passes * _layers(lengths_S, shape) + 3 * _output(lengths_S, shape)
    if shape.multi_token:
        flops_S += passes * _head_layer(lengths_S, shape) + 3 * (
            _head_projection(lengths_S, shape) + _output(lengths_S, shape)
        )
    if shape.adapters:
        flops_S -= _weights(lengths_S, shape) + _output(lengths_S, shape)
    return flops_S


def attention_flops(lengths_S: np.ndarray, shape: ModelShape) -> NDArray[np.float64]:
    """The forward FLOPs of attention scores and weighted values, float64 [S].

    A causal kernel computes half of a sample's L x L pairs of tokens. In a layer with a window of W tokens it computes
    W pairs for each token after the first W, which makes L^2 / 2 - (L - W)^2 / 2 pairs in all. Layers with linear
    attention have none: their cost is in `layer_flops_per_token`.
    """
    num_sliding, num_linear = len(shape.sliding_layers), len(shape.linear_layers)
    pairs_S = (shape.num_layers - num_sliding - num_linear) * _pairs(lengths_S)
    pairs_S += num_sliding * _pairs(lengths_S, shape.sliding_window)
    return 2 * shape.num_heads * _key_and_value(shape) * pairs_S


def _pairs(lengths_S: ArrayLike, window: int | None = None) -> NDArray[np.float64]:
    """The pairs of a query and a key that attention computes for samples of these lengths."""
    tokens_S = np.asarray(lengths_S, np.float64)
    beyond_S = np.maximum(tokens_S - window, 0) if window is not None else 0.0
    pairs_S: NDArray[np.float64] = (tokens_S**2 - beyond_S**2) / 2
    return pairs_S


def _key_and_value(shape: ModelShape) -> int:
    """The size of a key and a value of one head together."""
    latent = shape.latent
    return latent.nope_dim + latent.rope_dim + latent.value_dim if latent else 2 * shape.head_dim


def layer_flops_per_token(shape: ModelShape) -> int:
    """The forward FLOPs of one token in the weight matrices of all layers, and in the states of linear attention."""
    mlps = sum(_mlp(shape, shape.has_experts(layer)) for layer in range(shape.num_layers))
    num_linear = len(shape.linear_layers)
    linear = num_linear * _linear_attention(shape) if num_linear else 0
    return 2 * ((shape.num_layers - num_linear) * _projections(shape) + linear + mlps)


def flops_by_layer(length: int, shape: ModelShape) -> list[float]:
    """The forward FLOPs of each layer on a sample of this length. Their sum is `forward_flops` without the output
    layer."""
    whole, sliding = (float(_pairs(length, window)) for window in (None, shape.sliding_window))
    scores = 2 * shape.num_heads * _key_and_value(shape)

    def of_attention(layer: int) -> float:
        if layer in shape.linear_layers:
            return 2.0 * length * _linear_attention(shape)
        return 2.0 * length * _projections(shape) + scores * (sliding if layer in shape.sliding_layers else whole)

    return [
        of_attention(layer) + 2.0 * length * _mlp(shape, shape.has_experts(layer)) for layer in range(shape.num_layers)
    ]


def _mlp(shape: ModelShape, mixture: bool) -> int:
    """The number of multiplications of one token in the MLP of a layer."""
    if not mixture:
        return 3 * shape.hidden_size * shape.ffn_size  # gate, up, down
    experts = shape.experts
    assert experts is not None
    width = experts.num_active * experts.ffn_size + experts.shared_ffn_size
    return shape.hidden_size * experts.num_experts + 3 * shape.hidden_size * width


def _projections(shape: ModelShape) -> int:
    """The number of multiplications of one token in the attention projections of one layer with softmax attention."""
    hidden, heads, latent = shape.hidden_size, shape.num_heads, shape.latent
    if latent is None:  # q and o, k and v; num_heads * head_dim may differ from the hidden size
        gates = heads if shape.delta else 0  # one for each number of the output
        return hidden * (2 * heads + 2 * shape.num_kv_heads + gates) * shape.head_dim
    query_width = heads * (latent.nope_dim + latent.rope_dim)
    query = latent.query_rank * (hidden + query_width) if latent.query_rank else hidden * query_width
    key_and_value = hidden * (latent.kv_rank + latent.rope_dim)
    key_and_value += latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
    return query + key_and_value + heads * latent.value_dim * hidden


def _linear_attention(shape: ModelShape) -> int:
    """The number of multiplications of one token in one layer with linear attention: its projections, and the gated
    delta rule in whole chunks of C tokens (actor/delta_net.py). A key head multiplies each key and each query with the
    C keys of the chunk. A value head solves a triangular system of C rows for keys and values, which is C / 2 of them
    for each number; it reads the state twice and changes it once; and it adds up the C values of the chunk."""
    delta = shape.delta
    assert delta is not None, "layers with linear attention have sizes"
    key, value = delta.key_size, delta.value_size
    projected = 2 * delta.key_width + 2 * delta.value_width + 2 * delta.num_value_heads
    projections = shape.hidden_size * (projected + delta.value_width)
    of_keys = delta.num_key_heads * 2 * DELTA_CHUNK * key
    of_values = DELTA_CHUNK * (key + value) // 2 + 3 * key * value + DELTA_CHUNK * value
    return projections + of_keys + delta.num_value_heads * of_values


def _layers(lengths_S: np.ndarray, shape: ModelShape) -> NDArray[np.float64]:
    return _weights(lengths_S, shape) + attention_flops(lengths_S, shape)


def _weights(lengths_S: np.ndarray, shape: ModelShape) -> NDArray[np.float64]:
    return layer_flops_per_token(shape) * np.asarray(lengths_S, np.float64)


def _head_layer(lengths_S: np.ndarray, shape: ModelShape) -> NDArray[np.float64]:
    """One more layer of the model's kind."""
    per_token = 2.0 * (_projections(shape) + _mlp(shape, shape.has_experts(shape.num_layers)))
    scores_S: NDArray[np.float64] = 2 * shape.num_heads * _key_and_value(shape) * _pairs(lengths_S)
    return per_token * np.asarray(lengths_S, np.float64) + scores_S


def _head_projection(lengths_S: np.ndarray, shape: ModelShape) -> NDArray[np.float64]:
    """The matrix in front of the head's layer. No gradient of its input is needed, which is not counted off."""
    return 4.0 * shape.hidden_size**2 * np.asarray(lengths_S, np.float64)


def _output(lengths_S: np.ndarray, shape: ModelShape) -> NDArray[np.float64]:
    return 2.0 * shape.hidden_size * shape.vocab_size * np.asarray(lengths_S, np.float64)
