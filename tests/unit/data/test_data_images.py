"""Images of rows: where they come from, how many tokens they are, and where their tokens stand."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from threading import Barrier

import numpy as np
import PIL.Image
import pytest
import torch
from image_models import IMAGE_TOKEN, MODELS, drawing, write_model
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megatron_rl.config.given_rows import GivenRows, image_text
from megatron_rl.data.files import load_rows, read_rows
from megatron_rl.data.forms import Reading
from megatron_rl.data.journal import decode, encode
from megatron_rl.data.pictures import Pictures, cuts_of
from megatron_rl.data.prompts import ImageRules, Rules, load_prompts
from megatron_rl.data.row_images import SHOWN, bytes_of, take_images
from megatron_rl.data.rows import BadRow, plain_row
from megatron_rl.models import read_shape
from megatron_rl.models.vision import positions
from megatron_rl.types import Episode, Group, Picture, Prompt, Rollout, Tokens, Vision, images_of_rollouts

VISION = Vision("qwen3_vl", image_token=9, merge=2, num_deep=1, sections=(4, 2, 2), interleaved=True)


def png(height: int, width: int, seed: int = 0) -> bytes:
    drawing(height, width, seed).save(data := BytesIO(), "png")
    return data.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision") / "model"
    return folder, write_model(folder)


def test_the_axes_of_rotated_pairs():
    assert VISION.axes == (0, 1, 2, 0, 1, 2, 0, 0)
    blocks = Vision("x", 9, 2, 0, (4, 2, 2), interleaved=False)
    assert blocks.axes == (0, 0, 0, 0, 1, 1, 2, 2)


def test_positions_by_hand():
    ids = np.array([7, 7, 9, 9, 9, 9, 8])
    assert positions(ids, [Picture("a", 4, 4)], VISION).tolist() == [
        [0, 1, 2, 2, 2, 2, 4],
        [0, 1, 2, 2, 3, 3, 4],
        [0, 1, 2, 3, 2, 3, 4],
    ]
    assert positions(ids[:2], [], VISION).tolist() == [[0, 1]] * 3
    with pytest.raises(ValueError, match="there are 4 image tokens, but its 1 images have 6"):
        positions(ids, [Picture("a", 4, 6)], VISION)
    with pytest.raises(ValueError, match="not adjacent"):
        positions(np.array([9, 9, 7, 9, 9]), [Picture("a", 4, 4)], VISION)


@pytest.mark.parametrize("kind", MODELS)
def test_positions_are_transformers(tmp_path, kind):
    folder, whole = tmp_path, write_model(tmp_path, kind)
    vision, source = read_shape(folder).vision, np.random.default_rng(0)
    for _ in range(20):
        pictures = [Picture("", 2 * source.integers(1, 5), 2 * source.integers(1, 5)) for _ in range(3)]
        ids = []
        for picture in pictures:
            ids += [1] * source.integers(1, 6) + [IMAGE_TOKEN] * vision.num_tokens(picture)
        ids += [1] * source.integers(1, 6)
        ids_1L, grids = torch.tensor([ids]), torch.tensor([[1, p.num_rows, p.num_columns] for p in pictures])
        expected, _ = whole.model.get_rope_index(ids_1L, (ids_1L == IMAGE_TOKEN).int(), grids)
        assert positions(np.array(ids), pictures, vision).tolist() == expected[:, 0].tolist()


@pytest.mark.parametrize(("height", "width"), [(20, 31), (9, 40), (64, 64), (5, 5), (16, 16)])
def test_the_patches_of_a_kept_image_are_the_processors_of_the_whole_one(model, tmp_path, height, width):
    folder, data = model[0], png(height, width)
    pictures = Pictures(folder, tmp_path)
    picture = pictures.add(data)
    expected = Qwen2VLImageProcessorPil.from_pretrained(folder)(images=drawing(height, width, 0), return_tensors="np")
    assert np.array_equal(pictures.patches(picture), expected["pixel_values"])
    assert [[1, picture.num_rows, picture.num_columns]] == expected["image_grid_thw"].tolist()
    assert Pictures(folder, tmp_path).add(data) == picture and len(list(tmp_path.iterdir())) == 1
    assert pictures.add(png(height, width, 1)).digest != picture.digest


def test_the_extents_of_an_image_are_known_without_the_processor(model, tmp_path):
    rng = np.random.default_rng(0)
    config = json.loads((model[0] / "preprocessor_config.json").read_text())
    own = {name: value for name, value in config.items() if name != "size"}
    for given in (config, own | {"min_pixels": 900, "max_pixels": 2000}, own):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
        pictures = Pictures(tmp_path, tmp_path)
        for height, width in [(1, 200), (9, 9), *rng.integers(4, 90, (20, 2)).tolist()]:
            kept = pictures.add(data := png(height, width))
            assert replace(kept, digest="") == Pictures(tmp_path, tmp_path / "none").extents(data)
    for data, told in ((png(1, 201), "one side is 201 times as long"), (png(9, 9)[:-150], "cannot be read")):
        with pytest.raises(BadRow, match=told):
            Pictures(tmp_path, tmp_path).extents(data)


@pytest.mark.parametrize(
    "given",
    [
        {"size": {"height": 448, "width": 448}},
        {"size": {"shortest_edge": 64}},
        {"size": {"min_pixels": 64, "max_pixels": 640}},
        {"min_pixels": 0, "max_pixels": 640},
        {"patch_size": {"height": 4}},
        {"size": "default"},
        [],
    ],
)
def test_files_that_the_processor_refuses_are_refused(model, tmp_path, given):
    config = json.loads((model[0] / "preprocessor_config.json").read_text())
    own = {name: value for name, value in config.items() if name != "size"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own | given if given else given))
    with pytest.raises(Exception):  # noqa: B017 - transformers raises many kinds
        Pictures(tmp_path, tmp_path / "images").add(png(40, 40))
    with pytest.raises(ValueError, match="preprocessor_config.json: .*must be positive numbers; copy the model's own"):
        cuts_of(tmp_path)


def test_the_same_image_is_kept_by_many_at_once(model, tmp_path):
    """Threads of an engine see the same first page."""
    pictures, data, start = Pictures(model[0], tmp_path), png(40, 40), Barrier(8)

    def add(_: int) -> Picture:
        start.wait()
        return pictures.add(data)

    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            assert len(set(pool.map(add, range(8)))) == 1
            (file,) = tmp_path.iterdir()
            file.unlink()


def test_images_of_rollouts_are_inside_or_beside(tmp_path):
    """`megatron-rl generate` writes them into its folder, and a run beside `rollouts`."""
    assert images_of_rollouts(tmp_path / "rollouts") == tmp_path / "images"
    (tmp_path / "rollouts" / "images").mkdir(parents=True)
    assert images_of_rollouts(tmp_path / "rollouts") == tmp_path / "rollouts" / "images"


def test_the_forms_of_images(tmp_path):
    (tmp_path / "a.png").write_bytes(one := png(8, 8))
    two = png(9, 9)
    url = f"data:image/png;base64,{base64.b64encode(two).decode()}"
    texts = ({"role": "user", "content": "x<image>y<image>"},)
    shown = [{"type": "text", "text": "x"}, SHOWN, {"type": "text", "text": "y"}, SHOWN]
    turns, images, columns = take_images(texts, {"images": ["a.png", url], "ground_truth": "3"}, tmp_path)
    assert (turns[0]["content"], columns) == (shown, {"ground_truth": "3"})
    assert images == {"column `images`, image 1": one, "column `images`, image 2": two}
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "image"}, {"type": "text", "text": "y"}]
    turns, images, columns = take_images(({"role": "user", "content": parts},), {"image": "a.png"}, tmp_path)
    assert (turns[0]["content"], columns) == ([SHOWN, SHOWN, parts[2]], {})
    assert images == {"turn 1, part 1": two, "column `image`, image 1": one}
    made = plain_row({"images": [two, drawing(9, 9, 0)], "image": {"bytes": two, "path": None}})
    assert (made["images"][0], made["image"]) == (url, {"bytes": url, "path": None})
    kept = list(take_images(texts[:1], {"images": made["images"]}, tmp_path)[1].values())
    assert kept[0] == two and np.array_equal(PIL.Image.open(BytesIO(kept[1])), drawing(9, 9, 0))
    coded = {"type": "image", "base64": url.partition(",")[2], "image": None}
    parts = [{"type": "image", "image": url, "text": ""}, {"type": "image", "path": "a.png"}, coded]
    assert list(take_images(({"role": "user", "content": parts},), {}, tmp_path)[1].values()) == [two, one, two]
    turns, images, _ = take_images(({"role": "user", "content": "none"},), {}, tmp_path)
    assert (turns[0]["content"], images) == ("none", {})


AT_HAND = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize(
    ("content", "columns", "message"),
    [
        ("no place", {"images": ["a.png"]}, "the turns have 0 places for images .* the column `images` has 1 images"),
        ("<image>", {}, "the turns have 1 places for images .* the column `images` has 0 images"),
        ("<image>", {"image": "https://somewhere/a.png"}, "is an address, and none is fetched; download it"),
        ("<image>", {"image": "missing.png"}, "missing.png. cannot be read: No such file"),
        ("<image>", {"image": "data:image/png;base64,$"}, "an image is no base64"),
        ("<image>", {"image": 3}, "an image is '3'; give a path"),
        ("<image>", {"image": "a\0b"}, "cannot be read: embedded null byte"),
        ("<image>", {"image": "a.png", "images": ["b.png"]}, "both columns `images` and `image` have images"),
        ("<video>", {"videos": ["a.mp4"]}, "the column `videos` has a video"),
        (
            "<image><image>",
            {"images": [AT_HAND, "missing.png"]},
            "^column `images`, image 2: the image .* cannot be read",
        ),
        (
            "<image>",
            {"image": "iVBORw0KGgo" * 500},
            "is a text of 5,500 characters, and no file has such a name; before",
        ),
        (
            [{"type": "image", "source": {"data": "iVB"}}],
            {},
            "the key `source` of a part of the type image is not read",
        ),
        ([{"type": "image", "image": "a.png", "max_pixels": 9}], {}, "the key `max_pixels` of a part"),
    ],
)
def test_bad_images_of_a_row(tmp_path, content, columns, message):
    with pytest.raises(BadRow, match=message):
        take_images(({"role": "user", "content": content},), columns, tmp_path)


def write_rows(folder, *rows) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def load(folder, model, **rules):
    images = ImageRules(read_shape(model).vision, model, folder / "images")
    tokenizer = AutoTokenizer.from_pretrained(model)
    return load_prompts(folder / "rows.jsonl", tokenizer, Rules(64, images=images, **rules))


def test_prompts_have_all_tokens_of_their_images(model, tmp_path):
    folder = model[0]
    (tmp_path / "a.png").write_bytes(png(20, 31))
    row = {"messages": [{"role": "user", "content": "<image>how?"}], "images": ["a.png"], "ground_truth": "1"}
    write_rows(tmp_path, row, {"messages": [{"role": "user", "content": "text"}], "ground_truth": "2"})
    table = load(tmp_path, folder)
    first, second = table[0], table[1]
    [picture] = first.pictures
    assert (picture.num_rows, picture.num_columns) == (4, 8) and first.token_ids.count(IMAGE_TOKEN) == 8
    assert first.columns == {"ground_truth": "1"} and list(first.messages[0]["content"])[0] == SHOWN
    assert second.pictures == () and IMAGE_TOKEN not in second.token_ids
    write_rows(tmp_path, {"messages": row["messages"], "pics": ["a.png"], "ground_truth": "1"})
    images = ImageRules(read_shape(folder).vision, folder, tmp_path / "images")
    given = tmp_path / "rows.jsonl", AutoTokenizer.from_pretrained(folder), Rules(64, images=images)
    [renamed] = load_prompts(*given, Reading(columns={"images": "pics"}))
    assert (renamed.pictures, renamed.columns) == (first.pictures, first.columns), "no reward gets the image's text"


@pytest.mark.parametrize(
    ("content", "data", "message"),
    [
        ("<image>", b"\x89PNG broken", r"rows.jsonl:1: column `images`, image 1: an image of 11 bytes cannot be read"),
        ("<image>", png(8, 8)[:-150], r"rows.jsonl:1: .*: an image of \d+ bytes cannot be read"),
        ("<image>", png(1, 500), r"rows.jsonl:1: .*: an image of .* absolute aspect ratio must be smaller than 200"),
        ("<image> and <|image_pad|>", png(8, 8), "wrote 2 image tokens for 1 images; does a text contain"),
        ("<image> and <|video_pad|>", png(8, 8), "a text contains the model's own video token"),
        ([{"type": "video", "video": "a.mp4"}], png(8, 8), "messages.0..* are no text: .* parts are texts or images"),
        ([{"type": "image"}, "text"], png(8, 8), "messages.0..* has parts that are neither text nor images"),
    ],
)
def test_bad_images_are_told_with_their_row(model, tmp_path, content, data, message):
    (tmp_path / "a.png").write_bytes(data)
    write_rows(tmp_path, {"messages": [{"role": "user", "content": content}], "images": ["a.png"]})
    with pytest.raises(ValueError, match=message):
        load(tmp_path, model[0])


def saved(image, **options) -> bytes:
    image.save(file := BytesIO(), **options)
    return file.getvalue()


def test_images_as_cameras_and_scanners_write_them(model, tmp_path):
    pictures, (wide, grey) = Pictures(model[0], tmp_path), (drawing(24, 40, 0), drawing(32, 32, 0).convert("L"))
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    turned = pictures.add(saved(wide, format="png", exif=exif))
    upright = pictures.add(saved(wide.rotate(270, expand=True), format="png"))
    assert (pictures.patches(turned) == pictures.patches(upright)).all()
    deep = PIL.Image.fromarray(np.asarray(grey).astype(np.uint16) << 8)
    of_16_bits, of_8_bits = (pictures.add(saved(image, format="png")) for image in (deep, grey))
    assert (pictures.patches(of_16_bits) == pictures.patches(of_8_bits)).all()
    assert image_text(wide.convert("CMYK")).startswith("data:image/png;base64,")
    for kind in ("tiff", "webp", "jpeg2000", "bmp", "gif"):
        assert Pictures(model[0], tmp_path).add(bytes_of(image_text(saved(wide, format=kind)), tmp_path)).num_rows == 6


def test_rows_whose_images_nobody_would_see_are_refused(model, tmp_path):
    (tmp_path / "a.png").write_bytes(png(8, 8))
    write_rows(tmp_path, {"prompt": "how many?", "images": ["a.png"]})
    with pytest.raises(ValueError, match="the prompt is a plain text, in which no image has a place"):
        load(tmp_path, model[0])
    write_rows(tmp_path, {"messages": [{"role": "user", "content": "<image>how?"}], "images": ["a.png"]})
    rows, tokenizer = tmp_path / "rows.jsonl", AutoTokenizer.from_pretrained(model[0])
    with pytest.raises(ValueError, match="a text has <image>, and the column `images` is filled"):
        load_prompts(rows, tokenizer, Rules(64))
    with pytest.raises(ValueError, match="a text has <image>, and the column `images` is filled"):
        load_rows(rows, lambda uid, row: row, "fail")


def test_rows_with_other_pixels_are_other_rows_and_are_never_cached(model, tmp_path):
    told, digests = [], set()
    write_rows(tmp_path, {"messages": [{"role": "user", "content": "<image>how?"}], "images": ["a.png"]})
    images = ImageRules(read_shape(model[0]).vision, model[0], tmp_path / "images")
    for seed in (0, 1):
        (tmp_path / "a.png").write_bytes(png(8, 8, seed))
        tokenizer = AutoTokenizer.from_pretrained(model[0])
        given = tmp_path / "rows.jsonl", tokenizer, Rules(64, images=images)
        digests.add(load_prompts(*given, cache=tmp_path / "cache", tell=told.append).tally.digest)
    assert len(digests) == 2 and "are not kept in" in told[0]


def test_a_journal_keeps_the_names_of_images():
    ids = np.array([7, 9, 9, 9, 9, 8], np.int32)
    picture = Picture("abc", 4, 4)
    tokens = Tokens(ids, ids == 8, np.zeros(6, np.float32), np.full(6, -1, np.int32), pictures=(picture,))
    group = Group(
        Prompt("uid", tuple(ids[:5]), "", pictures=(picture,)),
        [Rollout(6, 5, 1, 0, "stop", episode=Episode(1, 5, patches=(16,)))],
        [tokens],
        0,
    )
    found = decode(encode(3, group))[1]
    assert found.payload[0].pictures == found.prompt.pictures == (picture,) and found.rollouts == group.rollouts


def test_images_in_a_list_of_rows_arrive_in_the_runs_file(tmp_path):
    """As `grpo(model, rows, reward)` gives them."""
    image = drawing(8, 12, 0)
    image.save(data := BytesIO(), "png")
    GivenRows([{"image": image, "number": np.int64(3)}, {"image": data.getvalue()}], tmp_path / "rows").save(tmp_path)
    rows = [read.row for read in read_rows(tmp_path / "rows.jsonl")]
    found = [np.asarray(PIL.Image.open(BytesIO(bytes_of(row["image"], tmp_path)))) for row in rows]
    assert all(np.array_equal(one, np.asarray(image)) for one in found) and rows[0]["number"] == 3
