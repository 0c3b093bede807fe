"""The images of a run. Each is resized once, and kept as a PNG file in the run's folder by a hash of its pixels; whoever
needs one, an engine, a trainer rank or a report, finds it there by its digest. Nothing else carries pixels.

A file is cut to patches by transformers' processor of the model. Invariant (tests/unit/data): these are the patches
that the processor makes of the whole image.

Shape letters: P patches, D numbers of a patch.
"""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from megatron_rl.types import Picture


class Pictures:
    def __init__(self, model: Path, folder: Path) -> None:
        """
        Args:
            model: a model's folder with `preprocessor_config.json`.
            folder: of the files; it is made with the first one.
        """
        self._model, self._folder = model, folder

    @cached_property
    def _processor(self) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil.from_pretrained(self._model)

    def add(self, image: PIL.Image.Image) -> Picture:
        """Resize an image as the model's processor does, and keep it.

        Raises:
            ValueError: the processor refuses its extents.
        """
        own = self._processor
        resized = own.resize(
            np.asarray(image.convert("RGB")).transpose(2, 0, 1), own.size, own.resample, own.patch_size * own.merge_size
        )
        pixels = np.ascontiguousarray(resized.transpose(1, 2, 0))
        rows, columns = (length // own.patch_size for length in pixels.shape[:2])
        name = hashlib.blake2b(pixels.tobytes() + repr(pixels.shape).encode(), digest_size=16).hexdigest()
        if not (path := self.path(name)).exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            (data := BytesIO(), PIL.Image.fromarray(pixels).save(data, "png"))
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(data.getvalue())
            temporary.replace(path)
        return Picture(name, rows, columns)

    def path(self, digest: str) -> Path:
        return self._folder / f"{digest}.png"

    def patches(self, picture: Picture) -> np.ndarray:
        """float32 [P, D], in the order in which a tower of the model reads them.

        Raises:
            FileNotFoundError: the run's folder has no such image.
        """
        image = np.asarray(PIL.Image.open(self.path(picture.digest)))
        found: np.ndarray = self._processor(images=image, do_resize=False, return_tensors="np")["pixel_values"]
        return found
