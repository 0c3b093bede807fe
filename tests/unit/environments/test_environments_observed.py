"""What tools return, as the content of an observation."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import PIL.Image
import pytest

from megatron_rl.environments.observed import content_of

PAGE = PIL.Image.new("RGB", (3, 2))


def png() -> bytes:
    PAGE.save(data := BytesIO(), "png")
    return data.getvalue()


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (PAGE, ["image"]),
        (png(), ["image"]),
        (bytearray(png()), ["image"]),
        ({"type": "image", "image": Path("a.png")}, ["image"]),
        ([PAGE, PAGE], ["image", "image"]),
        (["see", PAGE], ["see", "image"]),
        (("see", {"type": "image_url", "image_url": {"url": "a.png"}}, "it"), ["see", "image", "it"]),
        ([{"type": "text", "text": "see"}, {"type": "image", "image": PAGE.convert("I")}], ["see", "image"]),
    ],
)
def test_images_are_shown(given, shown):
    content = content_of(given)
    assert [part.get("text", "image") for part in content] == shown
    for part in content:
        assert part["type"] == "text" or part.get("image_url") or part["image"].startswith(("data:image/png;", "a.png"))


@pytest.mark.parametrize(
    ("given", "content"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        (["a", "b"], None),
        ([], None),
        ({"type": "text", "text": "a"}, None),
        ([{"type": "circle", "radius": 3}], None),
        ({"type": "image_size", "width": 3}, None),
        ({"text": "a"}, None),
        (b"bytes", None),
        (7, None),
    ],
)
def test_what_is_no_image_stays_what_it_is(given, content):
    assert content_of(given) == content


@pytest.mark.parametrize("other", [7, {"type": "video", "video": "a"}, None])
def test_an_image_beside_something_else_is_refused(other):
    with pytest.raises(ValueError, match="an image beside a value that is neither a text, nor an image"):
        content_of([PAGE, other])
