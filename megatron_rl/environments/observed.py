"""What a tool or a `step` of a class returns, as the content of an observation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megatron_rl.config.given_rows import image_text

IMAGES = ("image", "image_url", "input_image")
"""The types of parts with an image."""


def content_of(result: Any) -> str | list[dict[str, Any]] | None:
    """Content parts, in which bytes and images of Pillow are texts; a text if all parts are texts; None if the result
    has neither parts nor images.

    An image, a part, and lists of both, also with texts between images, are taken:

        [{"type": "text", "text": "The page:"}, {"type": "image", "image": PIL.Image.open("page.png")}]
        ["The page:", PIL.Image.open("page.png")]

    Raises:
        ValueError: a list has an image beside a value that is neither a text nor an image.
    """
    several = list(result) if isinstance(result, list | tuple) else [result]
    given = [part for part in map(_part, several) if part]
    if any(part["type"] in IMAGES for part in given):
        if len(given) < len(several):
            raise ValueError("it has an image beside a value that is neither a text, nor an image, nor a content part")
        return given
    if isinstance(result, list) and 0 < len(given) == sum(isinstance(one, Mapping) for one in several) == len(several):
        return "".join(part["text"] for part in given)
    return None


def _part(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    if text := image_text(value):
        return {"type": "image", "image": text}
    if isinstance(value, Mapping) and value.get("type") in (*IMAGES, "text"):
        plain = {key: image_text(one) or _plain_path(one) for key, one in value.items()}
        return plain if plain["type"] in IMAGES or isinstance(plain.get("text"), str) else None
    return None


def _plain_path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value
