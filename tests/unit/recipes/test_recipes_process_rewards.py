"""The task of process rewards by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.recipes.process_rewards.task import (
    DIGITS,
    demonstration,
    derivation,
    write_task,
)
from megatron_rl.rollout.programs.passages import split, token_texts

ROOT = Path(__file__).parents[3]
YAML = str(ROOT / "configs/run/process_rewards_tiny_cpu.yaml")
OPERANDS = st.integers(10 ** (DIGITS - 1), 10**DIGITS - 1)


def test_a_derivation_by_hand():
    """The example of the task."""
    columns, answer = derivation(48876, 53530, 5)
    assert columns == ["#6+0+0=6 ", "#7+3+0=10 ", "#8+5+1=14 ", "#8+3+1=12 ", "#4+5+1=10 "]
    assert answer == "102406"
    assert derivation(48876, 53530, 2) == (columns[:2], "102406")


@given(OPERANDS, OPERANDS, st.integers(0, DIGITS))
def test_without_slips_every_derivation_is_right(a, b, num_columns):
    columns, answer = derivation(a, b, num_columns)
    assert len(columns) == num_columns and int(answer) == a + b
    assert all(eval(column[1:].replace("=", "==")) for column in columns)


@given(OPERANDS, OPERANDS, st.integers(0, DIGITS), st.randoms())
def test_an_answer_follows_from_its_columns(a, b, num_columns, rng):
    columns, answer = derivation(a, b, num_columns, rng)
    copied = "".join(column[-2] for column in reversed(columns))
    assert answer.endswith(copied)
    carries = [int(column.split("+")[2].split("=")[0]) for column in columns]
    totals = [int(column.split("=")[1]) for column in columns]
    assert carries == [0, *(total // 10 for total in totals)][: len(carries)]


def test_demonstrations_are_rarely_right():
    rng = random.Random(0)
    written = [(a, b, demonstration(a, b, rng)) for a, b in [(48876, 53530)] * 4000]
    lengths = [text.count("#") for _, _, text in written]
    assert all(abs(lengths.count(n) / 4000 - 1 / (DIGITS + 1)) < 0.03 for n in range(DIGITS + 1))
    whole = [text for _, _, text in written if text.count("#") == DIGITS]
    right = sum(text.endswith("</think>102406") for text in whole)
    # A column is right with the probability 0.5 + 0.5 / 10, and a wrong carry may not be noticed in the answer.
    assert 0.02 < right / len(whole) < 0.1


def test_the_files_fit_the_configuration_and_columns_are_passages(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.recipes.tiny.model.write_random_qwen3", lambda *_, **__: None)
    write_task(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    heldout = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert (len(rows), len(heldout)) == (8000, 500)
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in heldout}
    config = load_config(GrpoRunConfig, [YAML]).rollout
    values = config.prefix_values
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert all(len(tokenizer.encode(row["prompt"])) <= config.max_prompt_tokens for row in rows)
    for line in (tmp_path / "demonstrations.jsonl").read_text().splitlines()[:100]:
        completion = json.loads(line)["completion"]
        assert len(tokenizer.encode(completion)) < config.max_response_tokens
        thought = completion.partition("</think>")[0]
        texts = token_texts(tokenizer.backend_tokenizer, tokenizer.encode(thought))
        passages = split(texts, values.markers, values.min_tokens, values.max_tokens)
        assert ["".join(texts[p.start : p.stop]) for p in passages] == [f"{column} " for column in thought.split()]
    assert len(tokenizer.encode("</think>" + "9" * (DIGITS + 1))) <= values.forced_tokens
