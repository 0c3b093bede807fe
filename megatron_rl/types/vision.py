"""How a text model sees images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

MOST_SEEN_BYTES = 2**30
"""What a trainer rank keeps of images that its frozen tower has seen. With more it begins again."""
TOWER = "visual."
"""The beginning of the names of a vision tower's tensors in trainers and engines."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image in a prompt, cut into patches.

    Example: an image of 112 x 140 pixels, with patches of 14 x 14 of which 2 x 2 are one token, is
    `Picture("5f3a...", 8, 10)`, and stands in the prompt as 4 x 5 = 20 tokens.
    """

    digest: str
    """The name of its file in the folder of the run's images: a hash of the bytes that it was read from."""
    num_rows: int
    """The number of patches from top to bottom."""
    num_columns: int

    @property
    def num_patches(self) -> int:
        return self.num_rows * self.num_columns


@dataclass(frozen=True, slots=True)
class Vision:
    """The part of a model that stands between a vision tower and the text model. The tower's outputs take the place of
    the embeddings of image tokens, and a token has a position in time, height and width (M-RoPE, arXiv:2409.12191).

    Example: Qwen3-VL-8B has
    `Vision("qwen3_vl", image_token=151655, merge=2, num_deep=3, sections=(24, 20, 20), interleaved=True)`.
    """

    model_type: str
    """The `model_type` of the whole model in config.json."""
    image_token: int
    """The token that stands in a prompt for each token of an image. It is never sampled."""
    video_token: int | None = field(default=None, kw_only=True)
    """The same of a video. No prompt has it."""
    merge: int
    """A token of an image has merge x merge patches."""
    num_deep: int
    """The number of decoder layers, the first ones, to whose outputs the tower adds (DeepStack, arXiv:2406.04334)."""
    sections: tuple[int, int, int]
    """How many of the rotated pairs of a head's dims turn with a token's time, height and width."""
    interleaved: bool
    """Whether the three take turns over the pairs, as long as height and width have some left, in place of three
    blocks."""
    tower: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), repr=False)
    """The name, which begins with TOWER, and the extents of each tensor of the tower."""
    window: int = field(default=0, kw_only=True)
    """The number of patches that a patch sees in most of the tower's layers; 0 if it sees its whole image in all."""
    num_whole: int = field(default=0, kw_only=True)
    """The number of layers in which it sees its whole image."""
    trained: bool = False
    """Whether the tower is trained as a part of the model."""

    @property
    def num_parameters(self) -> int:
        """The number of the tower's parameters."""
        return sum(prod(extents) for _, extents in self.tower)

    @property
    def axes(self) -> tuple[int, ...]:
        """The axis of each rotated pair: 0 if it turns with time, 1 with height, 2 with width.

        Example: the sections (4, 2, 2) give 0 1 2 0 1 2 0 0 if they are interleaved, and else 0 0 0 0 1 1 2 2.
        """
        if not self.interleaved:
            return tuple(axis for axis, size in enumerate(self.sections) for _ in range(size))
        turns = [3 * size for size in self.sections]
        return tuple(pair % 3 if pair < turns[pair % 3] else 0 for pair in range(sum(self.sections)))

    def num_tokens(self, picture: Picture) -> int:
        return picture.num_patches // self.merge**2


def images_of_rollouts(folder: Path) -> Path:
    """The folder of the images of saved rollouts: inside, where `megatron-rl generate` writes them, or beside, in the
    folder of a run."""
    inside = folder / "images"
    return inside if inside.is_dir() else folder.parent / "images"


def text_of_turn(turn: Mapping[str, Any]) -> str:
    """What a turn says, with `<image>` for each image."""
    content = turn["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "<image>") for part in content)
