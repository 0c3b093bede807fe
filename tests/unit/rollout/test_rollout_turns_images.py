"""Answers of several turns whose observations have images: the row has the images of all turns, in order."""

from __future__ import annotations

import json
import re
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from image_models import IMAGE_TOKEN, LETTERS, TEMPLATE, drawing, write_model
from test_rollout_turns_said import call, play_all
from tiny_chat import HEAD

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.data.pictures import pictures_of
from megatron_rl.data.row_images import expanded
from megatron_rl.models.vision import positions, vision_of
from megatron_rl.rollout.programs.budgets import Budgets
from megatron_rl.types import Prompt

TOOLS = {"kind": "tools", "paths": [f"{__file__}:look", f"{__file__}:glance"]}
KEEPS = HEAD + TEMPLATE
DROPS_THOUGHTS = KEEPS.replace(
    "{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1] }}"
)
NO_IMAGES_OF_TOOLS = KEEPS.replace("part.type == 'image'", "part.type == 'image' and m.role == 'user'").replace(
    "{{ part.text }}", "{{ part.text or 'left out' }}"
)
BROKEN = Path(__file__)


def look(at: int) -> list:
    """Look at a page.

    Args:
        at: its number.
    """
    image = str(BROKEN) if at < 0 else drawing(8 * at, 24, at)
    return [{"type": "text", "text": f"<|image_pad|>{at}"}, {"type": "image", "image": image}]


def compare() -> list:
    """Look at two pages."""
    return [{"type": "text", "text": "abc"}, *look(1)[1:], {"type": "text", "text": "defg"}, *look(2)[1:]]


def glance(format: str):
    """Look once.

    Args:
        format: of the file, if it is one.
    """
    if not format:
        return drawing(8, 24, 1)
    drawing(8, 24, 1).save(data := BytesIO(), format)
    return data.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("sees") / "model"
    write_model(made)
    return made


def begun(folder):
    """A prompt with an image, made of the text that the chat template gives it."""

    def of(render):
        drawing(16, 16, 9).save(data := BytesIO(), "png")
        picture = pictures_of(folder, folder / "images").add(data.getvalue())
        turns = ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]},)
        ids = LETTERS.encode(render(turns, [], True), add_special_tokens=False).ids
        return Prompt("row", tuple(expanded(ids, [picture], vision_of(folder))), turns, pictures=(picture,))

    return of


def played(folder, *said, **options):
    seen: list = []
    samples = play_all(folder, TOOLS, *said, begins=begun(folder), seen=seen, **options)
    for _, tokens in samples:
        assert not tokens.action_mask[tokens.ids == IMAGE_TOKEN].any()
        positions(tokens.ids, tokens.pictures, vision_of(folder))  # it refuses another number of tokens
    return samples, seen


def sizes(pictures):
    return [(one.num_rows, one.num_columns) for one in pictures]


def test_each_call_has_the_images_of_all_turns_before(folder):
    samples, seen = played(folder, call("look", at=1), call("look", at=2), "done", template=KEEPS)
    [(sample, tokens)] = samples
    assert [sizes(pictures) for pictures in seen] == [[(4, 4)], [(4, 4), (2, 6)], [(4, 4), (2, 6), (4, 6)]]
    assert tokens.pictures == seen[-1] and sample.episode.num_tool_calls == 2
    assert sample.episode.patches == (16, 12, 24)
    assert int((tokens.ids == IMAGE_TOKEN).sum()) == 4 + 3 + 6
    content = tokens.conversation.turns[1]["content"]
    assert content == [{"type": "text", "text": "< |image_pad|>1"}, {"type": "image"}], "a text is no image"


@pytest.mark.parametrize("format", ["", "tiff", "png"])
def test_an_image_alone_is_the_observation(folder, format):
    [(_, tokens)], _ = played(folder, call("glance", format=format), "done", template=KEEPS)
    assert sizes(tokens.pictures) == [(4, 4), (2, 6)] and tokens.conversation.turns[1]["content"] == [{"type": "image"}]


def test_a_history_without_thoughts_has_all_images_again(folder):
    said = f"a</think>{call('look', at=1)}", f"b</think>{call('look', at=2)}", "c</think>done"
    samples, seen = played(folder, *said, template=DROPS_THOUGHTS, delimiter="</think>")
    assert len(samples) == 3
    for (_, tokens), pictures in zip(samples, seen, strict=True):
        assert tokens.pictures == pictures and np.count_nonzero(tokens.ids == IMAGE_TOKEN) in (4, 7, 13)


@pytest.mark.parametrize(
    ("at", "template", "told"),
    [
        (
            -1,
            KEEPS,
            r"an observation: turn 1, part 2: an image of [\d,]+ bytes cannot be read: they have no known format",
        ),
        (1, NO_IMAGES_OF_TOOLS, "an observation: the chat template wrote 0 image tokens for 1 images"),
    ],
)
def test_an_image_that_cannot_be_shown_is_a_fault(folder, at, template, told):
    samples, _ = played(folder, call("look", at=at), "done", template=template)
    assert samples[0][0].episode.fault.startswith("an observation") and re.match(told, samples[0][0].episode.fault)


@pytest.mark.parametrize(
    ("delimiter", "closing"), [(":", "<|image_pad|>:"), (":", "<|video_pad|>:"), ("<|image_pad|>", None)]
)
def test_no_text_that_ends_a_thought_stands_for_an_image(folder, delimiter, closing):
    thinking = {"thought_tokens": 4, "response_tokens": 4, "closing": closing}
    rollout = RolloutConfig.model_validate(
        {"max_response_tokens": 64, "delimiter": delimiter, "thinking": {k: v for k, v in thinking.items() if v}}
    )
    with pytest.raises(ValueError, match="may have no token that stands for images"):
        Budgets(folder, rollout, on_gpu=False)


def test_texts_share_the_limit_of_an_observation(folder):
    short = {"kind": "tools", "paths": [f"{__file__}:compare"], "max_observation_tokens": 4}
    [(_, tokens)] = play_all(folder, short, call("compare"), "done", template=KEEPS, begins=begun(folder))
    told = [part.get("text") for part in tokens.conversation.turns[1]["content"]]
    assert told == ["abc", None, "d [cut: the first 1 tokens of 4 characters]", None]


def test_a_model_of_text_is_shown_none(tmp_path, folder):
    for path in folder.glob("*token*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": LETTERS.token_to_id("<end>")}))
    [(sample, _)] = play_all(tmp_path, TOOLS, call("look", at=1), "done", template=KEEPS)
    assert "the model is trained as one of text" in sample.episode.fault
