"""The places of parts of the weights: rectangles of Hugging Face tensors, which are the canonical form of both sides.

A `Shard` says that a rectangle of an HF tensor is a rectangle of a local parameter. A rank is a list of shards;
loading, export and the bridge are loops over such lists. Invariants (tests/unit/models): both rectangles of a shard
have the same extents, except that a parameter that stacks experts has one more dim of extent 1 in front; the shards of
all ranks of a mesh without replicas partition every HF tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from megatron_rl.types import TOWER

Box = tuple[tuple[int, int], ...]
"""The half-open interval [start, stop) of each tensor dim."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A rectangle of an HF tensor that is a rectangle of a local parameter. An example is the gate half of a fused
    gated MLP with ffn 256 and hidden 128, on rank 1 of TP2:
    Shard("model.layers.0.mlp.gate_proj.weight", ((128, 256), (0, 128)),
          "decoder.layers.0.mlp.linear_fc1.weight", ((0, 128), (0, 128)))
    """

    hf_name: str
    hf_box: Box
    local_name: str
    local_box: Box

    def __post_init__(self) -> None:
        stacked = len(self.local_box) - len(self.hf_box)
        assert extents(self.local_box) == (1,) * stacked + extents(self.hf_box), self


def extents(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """The number of elements of a box."""
    return prod(extents(box))


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None if it is empty."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def translate(part: Box, origin: Box, target: Box) -> Box:
    """Move `part` by the offset from `origin` to `target`. If `target` has more dims in front, the result has them
    too."""
    front = len(target) - len(origin)
    return target[:front] + tuple(
        (p[0] - o[0] + t[0], p[1] - o[0] + t[0]) for p, o, t in zip(part, origin, target[front:], strict=True)
    )


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index of a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def local_extents(shards: Iterable[Shard]) -> dict[str, tuple[int, ...]]:
    """The extents of every local parameter. Padding rows of the vocabulary are not counted."""
    result: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        stops = tuple(stop for _, stop in shard.local_box)
        known = result.get(shard.local_name, stops)
        result[shard.local_name] = tuple(max(a, b) for a, b in zip(known, stops, strict=True))
    return result


def check_parameters(shards: Iterable[Shard], live: dict[str, tuple[int, ...]], side: str) -> None:
    """Check that the live parameters are exactly the parameters that the shards describe, with the same extents.

    Only dim 0 of a vocabulary matrix may be longer than described, because of its padding rows.

    Raises:
        ValueError: no rule covers a parameter, one is missing, or its extents differ. The error names it.
    """
    described = local_extents(shards)
    for name in live.keys() - described.keys():
        raise ValueError(f"{side}: parameter {name} {live[name]} is covered by no rule of the model family's table")
    for name, shape in described.items():
        if name not in live:
            raise ValueError(f"{side}: the family's table expects a parameter {name} {shape}, which the model lacks")
        padded = live[name][0] >= shape[0] and live[name][1:] == shape[1:] and is_vocabulary(name)
        if live[name] != shape and not padded:
            raise ValueError(f"{side}: parameter {name} is {live[name]}, but the family's table says {shape}")


def is_vocabulary(local_name: str) -> bool:
    """Whether the parameter is of the embedding or the output layer, and has rows of the vocabulary: an adapter's A has
    none, nor has a vision tower. Only these have padding rows."""
    without = ".lora_A" in local_name or TOWER in local_name
    return any(part in local_name for part in ("embed", "output_layer", "lm_head")) and not without
