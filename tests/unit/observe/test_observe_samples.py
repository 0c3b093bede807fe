from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.observe import sample_choice
from megatron_rl.observe.sample_choice import add_explained, shown_samples
from megatron_rl.observe.samples import Pieces, advantage_of, answer_record, token_table
from megatron_rl.types import (
    Conversation,
    Denominators,
    Group,
    Picture,
    Prompt,
    Rollout,
    Share,
    TokenReward,
    TokenRewards,
    Tokens,
    Verdict,
)


class Bytes:
    """Each token is a byte of UTF-8; bytes that are no character become U+FFFD."""

    def decode(self, ids, *, skip_special_tokens):
        return bytes(ids).decode("utf-8", errors="replace")


class Words:
    """Each token is a word, and the space before the first one is removed, as Llama 2's tokenizer does."""

    def decode(self, ids, *, skip_special_tokens):
        return "".join(f" {chr(96 + i) * i}" for i in ids)[1:]


class Cleaning(Words):
    """It also changes what it has decoded, so that no single token is in the text."""

    def decode(self, ids, *, skip_special_tokens):
        return super().decode(ids, skip_special_tokens=skip_special_tokens)[::-1].upper()[: len(ids) // 2]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("ab", [1, 1]),
        ("aäb", [1, 0, 1, 1]),
        ("€😀", [0, 0, 1, 0, 0, 0, 1]),
        ("\N{REPLACEMENT CHARACTER}b", [0, 0, 0, 2]),  # it looks like a byte that is no character, until the next token
        ("", []),
    ],
)
def test_tokens_of_one_character_are_one_piece(text, lengths):
    assert Pieces(Bytes()).lengths(list(text.encode()), text) == lengths


def test_an_answer_may_end_inside_a_character_or_have_bytes_that_are_none():
    def lengths(ids):
        return Pieces(Bytes()).lengths(ids, Bytes().decode(ids, skip_special_tokens=False))

    assert lengths(list("a€".encode())[:-1]) == [1, 0, 1]
    assert lengths([97, 255, 98]) == [1, 0, 2]
    assert lengths([255] * 40) == ([0] * 15 + [16]) * 2 + [0] * 7 + [8]


@given(st.text(st.characters(exclude_characters="\N{REPLACEMENT CHARACTER}"), max_size=40), st.integers(0, 3))
def test_the_pieces_make_up_the_text(text, num_cut):
    ids = list(text.encode("utf-8", errors="ignore"))
    ids = ids[: len(ids) - num_cut]
    decoded = Bytes().decode(ids, skip_special_tokens=False)
    lengths = Pieces(Bytes()).lengths(ids, decoded)
    assert lengths is not None and len(lengths) == len(ids) and sum(lengths) == len(decoded)


def test_a_space_that_the_tokenizer_removes_from_a_single_token_belongs_to_it():
    assert Words().decode([1, 2, 1], skip_special_tokens=False) == "a bb a"
    assert Pieces(Words()).lengths([1, 2, 1], "a bb a") == [1, 3, 2]


def test_tokens_that_do_not_make_up_the_text_have_no_lengths():
    ids = [1, 2, 3] * 10
    assert Pieces(Cleaning()).lengths(ids, Cleaning().decode(ids, skip_special_tokens=False)) is None
    assert Pieces(Words()).lengths([1], "ab") is None


def answer(sampled: list[bool], logp: list[float], **of_rollout) -> tuple[Tokens, Rollout]:
    """A prompt of two tokens, and a response."""
    mask = np.array([False, False, *sampled])
    tokens = Tokens(
        np.arange(97, 97 + len(mask), dtype=np.int32),
        mask,
        np.array([0, 0, *logp], np.float32),
        np.where(mask, 4, -1).astype(np.int32),
    )
    return tokens, Rollout(len(mask), 2, sum(sampled), 0, "stop", **of_rollout)


def test_the_table_of_tokens():
    logp = [0.0, -0.004, -1.2345, float("-inf")]
    tokens, rollout = answer([False, True, True, True], logp, token_rewards=(TokenReward(3, "utility", 0.5),))
    assert token_table(tokens, rollout, [1, 1, 1, 1]) == {
        "lengths": [1, 1, 1, 1],
        "actions": [0, 1, 3],
        "versions": [(-1, 1), (4, 3)],
        "columns": {"logp_rollout": [0, 0, -123, None]},
        "rewards": [[1, "utility", 0.5]],
    }
    assert token_table(tokens, rollout, None) is None


def test_a_record_that_is_read_back_is_the_same_and_small():
    tokens, rollout = answer([True] * 1000, [-0.5] * 1000, verdict=Verdict(0.5, shaped=0.25, parts=(0.5,)))
    tokens.ids[:] = 120
    group = Group(Prompt("r:1", (1, 2), "q"), [rollout], None, 0)
    record = answer_record(group, 0, tokens, Pieces(Bytes()), "")
    text = json.dumps(record)
    again = json.loads(text)
    assert again["tokens"]["columns"] == {"logp_rollout": [-50] * 1000} and again["tokens"]["versions"] == [[4, 1000]]
    assert (again["answer"], again["shaped"], again["parts"]) == ("x" * 1000, 0.25, [0.5])
    assert len(text) < 10_000, "ten bytes for a token, its text included"


def test_images_have_the_number_of_the_turn_that_the_model_read_them_after():
    tokens, rollout = answer([True, True], [-0.5, -0.5])
    seen, own = [Picture(name, 2, 2) for name in "abc"], {"role": "assistant", "content": "x"}
    read = {"role": "tool", "content": [{"type": "text", "text": "y"}, {"type": "image"}]}
    said = Conversation((own, read, own, {"role": "tool", "content": "z"}, own, read, own))
    tokens = replace(tokens, pictures=tuple(seen), conversation=said)
    group = Group(Prompt("r:1", (1, 2), "q", pictures=(seen[0],)), [rollout], None, 0)
    assert answer_record(group, 0, tokens, Pieces(Bytes()), "")["images"] == [[0, "a"], [1, "b"], [3, "c"]]


def share(index: list[int], advantages: list[float]) -> Share:
    return Share(
        minibatches=(), denominators=(Denominators(1, 1),), alignment=1, version=0, names=[], index=np.array(index),
        advantages=np.array(advantages), weights=np.zeros(0), tokens=[],
    )  # fmt: skip


def test_an_answer_has_the_advantage_that_its_rank_trains_on():
    shares = [share([2, 0], [0.5, -1 / 3]), share([], [])]
    assert [advantage_of(place, shares) for place in range(3)] == [{"advantage": -0.333333}, {}, {"advantage": 0.5}]
    nothing = np.zeros(0)
    of_tokens = replace(shares[0], token_rewards=TokenRewards(nothing, nothing, nothing))
    assert advantage_of(0, [of_tokens]) == {}, "with a critic each token gets its own, and the share has 0"


def write(path, steps: list[int], size: int = 0) -> None:
    path.write_text("".join(json.dumps({"step": step, "n": n, "x": "x" * size}) + "\n" for n, step in enumerate(steps)))


def test_answers_are_left_out_evenly_over_the_steps(tmp_path, monkeypatch):
    path = tmp_path / "samples.jsonl"
    write(path, [step for step in range(8) for _ in range(3)])
    shown = shown_samples(path)
    assert [one["n"] for one in shown.samples] == list(range(24)) and shown.left_out == 0
    monkeypatch.setattr(sample_choice, "MOST_SAMPLES", 12)
    shown = shown_samples(path)
    assert [one["step"] for one in shown.samples] == [0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7] and shown.left_out == 12
    monkeypatch.setattr(sample_choice, "MOST_SAMPLES", 4)
    assert [one["step"] for one in shown_samples(path).samples] == [1, 3, 5, 7]


def test_long_answers_are_bounded_by_their_size_and_one_is_always_shown(tmp_path, monkeypatch):
    path = tmp_path / "samples.jsonl"
    write(path, [0, 1, 2, 3], size=1000)
    monkeypatch.setattr(sample_choice, "MOST_BYTES", 2100)
    shown = shown_samples(path)
    assert [one["step"] for one in shown.samples] == [1, 3] and shown.left_out == 2
    monkeypatch.setattr(sample_choice, "MOST_BYTES", 10)
    assert [one["step"] for one in shown_samples(path).samples] == [3]
    assert shown_samples(tmp_path / "none") == ([], 0)


def test_an_explained_step_gives_its_answers_the_numbers_of_their_tokens(tmp_path):
    (tmp_path / "explained").mkdir()
    told = [{"uid": "a", "index": 1, "tokens": {"logp": [-1.0], "loss": [0.5]}}, {"uid": "a", "index": 2, "tokens": {}}]
    (tmp_path / "explained" / "step_000003.json").write_text(json.dumps({"samples": told}))
    columns = {"logp_rollout": [-101]}
    samples = [
        {"step": step, "uid": "a", "index": index, "tokens": {"columns": dict(columns)}}
        for step, index in ((3, 1), (3, 0), (4, 1))
    ]
    samples.append({"step": 3, "uid": "a", "answer": "a record without tokens"})
    add_explained(samples, tmp_path)
    assert samples[0]["tokens"]["columns"] == {"logp_rollout": [-101], "logp": [-1.0], "loss": [0.5]}
    assert [sample["tokens"]["columns"] for sample in samples[1:3]] == [columns, columns]
