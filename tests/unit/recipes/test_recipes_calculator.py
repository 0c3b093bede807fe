"""The calculator that a model learns to call, and its task."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data import Rules, load_prompts
from megatron_rl.environments import Sessions
from megatron_rl.preflight.environment_source import faults_of_environment
from megatron_rl.preflight.row_sources import training_sources
from megatron_rl.preflight.tokenizer_files import TokenizerFiles
from megatron_rl.recipes.calculator.task import call, demonstration, write_model
from megatron_rl.recipes.calculator.tools import computed

ROOT = Path(__file__).parents[3]


@given(
    st.recursive(
        st.integers(0, 999).map(str),
        lambda inner: st.builds("({}{}{})".format, inner, st.sampled_from("+-*"), inner),
        max_leaves=8,
    )
)
def test_the_calculator_computes_what_python_does(expression):
    assert computed(expression) == eval(expression)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("2**9", "2 \\*\\* 9 is not allowed"),
        ("1/2", "1 / 2 is not allowed"),
        ("len('a')", "is not allowed: only integers"),
        ("True*2", "True is not allowed"),
        ("().__class__", "is not allowed"),
        ("3*", "'3\\*' is no expression"),
        ("9" * 101, "has 101 characters, and 100 are allowed"),
    ],
)
def test_the_calculator_computes_nothing_else(expression, message):
    with pytest.raises(ValueError, match=message):
        computed(expression)


def test_a_call_of_the_demonstrations_is_one_of_the_tool():
    rng = random.Random(0)
    written = [demonstration(123, 456, rng) for _ in range(200)]
    called = [turns for turns in written if "tool_call" in turns[0]["content"]]
    assert 40 < len(called) < 80, "three of ten"
    whole = next(turns for turns in called if len(turns) == 3 and call("123*456") == turns[0]["content"])
    cfg = load_config(GrpoRunConfig, [str(ROOT / "configs/run/calculator_tiny_cpu.yaml")])
    session = Sessions(cfg.rollout.environment, "").new()
    assert asyncio.run(session.react(whole[0]["content"])).messages[0]["content"] == whole[1]["content"] == "56088"


def test_the_model_fits_the_configuration_and_the_prompt_offers_the_tool(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.recipes.calculator.task.write_random_qwen3", lambda *_, **__: None)
    write_model(tmp_path, seed=0)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    rows = tmp_path / "train.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "123*456"}], "ground_truth": "56088"}) + "\n")
    yaml = str(ROOT / "configs/run/calculator_tiny_cpu.yaml")
    cfg = load_config(GrpoRunConfig, [yaml, f"model.path={tmp_path}", f"data.train={rows}"])
    assert faults_of_environment(cfg, TokenizerFiles(tmp_path), print) == []

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    [source] = training_sources(cfg.data, cfg.rollout.environment)
    [prompt] = load_prompts(rows, tokenizer, Rules(cfg.rollout.max_prompt_tokens), source.reading)
    assert tokenizer.decode(prompt.token_ids) == "[calculator]<user>123*456<end><assistant>"
    [unoffered] = load_prompts(rows, tokenizer, Rules(cfg.rollout.max_prompt_tokens))
    assert tokenizer.decode(unoffered.token_ids) == "<user>123*456<end><assistant>"
    assert len(tokenizer.encode(call("123*456"))) == 7 + 6
