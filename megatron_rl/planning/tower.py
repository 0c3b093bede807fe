"""The memory of a vision tower on a trainer rank of the first pipeline stage.

Invariant (tests/ranks): the activations of a trained tower are within 10 % of what autograd saves, with and without
recomputation.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from megatron_rl.planning.activations import passes_in_flight
from megatron_rl.types import MOST_SEEN_BYTES, TOWER, Mesh, ModelShape


class TowerBytes(NamedTuple):
    """The bytes of a tower on a rank."""

    frozen: float = 0.0
    """A frozen tower, and what it keeps of images. A trained one is a part of the model."""
    kept: float = 0.0
    """What the backward passes of a trained tower need, of the micro-batches in flight. A frozen one needs nothing."""
    layer: float = 0.0
    """What a layer that is computed again has in addition."""


def tower_bytes(
    shape: ModelShape, mesh: Mesh, stage: int, num_tokens: int, *, width: int, recompute: bool
) -> TowerBytes:
    """
    A layer keeps for each patch, with the hidden size h, the inner width f and the width w of a number, (11 h + 2 f) w
    bytes in Qwen3-VL and Qwen3.5: inputs and outputs of two norms, q, k and v before and after their rotation, the
    output of attention twice, and the MLP's inside. A gated MLP has 4 f, and an RMSNorm its input in fp32.

    Example: in bf16 a layer of Qwen2.5-VL (h = 1280, f = 3456) keeps 66,048 bytes of a patch, and 2,560 if it is
    computed again.

    Args:
        num_tokens: of a micro-batch. All of them may be of images, and every rank of the stage computes all.
        width: the bytes of a number.
        recompute: layers are computed again in the backward pass.
    """
    if stage or (vision := shape.vision) is None:
        return TowerBytes()
    if not shape.tower:
        return TowerBytes(frozen=vision.num_parameters * width + MOST_SEEN_BYTES)
    hidden, *pixels = shape.tower[f"{TOWER}patch_embed.proj.weight"]
    block = f"{TOWER}blocks.0.mlp."
    gate = shape.tower.get(f"{block}gate_proj.weight")
    ffn = (gate or shape.tower[f"{block}linear_fc1.weight"])[0]
    depth = sum(name.endswith(".norm1.weight") for name in shape.tower)
    layer = (11 * hidden + (4 if gate else 2) * ffn) * width + (8 * hidden if gate else 0)
    merger = 4 * hidden * width + (4 * hidden if gate else 0) + vision.num_deep * 3 * hidden * width
    kept = depth * (hidden * width if recompute else layer) + prod(pixels) * width + merger
    patches = num_tokens * vision.merge**2
    in_flight = passes_in_flight(mesh, stage).count(0)
    return TowerBytes(0.0, float(in_flight * patches * kept), float(patches * layer * recompute))
