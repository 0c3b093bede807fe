"""Floating-point operations of a training step, counted from the model's shape.

Only matrix products are counted, with two operations for each multiplication and addition. The rest (norms, softmax,
rotary embedding, optimizer) is below one percent for models of practical size.

Invariant (tests/unit/balance): the counts agree within 2 % with torch's FlopCounterMode on plain implementations of
every kind of layer, for forward pass, backward pass and recomputation.

Shape letters: S samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from megatron_rl.types import TOWER, Layer, ModelShape


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
    for layer in shape.head_layers:
        of_ends_S = _head_projection(lengths_S, shape) + _output(lengths_S, shape)
        flops_S += passes * _head_layer(lengths_S, shape, layer) + 3 * of_ends_S
    if shape.adapters:
        flops_S -= _weights(lengths_S, shape) + _output(lengths_S, shape)
    return flops_S


def tower_flops(patches: Sequence[Sequence[int]], shape: ModelShape, recompute: str = "none") -> NDArray[np.float64]:
    """The FLOPs of forward and backward pass of a trained vision tower, float64 [S]; zeros if there is none. A frozen
    one computes an image once for many steps.

    A patch is multiplied with the matrices of the embedding and of all layers, and merge x merge patches together with
    those of the mergers. In a layer two products of h numbers are computed for each pair of patches that see each
    other, in its image or in its window.

    Args:
        patches: [S], the number of patches of each image of a sample.
    """
    vision, tower = shape.vision, shape.tower
    if vision is None or not tower:
        return np.zeros(len(patches))
    matrices = {name: prod(extents) for name, extents in tower.items() if len(extents) > 1 and "pos_embed" not in name}
    of_patch = sum(size / vision.merge ** (2 * ("merger" in name)) for name, size in matrices.items())
    hidden = tower[f"{TOWER}patch_embed.proj.weight"][0]
    num_layers = sum(name.endswith(".norm1.weight") for name in tower)
    whole, windowed = 2 * hidden * vision.num_whole, 2 * hidden * (num_layers - vision.num_whole) * vision.window
    passes = {"none": 3, "full": 4}[recompute]
    return np.array([2.0 * passes * sum(p * (of_patch + whole * p + windowed) for p in own) for own in patches])


def attention_flops(lengths_S: np.ndarray, shape: ModelShape) -> NDArray[np.float64]:
    """The forward FLOPs of attention scores and weighted values, float64 [S]. A causal kernel computes half of a
    sample's L x L pairs of tokens, and fewer with a window. Layers with linear attention have none: their cost is in
    `layer_flops_per_token`."""
    scores_S = np.zeros(len(lengths_S))
    for block, number in shape.attentions.items():
        scores_S += number * block.scores(lengths_S)
    return 2 * scores_S


def layer_flops_per_token(shape: ModelShape) -> int:
    """The forward FLOPs of one token in the weight matrices of all layers, and in the states of linear attention."""
    return 2 * sum(number * _multiplications(layer, shape) for layer, number in Counter(shape.layers).items())


def flops_by_layer(length: int, shape: ModelShape) -> list[float]:
    """The forward FLOPs of each layer on a sample of this length. Their sum is `forward_flops` without the output
    layer."""
    hidden = shape.hidden_size
    flops = {
        layer: 2.0 * length * layer.attention.multiplications(hidden)
        + 2 * float(layer.attention.scores(length))
        + 2.0 * length * layer.mlp.multiplications(hidden)
        for layer in set(shape.layers)
    }
    return [flops[layer] for layer in shape.layers]


def _multiplications(layer: Layer, shape: ModelShape) -> int:
    """The multiplications of one token in the weight matrices of a layer."""
    return layer.attention.multiplications(shape.hidden_size) + layer.mlp.multiplications(shape.hidden_size)


def _layers(lengths_S: np.ndarray, shape: ModelShape) -> NDArray[np.float64]:
    return _weights(lengths_S, shape) + attention_flops(lengths_S, shape)


def _weights(lengths_S: np.ndarray, shape: ModelShape) -> NDArray[np.float64]:
    return layer_flops_per_token(shape) * np.asarray(lengths_S, np.float64)


def _head_layer(lengths_S: np.ndarray, shape: ModelShape, layer: Layer) -> NDArray[np.float64]:
    per_token = 2.0 * _multiplications(layer, shape)
    return per_token * np.asarray(lengths_S, np.float64) + 2 * layer.attention.scores(lengths_S)


def _head_projection(lengths_S: np.ndarray, shape: ModelShape) -> NDArray[np.float64]:
    """The matrix in front of the head's layer. No gradient of its input is needed, which is not counted off."""
    return 4.0 * shape.hidden_size**2 * np.asarray(lengths_S, np.float64)


def _output(lengths_S: np.ndarray, shape: ModelShape) -> NDArray[np.float64]:
    return 2.0 * shape.hidden_size * shape.vocab_size * np.asarray(lengths_S, np.float64)
