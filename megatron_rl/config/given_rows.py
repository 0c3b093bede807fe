"""Rows of a script or of a notebook, in a file for the processes of its run."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from shutil import copyfile, copytree
from typing import Any

import numpy as np

from megatron_rl.processes import open_text

Rows = str | os.PathLike[str] | Iterable[Mapping[str, Any]]
"""A path of rows as in `data.train`, a list of rows, or a data set of the library `datasets`."""


class GivenRows:
    """Rows that a user gave, and the path of their file."""

    def __init__(self, given: Rows, path: Path) -> None:
        self._given = given
        self._is_dataset = hasattr(given, "save_to_disk") and not _has_transform(given)
        self._old: Path | None = None
        """The given rows, if they are in the folder of `path`."""
        if isinstance(given, str | os.PathLike):
            self.path = os.fspath(given)
            if Path(given).absolute().parent == path.absolute().parent:
                self._old = Path(given).absolute()
        else:
            self.path = str(path if self._is_dataset else path.with_suffix(".jsonl"))

    def save(self, into: Path) -> None:
        """Write the rows, unless they are in a file already.

        Args:
            into: the folder that will take the place of the path's own.

        Raises:
            ValueError: there are none, or one is no mapping, or has a value that JSON does not have.
        """
        path = into / Path(self.path).name
        if self._old is not None and self._old.exists():
            (copytree if self._old.is_dir() else copyfile)(self._old, path)
        if isinstance(self._given, str | os.PathLike):
            return
        if self._is_dataset:
            self._given.save_to_disk(str(path))  # type: ignore[attr-defined]
            return
        if not isinstance(self._given, Iterable):
            raise ValueError(f"the data must be rows, or a path of rows, but it is {self._given!r}")
        number = 0
        with open_text(path) as file:
            for number, row in enumerate(self._given, start=1):
                if not isinstance(row, Mapping):
                    raise ValueError(
                        f"row {number} of the data must be a mapping of its columns, but it is {row!r:.80}"
                    )
                try:
                    file.write(json.dumps(row, ensure_ascii=False, default=_plain) + "\n")
                except TypeError as error:
                    raise ValueError(f"row {number} of the data is not JSON: {error}; convert the value") from error
        if not number:
            raise ValueError("the data has no row")


def _has_transform(given: Any) -> bool:
    """Whether the rows of a data set are made by a function when they are read, which cannot be saved."""
    form = getattr(given, "format", None)
    return isinstance(form, Mapping) and form.get("type") == "custom"


IMAGES = re.compile(
    rb"(?P<png>\x89PNG)|(?P<jpeg>\xff\xd8\xff)|(?P<gif>GIF8)|(?P<webp>RIFF.{4}WEBP)|(?P<bmp>BM)|(?P<tiff>II\*\0|MM\0\*)|"
    rb"(?P<jp2>\0\0\0\x0cjP  |\xff\x4f\xff\x51)|(?P<avif>.{4}ftypavi[fs])",
    re.DOTALL,
)
"""The first bytes of the files of images, named by their formats."""


PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Pillow's modes of images that a PNG file can hold."""


def image_text(value: Any) -> str | None:
    """The bytes of an image, or an image of Pillow, as `data:image/png;base64,...`; None for everything else."""
    if hasattr(value, "save") and hasattr(value, "getbands"):
        if value.mode not in PNG_MODES:
            value = value.convert("I;16" if value.mode == "I" else "RGB")
        value.save(data := BytesIO(), "png", compress_level=1)
        value = data.getvalue()
    if not isinstance(value, bytes | bytearray):
        return None
    head = IMAGES.match(value)
    return head and f"data:image/{head.lastgroup};base64,{base64.b64encode(value).decode()}"


def _plain(value: Any) -> Any:
    """A number of NumPy's as one of Python's, and a path or an image as a text."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if (text := image_text(value)) is not None:
        return text
    raise TypeError(f"{type(value).__name__} is no type of JSON's")
