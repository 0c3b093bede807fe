"""The images of a row: where its turns have them, and where their bytes come from.

| in a turn | the image |
|---|---|
| `<image>` in the text (verl's form) | the next one of the row's column `images` or `image` |
| a part `{"type": "image"}` | the same |
| a part `{"type": "image", "image": X}`, also with `path`, `url` or `base64` in the place of the second `image` | X |
| a part `{"type": "image_url", "image_url": {"url": X}}` | X |

An image is the path of a file, absolute or beside the rows, or a text `data:image/png;base64,...`. Bytes, `datasets`'
feature Image and images of Pillow have become such a text (rows.py).

Invariant (tests/unit/data): each image of a row is in its turns once, in order, or the row is refused.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megatron_rl.data.rows import BadRow, Row, Turns
from megatron_rl.types import Picture, Vision

T = TypeVar("T")
COLUMNS = ("images", "image")
VIDEOS = ("videos", "video")
MARK = "<image>"
PART = ("type", "detail", "image", "path", "url", "base64", "image_url")
"""The keys of a part with an image."""
LONGEST_PATH = 4096
"""The length of the longest path on Linux, in characters."""
SHOWN = {"type": "image"}
"""The part of a turn that a chat template writes a placeholder for."""


def take_images(messages: Turns, given_columns: Row | None, folder: Path) -> tuple[Turns, dict[str, bytes], Row]:
    """The turns with SHOWN for each image, the images' bytes in order by their places, and the other columns.

    Args:
        given_columns: None: there are no columns, and each part has its own image.
        folder: of the file with the rows.

    Raises:
        BadRow: turns and images do not fit together, or an image cannot be read.
    """
    columns = given_columns or {}
    given: Sequence[Any] = ()
    if filled := [name for name in VIDEOS if columns.get(name)]:
        raise BadRow(f"the column `{filled[0]}` has a video, and models read images alone here; leave the row out")
    if len(filled := [name for name in COLUMNS if columns.get(name)]) > 1:
        raise BadRow("both columns `images` and `image` have images; leave one of them out")
    named = filled[0] if filled else "images"
    if value := columns.get(named):
        given = value if isinstance(value, list) else [value]
    found: dict[str, Any] = {}
    turns = tuple(
        turn | {"content": _parts(turn["content"], f"turn {number}", found)} for number, turn in enumerate(messages, 1)
    )
    marks = sum(one is None for one in found.values())
    if marks and given_columns is None:
        raise BadRow("a part of the type image has no image; give one in the key image, or leave the part out")
    if marks != len(given):
        raise BadRow(
            f"the turns have {marks} places for images ({MARK}, or a part of the type image), but the column `{named}` "
            f"has {len(given)} images; the two numbers must be equal"
        )
    remaining = iter([(f"column `{named}`, image {number}", one) for number, one in enumerate(given, 1)])
    placed = dict(next(remaining) if one is None else (place, one) for place, one in found.items())
    images = dict(zip(placed, each(lambda one: bytes_of(one, folder), placed), strict=True))
    return turns, images, {name: value for name, value in columns.items() if name not in COLUMNS}


def each(read: Callable[[Any], T], images: Mapping[str, Any]) -> list[T]:
    """What `read` makes of each image. Its error says where the row has the image."""
    made: list[T] = []
    for place, image in images.items():
        try:
            made.append(read(image))
        except BadRow as error:
            raise BadRow(f"{place}: {error}") from error
    return made


def require_no_places(row: Mapping[str, Any]) -> None:
    """
    Raises:
        BadRow: a row has images, and places for them in its texts, but here texts alone are read.
    """
    named = next((name for name in COLUMNS if row.get(name)), None)
    if named and MARK in str({name: value for name, value in row.items() if name != named}):
        raise BadRow(
            f"a text has {MARK}, and the column `{named}` is filled, but the model or the command reads texts alone "
            "(docs/images.md); leave the row out"
        )


def _parts(content: str | list[dict[str, Any]], turn: str, found: dict[str, Any]) -> str | list[dict[str, Any]]:
    """The content of a turn, as text if it has no image. What its images are is added to `found` by their places, None
    for the next one of the column."""
    if isinstance(content, str):
        if MARK not in content:
            return content
        texts = content.split(MARK)
        content = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in _between(texts)]
    parts, has_image = [], False
    for number, part in enumerate(content, 1):
        if "image" not in str(part.get("type")):
            parts.append({"type": "text", "text": part["text"]})
            continue
        place = f"{turn}, part {number}"
        found[place] = _own_image(part, place)
        parts.append(SHOWN)
        has_image = True
    return parts if has_image else "".join(part["text"] for part in parts)


def _own_image(part: Mapping[str, Any], place: str) -> Any:
    """The image that a part has itself, or None.

    Raises:
        BadRow: the part has a key that is not read.
    """
    if others := [name for name, value in part.items() if value and name not in PART]:
        raise BadRow(
            f"{place}: the key `{others[0]}` of a part of the type {part['type']} is not read; one of "
            f"{', '.join(PART[2:])} has the image, and a text is a part of its own"
        )
    url = part.get("image_url")
    coded = part.get("base64") and f"data:;base64,{part['base64']}"
    return (
        part.get("image")
        or part.get("path")
        or part.get("url")
        or coded
        or (url.get("url") if isinstance(url, Mapping) else url)
    )


def _between(texts: Sequence[str]) -> list[str | None]:
    """The texts that are not empty, with None between any two."""
    joined: list[str | None] = []
    for number, text in enumerate(texts):
        joined += [None] * (number > 0) + [text] * bool(text)
    return joined


def bytes_of(image: Any, folder: Path) -> bytes:
    """
    Args:
        image: a plain value, as above.
        folder: where relative paths begin.

    Raises:
        BadRow: it names no image that can be read.
    """
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if not isinstance(image, str):
        raise BadRow(f"an image is {str(image)[:60]!r}; give a path, or a text data:image/png;base64,...")
    if image.startswith("data:"):
        try:
            return base64.b64decode(image.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise BadRow(f"an image is no base64: {error}") from error
    if "://" in image:
        raise BadRow(f"the image {image[:100]} is an address, and none is fetched; download it and give its path")
    try:
        return (folder / image).read_bytes()
    except (OSError, ValueError) as error:
        if len(image) > LONGEST_PATH:
            raise BadRow(
                f"an image is a text of {len(image):,} characters, and no file has such a name; before base64 write "
                "data:image/png;base64,"
            ) from error
        what = getattr(error, "strerror", None) or error
        raise BadRow(f"the image {str(folder / image)[:300]!a} cannot be read: {what}") from error


def folder_of(place: str) -> Path:
    """The folder of a row's file, in which the paths of its images begin.

    Args:
        place: see `ReadRow.place`.
    """
    return Path(place.rpartition(":")[0]).parent


def expanded(ids: Sequence[int], pictures: Sequence[Picture], vision: Vision) -> list[int]:
    """The prompt's tokens with as many image tokens for each image as the model reads.

    Raises:
        BadRow: the number of placeholders is not the number of images, or there is one of a video.
    """
    if vision.video_token in ids:
        raise BadRow("a text contains the model's own video token, and models read images alone here; take it out")
    count = sum(token == vision.image_token for token in ids)
    if count != len(pictures):
        raise BadRow(
            f"the chat template wrote {count} image tokens for {len(pictures)} images; does a text contain the model's "
            "own image token, or the template leave images out?"
        )
    remaining, whole = iter(pictures), []
    for token in ids:
        whole += [token] * (vision.num_tokens(next(remaining)) if token == vision.image_token else 1)
    return whole
