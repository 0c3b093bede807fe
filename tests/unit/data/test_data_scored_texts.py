"""The tokens that a reward model scores."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_data_demonstrations import template, tokenizer_of

from megatron_rl.config.preferences import BradleyTerryLoss
from megatron_rl.data.preferences import load_preferences
from megatron_rl.data.rows import BadRow, LongRow
from megatron_rl.data.scored_texts import scored_ids, scored_reader
from megatron_rl.data.tokenizer import padding_id

ASKED = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(template("{{ m.content }}<end>") + "\n")


def said(text):
    return {"role": "assistant", "content": text}


def test_a_chat_has_the_tokens_of_the_template_to_its_end(tokenizer):
    expected = tokenizer.apply_chat_template([ASKED, said("good")], return_dict=False)
    for completion in ([said("good")], "good"):
        ids = scored_ids(tokenizer, {"prompt": [ASKED], "completion": completion}, None)
        assert ids == expected


def test_a_text_ends_with_the_end_of_sequence_unless_this_is_the_padding(tokenizer):
    row, end = {"prompt": "1+1=", "completion": "2"}, tokenizer.eos_token_id
    plain = tokenizer("1+1=2", add_special_tokens=False)["input_ids"]
    assert scored_ids(tokenizer, row, None) == [*plain, end]
    ended = {**row, "completion": f"2{tokenizer.eos_token}"}
    assert scored_ids(tokenizer, ended, None) == [*plain, end]
    assert scored_ids(tokenizer, row, end) == plain  # transformers reads the last token that is no padding


def test_a_pair_shares_the_beginning_and_may_have_a_margin(tokenizer, tmp_path):
    rows = [{"prompt": "1+1=", "chosen": "20", "rejected": "21"}, {"prompt": "1=", "chosen": "1", "rejected": "11"}]
    rows[0]["margin"] = 0.5
    rows.append({"chosen": "1=1", "rejected": "1=2"})  # the prompt is in both texts
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, _ = load_preferences(tmp_path / "rows.jsonl", scored_reader(tokenizer, None, 99), BradleyTerryLoss(), 99)
    assert [row.logp_reference for row in found] == [(0.5, 0.5), (0.0, 0.0), (0.0, 0.0)]
    texts = [[tokenizer.decode(one.ids[one.action_mask]) for one in row.samples] for row in found]
    assert texts == [["0<doc>", "1<doc>"], ["<doc>", "1<doc>"], ["1<doc>", "2<doc>"]]
    for row in found:
        chosen, rejected = (one.ids[~one.action_mask] for one in row.samples)
        assert np.array_equal(chosen, rejected)


@pytest.mark.parametrize("margin", [True, "1", float("inf")])
def test_a_margin_is_a_finite_number(tokenizer, tmp_path, margin):
    row = {"prompt": "1+1=", "chosen": "20", "rejected": "21", "margin": margin}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match="`margin` is"):
        load_preferences(tmp_path / "rows.jsonl", scored_reader(tokenizer, None, 99), BradleyTerryLoss(), 99)


def test_rows_that_are_too_long_or_of_one_token_are_bad(tokenizer):
    with pytest.raises(LongRow, match="reward_model.max_tokens is 4"):
        scored_reader(tokenizer, None, 4)({"prompt": "1+1=", "completion": "2"})
    with pytest.raises(BadRow, match="1 tokens"):
        scored_reader(tokenizer, tokenizer.eos_token_id, 9)({"prompt": "1", "completion": ""})


@pytest.mark.parametrize(
    ("of_tokenizer", "config", "expected"),
    [
        ({"pad_token": "<pad>"}, {"pad_token_id": 5, "eos_token_id": 6}, 3),
        ({"pad_token": {"content": "<pad>"}}, {}, 3),
        ({"added_tokens_decoder": {"8": {"content": "<p>"}}, "pad_token": "<p>"}, {}, 8),
        ({}, {"pad_token_id": 5, "eos_token_id": 6}, 5),
        ({}, {"eos_token_id": [6, 7]}, 6),
        ({}, {}, None),
    ],
)
def test_the_padding_token_is_the_tokenizers_or_else_the_models(tmp_path, of_tokenizer, config, expected):
    added = {"added_tokens": [{"id": 3, "content": "<pad>"}]}
    for name, content in (("tokenizer_config", of_tokenizer), ("config", config), ("tokenizer", added)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert padding_id(tmp_path) == expected
