"""The rows that a script gives. A run reads one set for training, and one for evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import PIL.Image

from megatron_rl.data.row_images import bytes_of
from megatron_rl.data.rows import plain_row

IMAGE = {"type": "image"}


def joined(eval_dataset: Any) -> Any:
    """The rows for evaluations. Rows of several data sets get the set's name as the column `dataset`.

    Raises:
        ValueError: there is such a column already.
    """
    if not isinstance(eval_dataset, Mapping):
        return eval_dataset
    rows = [(str(name), dict(row)) for name, rows in eval_dataset.items() for row in rows]
    for name, row in rows:
        if row.setdefault("dataset", name) != name:
            raise ValueError(
                f"eval_dataset: the rows of {name!r} have a column `dataset` already, which would have its name; "
                "rename the column, or give one data set with this column"
            )
    return [row for _, row in rows] or None


class RowsWithImages(Sequence[Any]):
    """Rows whose images have places in their turns. A row is made when it is asked for, because a data set decodes its
    images then."""

    def __init__(self, rows: Any) -> None:
        """
        Args:
            rows: they have a length.
        """
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return placed(self._rows[index])


def with_images(rows: Any) -> Any:
    """The rows; if there is a column of images, as TRL reads them (`placed`)."""
    if rows is None:
        return None
    names = getattr(rows, "column_names", None) or {name for row in rows for name in row if isinstance(row, Mapping)}
    return rows if {"image", "images"}.isdisjoint(names) else RowsWithImages(rows)


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """The images in the columns of a row; TRL reads `images` before `image`."""
    if several := row.get("images"):
        return list(several)
    return [row["image"]] if row.get("image") is not None else []


def placed(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with its images before the text of the first user turn whose content is a string, where TRL puts them.
    A turn whose content is a list has their places already."""
    turns = row.get("prompt")
    if not isinstance(turns, list):
        return row
    first, number = next((i for i, turn in enumerate(turns) if _is_plain(turn)), None), len(images_of(row))
    if first is None or not number:
        return row
    content = [IMAGE] * number + [{"type": "text", "text": turns[first]["content"]}]
    return {**row, "prompt": [*turns[:first], {**turns[first], "content": content}, *turns[first + 1 :]]}


def _is_plain(turn: Any) -> bool:
    return isinstance(turn, Mapping) and turn.get("role") == "user" and isinstance(turn.get("content"), str)


def size_of(image: Any) -> tuple[int, int]:
    """Width and height of an image of Pillow, of `datasets`, of bytes, or of a file.

    Raises:
        ValueError, OSError: it cannot be read.
    """
    if not isinstance(image, PIL.Image.Image):
        image = PIL.Image.open(BytesIO(bytes_of(plain_row({"image": image})["image"], Path())))
    width, height = image.size
    return width, height
