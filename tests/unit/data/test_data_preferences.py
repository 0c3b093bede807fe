"""Rows of preferences: what becomes of each form, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_data_demonstrations import template, tokenizer_of

from megatron_rl.config.preferences import DpoLoss, KtoLoss
from megatron_rl.data.preferences import load_preferences
from megatron_rl.data.supervised import demonstration_reader

ASKED, GOOD, POOR = (
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "good day"},
    {"role": "assistant", "content": "what"},
)
DPO, KTO = DpoLoss(), KtoLoss()


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(template("{{ m.content }}<end>"))


@pytest.fixture
def load(tmp_path, tokenizer):
    def load(*rows, loss=DPO, max_tokens=999, on_bad_row="fail"):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        read = demonstration_reader(tokenizer, max_tokens, ("<end>",), section="dpo", is_cut=on_bad_row == "cut")
        return load_preferences(path, lambda row: read(row)[0], loss, max_tokens, on_bad_row)

    return load


def texts(tokenizer, tokens) -> tuple[str, str]:
    """The text that is given, and the text that is trained."""
    given = tokenizer.decode(tokens.ids[~tokens.action_mask])
    return given, tokenizer.decode(tokens.ids[tokens.action_mask])


@pytest.mark.parametrize(
    ("row", "given", "answers"),
    [
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, "1+1=", ("2<doc>", "3<doc>")),
        (
            {"prompt": [ASKED], "chosen": [GOOD], "rejected": [POOR]},
            "<u>hi there<end><a>",
            ("good day<end>", "what<end>"),
        ),
        (
            {"prompt": [ASKED], "chosen": "good day", "rejected": "what"},
            "<u>hi there<end><a>",
            ("good day<end>", "what<end>"),
        ),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, POOR]}, "<u>hi there<end><a>", ("good day<end>", "what<end>")),
        (
            {"prompt": "hi there", "chosen": [ASKED, GOOD], "rejected": [ASKED, POOR], "score_chosen": 9.0},
            "<u>hi there<end><a>",
            ("good day<end>", "what<end>"),
        ),
        (
            {"chosen": [ASKED, GOOD, ASKED, GOOD], "rejected": [ASKED, GOOD, ASKED, POOR]},
            "<u>hi there<end><a>good day<end><u>hi there<end><a>",
            ("good day<end>", "what<end>"),
        ),
        (
            {"prompt": [ASKED], "chosen": [ASKED, GOOD], "rejected": [ASKED, POOR]},
            "<u>hi there<end><a>",
            ("good day<end>", "what<end>"),
        ),
        (
            {"prompt": "hi", "messages": [ASKED, GOOD], "chosen": [ASKED, GOOD], "rejected": [ASKED, POOR]},
            "<u>hi there<end><a>",
            ("good day<end>", "what<end>"),
        ),
        (
            {"prompt": json.dumps([ASKED]), "chosen": json.dumps([GOOD]), "rejected": json.dumps([POOR])},
            "<u>hi there<end><a>",
            ("good day<end>", "what<end>"),
        ),
    ],
)
def test_each_form_of_a_pair_has_one_prompt_and_two_answers(load, tokenizer, row, given, answers):
    [pair], num_skipped = load(row)
    assert num_skipped == 0 and pair.labels == (1.0, -1.0) and pair.name.endswith("rows.jsonl:1")
    assert [texts(tokenizer, tokens) for tokens in pair.samples] == [(given, answer) for answer in answers]


def test_rows_for_kto_have_the_answer_of_the_next_row_with_another_prompt(load, tokenizer):
    rows, _ = load(
        {"prompt": "1+1=", "completion": "2", "label": True},
        {"prompt": "1+1=", "completion": "3", "label": False},
        {"prompt": "4+4=", "chosen": "8", "rejected": "77"},
        loss=KTO,
    )
    assert [row.labels for row in rows] == [(1.0, 0.0), (-1.0, 0.0), (1.0, 0.0), (-1.0, 0.0)]
    assert [row.name.partition(":")[2] for row in rows] == ["1", "2", "3, chosen", "3, rejected"]
    assert [texts(tokenizer, row.samples[0])[1] for row in rows] == ["2<doc>", "3<doc>", "8<doc>", "77<doc>"]
    assert [texts(tokenizer, row.samples[1]) for row in rows] == [
        ("1+1=", "8<doc>"),
        ("1+1=", "8<doc>"),
        ("4+4=", "2<doc>"),
        ("4+4=", "2<doc>"),
    ]


def test_a_joined_answer_is_cut_at_the_largest_length(load):
    long, short = {"prompt": "123456=", "completion": "1"}, {"prompt": "1=", "completion": "123456"}
    rows, _ = load(long | {"label": True}, short | {"label": True}, loss=KTO, max_tokens=9)
    assert [len(row.samples[1].ids) for row in rows] == [9, 4]
    assert all(np.array_equal(row.samples[1].version, np.full(len(row.samples[1].ids), -1)) for row in rows)


@pytest.mark.parametrize(
    ("row", "loss", "told"),
    [
        ({"prompt": "1", "completion": "2"}, DPO, "no `chosen`"),
        ({"prompt": "1", "chosen": "2"}, DPO, "no `rejected`"),
        ({"chosen": "H: 1 A: 2", "rejected": "H: 1 A: 3"}, DPO, "no `prompt`"),
        ({"chosen": [GOOD], "rejected": [POOR]}, DPO, "no prompt in common"),
        ({"prompt": "1", "chosen": "2", "rejected": "2"}, DPO, "are the same, so that nothing"),
        ({"prompt": "1", "chosen": "2", "rejected": ""}, DPO, "`rejected` is empty"),
        ({"prompt": [GOOD], "chosen": [ASKED, GOOD], "rejected": [ASKED, POOR]}, DPO, "`chosen` begins with a turn of"),
        ({"prompt": "1", "completion": "2", "label": 1}, KTO, "`label` is 1; it is true"),
        ({"prompt": "1", "completion": "2"}, KTO, "`label`, which is true or false"),
        ({"prompt": "1", "chosen": "2", "rejected": "3" * 999}, DPO, "but dpo.max_tokens is 999"),
    ],
)
def test_a_bad_row_is_told_with_its_place(load, row, loss, told):
    with pytest.raises(ValueError, match=told) as error:
        load(row, loss=loss)
    assert "rows.jsonl" in str(error.value)


def test_kto_needs_two_rows_and_bad_rows_may_be_skipped(load):
    with pytest.raises(ValueError, match="has 1 row, and kto compares"):
        load({"prompt": "1", "completion": "2", "label": True}, loss=KTO)
    rows, num_skipped = load({"prompt": "1"}, {"prompt": "1", "chosen": "2", "rejected": "3"}, on_bad_row="skip")
    assert len(rows) == num_skipped == 1


def test_long_answers_are_cut_and_pairs_that_become_equal_are_left_out(load, tokenizer):
    rows = [
        {"prompt": "12", "chosen": "3456", "rejected": "3956"},
        {"prompt": "12", "chosen": "345", "rejected": "346"},
    ]
    [pair], skipped = load(*rows, max_tokens=4, on_bad_row="cut")
    assert [texts(tokenizer, one) for one in pair.samples] == [("12", "34"), ("12", "39")] and skipped == 1
