"""What config.json says of a model's images, and the positions of tokens in time, height and width (M-RoPE, Wang et
al. 2024, arXiv:2409.12191)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.models.config_values import flag, size, whole_numbers
from megatron_rl.models.placement import Placement, box_of, whole_tensor
from megatron_rl.models.shards import Box
from megatron_rl.models.splits import part
from megatron_rl.types import TOWER, Picture, Vision

TOWERS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""The values of `model_type` whose towers run here."""
PREFIXES = (f"model.{TOWER}", TOWER)
"""The beginnings of the names of a tower's tensors in files; Qwen2.5-VL is published with the second."""

_OF_ROWS = re.compile(r"(qkv|gate_proj|up_proj|linear_fc1|merger\.mlp\.0)\.(weight|bias)$")
_OF_COLUMNS = re.compile(r"(attn\.proj|down_proj|linear_fc2|merger\.mlp\.2)\.weight$")
"""The ends of the names of what vLLM splits over the tensor-parallel ranks of an engine."""


def read_vision(config: Mapping[str, Any]) -> Vision | None:
    """
    Args:
        config: the config.json of a model with a vision tower, as `models.composite` describes it.

    Returns:
        None if its tower does not run here.

    Raises:
        ValueError: a value is missing or no number, or the rotation has not three sections.
    """
    if config.get("model_type") not in TOWERS:
        return None
    text, tower = config.get("text_config", config), config["vision_config"]
    is_first = config["model_type"] == "qwen2_5_vl"
    side, depth = size(tower, "patch_size"), size(tower, "depth")
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if len(sections := whole_numbers(rope, "mrope_section", least=0)) != 3:
        raise ValueError(
            f"mrope_section of text_config is {sections}; it must be three numbers, of time, height and width"
        )
    first, second, third = sections
    video = config.get("video_token_id")
    return Vision(
        model_type=config["model_type"],
        image_token=size(config, "image_token_id"),
        video_token=video if isinstance(video, int) and video < text.get("vocab_size", 0) else None,
        merge=size(tower, "spatial_merge_size", 2),
        num_deep=len(tower.get("deepstack_visual_indexes", ())),
        sections=(first, second, third),
        interleaved=flag(rope, "mrope_interleaved", absent=not is_first),
        window=(size(tower, "window_size", 112) // side) ** 2 if is_first else 0,
        num_whole=len(tower.get("fullatt_block_indexes", (7, 15, 23, 31))) if is_first else depth,
        tower=_tower(tower, is_first),
    )


def _tower(config: Mapping[str, Any], is_first: bool) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The names and extents of a tower's tensors. Qwen2.5-VL's, the first, has gated MLPs, and norms without biases.
    Qwen3-VL's has a table of positions, and a merger for each layer that it adds to, and Qwen3.5's adds to none."""
    hidden, ffn, out = (size(config, key) for key in ("hidden_size", "intermediate_size", "out_hidden_size"))
    side, wide = size(config, "patch_size"), hidden * size(config, "spatial_merge_size", 2) ** 2
    found: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (hidden, 3, size(config, "temporal_patch_size", 2), side, side)
    }

    def norm(name: str, width: int) -> None:
        found.update((f"{name}.{part}", (width,)) for part in (("weight",) if is_first else ("weight", "bias")))

    def linear(name: str, rows: int, columns: int) -> None:
        found.update({f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)})

    inner, last = (("gate_proj", "up_proj"), "down_proj") if is_first else (("linear_fc1",), "linear_fc2")
    for block in (f"blocks.{i}" for i in range(size(config, "depth"))):
        for name in ("norm1", "norm2"):
            norm(f"{block}.{name}", hidden)
        linear(f"{block}.attn.qkv", 3 * hidden, hidden)
        linear(f"{block}.attn.proj", hidden, hidden)
        for name in inner:
            linear(f"{block}.mlp.{name}", ffn, hidden)
        linear(f"{block}.mlp.{last}", hidden, ffn)
    mergers = [("merger", hidden)]
    if not is_first:
        found |= {"patch_embed.proj.bias": (hidden,)}
        found |= {"pos_embed.weight": (size(config, "num_position_embeddings", 2304), hidden)}
        num_deep = len(config.get("deepstack_visual_indexes", ()))
        mergers += [(f"deepstack_merger_list.{i}", wide) for i in range(num_deep)]
    for merger, width in mergers:
        norm(f"{merger}.{'ln_q' if is_first else 'norm'}", width)
        linear(f"{merger}.{'mlp.0' if is_first else 'linear_fc1'}", wide, wide)
        linear(f"{merger}.{'mlp.2' if is_first else 'linear_fc2'}", out, wide)
    return tuple((TOWER + name, extents) for name, extents in found.items())


def tower_in_engine(tower: Mapping[str, tuple[int, ...]], ways: int, rank: int) -> list[Placement]:
    """What a tensor-parallel rank of an engine has of a tower. vLLM builds the tower in every pipeline stage.

    Args:
        tower: the extents of its tensors, by name.

    Raises:
        ValueError: the ranks do not divide its linear layers.
    """
    pieces: dict[str, list[tuple[str, Box, Box]]] = {}
    for name, extents in tower.items():
        dim = 0 if _OF_ROWS.search(name) else 1 if _OF_COLUMNS.search(name) else None
        held = pieces.setdefault(re.sub("(gate|up)_proj", "gate_up_proj", name), [])
        if dim is None:
            held += whole_tensor(name, extents).pieces
            continue
        parts = 3 if ".qkv." in name else 1
        length = extents[dim] // parts
        start, stop = part(length, ways, rank)
        for i in range(parts):
            hf_box, local_box = (
                box_of(extents, dim, first, first + stop - start)
                for first in (i * length + start, len(held) * (stop - start))
            )
            held.append((name, hf_box, local_box))
    return [Placement(local, tuple(held), None) for local, held in pieces.items()]


def vision_of(folder: Path) -> Vision | None:
    """How the model of a Hugging Face folder sees images; None if it sees none, or if config.json cannot be read."""
    try:
        return read_vision(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # `models.config.read_shape` tells it
        return None


def positions(ids: np.ndarray, pictures: Sequence[Picture], vision: Vision) -> np.ndarray:
    """
    A token of text is one further than the largest number of the tokens before it, on all three axes. The tokens of an
    image have the same time, and their row and column are added to it.

    Example: 7 7 I I I I 8 with an image of 2 x 2 tokens has the times 0 1 2 2 2 2 4, the heights 0 1 2 2 3 3 4 and the
    widths 0 1 2 3 2 3 4.

    Args:
        ids: int [L], the tokens of a sample.
        pictures: its images, in order.

    Returns:
        int64 [3, L].

    Raises:
        ValueError: the image tokens are not the ones of these images.
    """
    is_image_L = ids == vision.image_token
    found, expected = int(is_image_L.sum()), sum(vision.num_tokens(picture) for picture in pictures)
    if found != expected:
        raise ValueError(f"there are {found} image tokens, but its {len(pictures)} images have {expected}")
    position_3L, start, begin = np.empty((3, len(ids)), np.int64), 0, 0
    firsts = np.flatnonzero(is_image_L)
    taken = 0
    for picture in pictures:
        size, first = vision.num_tokens(picture), int(firsts[taken])
        rows, columns = picture.num_rows // vision.merge, picture.num_columns // vision.merge
        position_3L[:, begin:first] = start + np.arange(first - begin)
        start += first - begin
        grid = np.meshgrid(np.arange(1), np.arange(rows), np.arange(columns), indexing="ij")
        position_3L[:, first : first + size] = start + np.stack([axis.ravel() for axis in grid])
        start, begin, taken = start + max(rows, columns), first + size, taken + size
        if not is_image_L[first:begin].all():
            raise ValueError("the tokens of an image are not adjacent")
    position_3L[:, begin:] = start + np.arange(len(ids) - begin)
    return position_3L
