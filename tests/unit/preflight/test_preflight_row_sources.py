from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import DataConfig, GrpoRunConfig
from megatron_rl.data.forms import Reading
from megatron_rl.preflight.row_sources import RowSource, heldout_source, training_sources


def test_a_single_source_has_the_reading_of_the_section():
    data = DataConfig(train="a.jsonl", eval="b.jsonl", columns={"messages": "question"}, system_prompt="Think.")
    reading = Reading({"messages": "question"}, "Think.")
    assert training_sources(data) == [RowSource("data.train", "data.train", data.train, reading)]
    assert heldout_source(data) == RowSource("data.eval", "data.eval", data.eval, reading)
    assert heldout_source(DataConfig(train="a.jsonl")) is None


def test_a_source_of_a_mixture_replaces_the_reading_of_the_section():
    data = DataConfig(
        train=[
            {"path": "a.jsonl", "count": 200},
            {"path": "b.jsonl", "count": 100, "name": "code", "columns": {}, "chat_template": {"short": True}},
        ],
        columns={"messages": "question"},
        system_prompt="Think.",
    )
    first, second = training_sources(data)
    assert (first.key, first.name, first.share) == ("data.train.0", "a", 2)
    assert first.reading == Reading({"messages": "question"}, "Think.", dataset="a")
    assert (second.key, second.name, second.share) == ("data.train.1", "code", 1)
    assert second.reading == Reading({}, "Think.", {"short": True}, "code")


@pytest.fixture
def environment():
    """A recipe sets variables when it is imported."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def tokenizer():
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate("?sumcode01234")}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?")


def test_easy_prompts_come_first_and_rates_that_changed_are_told(environment, tokenizer, tmp_path, monkeypatch):
    from megatron_rl.commands.grpo import read_prompts

    monkeypatch.chdir(tmp_path)

    def stream(**rates):
        rows = [{"prompt": name, "ground_truth": 0, "pass_rate": rate} for name, rate in rates.items()]
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        keys = ["data.train=rows.jsonl", "data.eval=null", "rollout.prompts_per_step=4", "data.easy_first_epochs=1"]
        return read_prompts(load_config(GrpoRunConfig, ["configs/run/tiny_grpo.yaml", *keys]), tokenizer).train

    first = stream(s=0.25, u=0, m=1, c=0.5)
    assert "".join(prompt.messages for prompt in first.next()) == "mcsu"
    with pytest.raises(ValueError, match="names, tokens or pass rates have changed"):
        stream(s=0.25, u=0, m=1, c=0.75).restore(first.state())
    for wrong in (None, "easy", 62.5, float("nan")):
        with pytest.raises(ValueError, match="rows.jsonl:2: `pass_rate`.*from 0 to 1"):
            stream(s=0.25, u=wrong)


def test_a_mixture_becomes_a_stream_in_its_shares(environment, tokenizer, tmp_path, monkeypatch, capsys):
    from megatron_rl.commands.grpo import read_prompts

    monkeypatch.chdir(tmp_path)
    for name, count in {"sums": 5, "code": 2}.items():
        rows = [{"prompt": f"{name}{i}", "ground_truth": i} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    train = "[{path: sums.jsonl, weight: 0.75}, {path: code.jsonl, weight: 0.25}]"
    keys = [f"data.train={train}", "data.eval=sums.jsonl", "eval.num_prompts=2", "rollout.prompts_per_step=8"]
    config = load_config(GrpoRunConfig, ["configs/run/tiny_grpo.yaml", *keys, f"data.cache={tmp_path / 'cache'}"])
    prompts = read_prompts(config, tokenizer)
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        f"data.{key}: {rows}"
        for key, rows in {
            "train.0": "sums.jsonl: 5 rows",
            "train.1": "code.jsonl: 2 rows",
            "eval": "sums.jsonl: 5 rows",
        }.items()
    ]
    step = prompts.train.next()
    assert Counter(prompt.columns["dataset"] for prompt in step) == {"sums": 6, "code": 2}
    assert {prompt.uid for prompt in step if prompt.columns["dataset"] == "code"} == {
        "code/code.jsonl:1",
        "code/code.jsonl:2",
    }
    assert [prompt.uid for prompt in prompts.heldout] == ["sums.jsonl:1", "sums.jsonl:2"]
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_the_run_refuses_rows_with_which_no_object_can_begin(environment, tokenizer, tmp_path):
    from megatron_rl.commands.grpo import read_prompts

    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    question = {"messages": [{"role": "user", "content": "sum"}], "ground_truth": "1"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(question | {'at': 1})}\n{json.dumps(question)}\n")
    objects = f"{Path(__file__).parents[1]}/rollout/some_objects.py:Breaks"
    keys = [f"data.train={tmp_path}/rows.jsonl", "data.eval=null", "rollout.delimiter=''"]
    keys += [f"rollout.environment={{kind: tools, objects: '{objects}'}}", "data.deduplicate=true"]
    with pytest.raises(ValueError, match="rows.jsonl:2.*rollout.environment.objects.*'at'"):
        read_prompts(load_config(GrpoRunConfig, ["configs/run/tiny_grpo.yaml", *keys]), tokenizer)
