"""The images of a run. Each is resized once, and kept as a PNG file by a hash of its bytes; whoever
needs one, an engine, a trainer rank or a report, finds it there by its digest. Nothing else carries pixels.

A file is cut to patches by transformers' processor of the model. Invariant (tests/unit/data): these are the patches
that the processor makes of the whole image.

Shape letters: P patches, D numbers of a patch.
"""

from __future__ import annotations

import hashlib
import json
import math
from functools import cache, cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import PIL.Image
from PIL import ImageOps

from megatron_rl.data.rows import BadRow
from megatron_rl.types import Picture

UNREADABLE = (OSError, ValueError, SyntaxError, RuntimeError, PIL.Image.DecompressionBombError)
"""What Pillow's readers of formats raise for broken files."""


PROCESSOR = "preprocessor_config.json"


class Cuts(NamedTuple):
    """How the images of a model are cut, by its PROCESSOR file."""

    patch: int = 14
    merge: int = 2
    temporal_patch: int = 2
    least: int = 56 * 56
    """The smallest number of pixels of an image, and the largest one."""
    most: int = 28 * 28 * 1280


def cuts_of(model: Path) -> Cuts:
    """
    Returns:
        What transformers' processor reads; its defaults if there is no file.

    Raises:
        ValueError: the processor would refuse the file, or each image.
    """
    path = model / PROCESSOR
    if not path.exists():
        return Cuts()
    try:
        given = json.loads(path.read_text())
        sizes = dict(given.get("size") or {"shortest_edge": Cuts().least, "longest_edge": Cuts().most})
        for edge, pixels in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
            sizes[edge] = given.get(pixels) if given.get(pixels) is not None else sizes.get(edge)
        names = ("patch_size", "merge_size", "temporal_patch_size")
        cuts = [given.get(name, default) for name, default in zip(names, Cuts(), strict=False)]
        return Cuts(*(_positive(one) for one in (*cuts, sizes["shortest_edge"], sizes["longest_edge"])))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: {error}; patch_size, merge_size and temporal_patch_size, and size with shortest_edge and "
            "longest_edge (or min_pixels and max_pixels) must be positive numbers; copy the model's own file"
        ) from error


def _positive(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
        raise ValueError(f"{value!r} is no positive number")
    return int(value)


MOST_UNEQUAL = 200
"""No side of an image may be this many times as long as the other, as in the processor of Qwen's models."""


def resized(height: int, width: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """The height and width to which the processor of Qwen's models resizes an image: multiples of `unit` that have
    about its ratio, and `least` to `most` pixels.

    Example: 100 x 200 pixels with the unit 28 become 112 x 196.

    Raises:
        ValueError: one side is too long for the other.
    """
    if (ratio := max(height, width) / min(height, width)) > MOST_UNEQUAL:
        raise ValueError(
            f"one side is {ratio:.0f} times as long as the other, and at most {MOST_UNEQUAL} times are read"
        )
    sides = [round(side / unit) * unit for side in (height, width)]
    if sides[0] * sides[1] > most:
        scale = math.sqrt(height * width / most)
        sides = [max(unit, math.floor(side / scale / unit) * unit) for side in (height, width)]
    elif sides[0] * sides[1] < least:
        scale = math.sqrt(least / (height * width))
        sides = [math.ceil(side * scale / unit) * unit for side in (height, width)]
    return sides[0], sides[1]


class Pictures:
    def __init__(self, model: Path, folder: Path) -> None:
        """
        Args:
            model: a model's folder with `preprocessor_config.json`.
            folder: of the files; it is made with the first one.
        """
        self._model, self._folder = model, folder

    @cached_property
    def processor(self) -> Any:
        """transformers' processor of the model."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Processor

        return Processor.from_pretrained(self._model)

    def add(self, data: bytes) -> Picture:
        """Resize an image as the model's processor does, and keep it.

        Args:
            data: a file in a format that Pillow reads.

        Raises:
            BadRow: this is no whole image, or the processor refuses its extents.
        """
        own = self.processor
        settings = repr(
            (own.size, own.resample, own.patch_size, own.merge_size, own.image_mean, own.image_std)
        ).encode()
        digest = hashlib.blake2b(data, digest_size=16, key=hashlib.sha256(settings).digest()).hexdigest()
        if not (path := self.path(digest)).exists():
            try:
                resized = own.resize(_channels(data), own.size, own.resample, own.patch_size * own.merge_size)
            except UNREADABLE as error:
                raise _unreadable(data, error) from error
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{uuid4().hex}")  # engines of other nodes write the same image
            PIL.Image.fromarray(np.ascontiguousarray(resized.transpose(1, 2, 0))).save(temporary, "png")
            temporary.replace(path)
        with PIL.Image.open(path) as kept:
            width, height = kept.size
        return Picture(digest, height // own.patch_size, width // own.patch_size)

    def extents(self, data: bytes) -> Picture:
        """What `add` gives, without a digest. Nothing is kept, and transformers is not imported.

        Raises:
            BadRow: see `add`.
        """
        patch, merge, _, least, most = cuts_of(self._model)
        try:
            _, height, width = _channels(data).shape
            height, width = resized(height, width, patch * merge, least, most)
        except UNREADABLE as error:
            raise _unreadable(data, error) from error
        return Picture("", height // patch, width // patch)

    def path(self, digest: str) -> Path:
        return self._folder / f"{digest}.png"

    def patches(self, picture: Picture) -> np.ndarray:
        """float32 [P, D], in the order in which a tower of the model reads them.

        Raises:
            FileNotFoundError: the run's folder has no such image.
        """
        image = np.asarray(PIL.Image.open(self.path(picture.digest)))
        return np.asarray(self.processor(images=image, do_resize=False, return_tensors="np")["pixel_values"])


def _channels(data: bytes) -> np.ndarray:
    """uint8 [3, height, width]: the first picture of a file, turned as its camera was held (EXIF), without its
    transparency. Of numbers of 16 bits the upper 8 are taken."""
    with PIL.Image.open(BytesIO(data)) as file:
        image = ImageOps.exif_transpose(file)
    if image.mode.startswith("I;16"):
        image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


def _unreadable(data: bytes, error: Exception) -> BadRow:
    why = "they have no known format" if isinstance(error, PIL.UnidentifiedImageError) else error
    return BadRow(f"an image of {len(data):,} bytes cannot be read: {why}")


@cache
def pictures_of(model: Path, folder: Path) -> Pictures:
    """The same object for the same folders."""
    return Pictures(model, folder)
