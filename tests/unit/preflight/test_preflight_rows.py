"""Rows that a run cannot read, place or score are named by file and line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from run_home import GOOD, TEMPLATE, faults, grpo, rows, sft

from megatron_rl.config.load import validate
from megatron_rl.config.schema import RewardModelRunConfig
from megatron_rl.data import ItemSource, ShuffledStream
from megatron_rl.preflight import rows as rows_module
from megatron_rl.preflight.checks import preflight


def test_rows_of_a_reward_model_are_checked_for_margins_and_reasoning(home):
    """A run scores the text after the reasoning, so a model that was trained with it would read other texts."""
    merged = {
        "run": {"name": "scorer", "steps": 1},
        "model": {"path": "model"},
        "reward_model": {"rows": "pairs.jsonl"},
    }
    config, notes = validate(RewardModelRunConfig, merged), []
    plain = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    rows("pairs.jsonl", plain)
    assert rows_module.faults_of_rows(config, None, notes.append) == notes == []
    rows("pairs.jsonl", plain, plain | {"chosen": "<think>1</think>2"})
    assert rows_module.faults_of_rows(config, None, notes.append) == []
    [note] = notes
    assert "</think> is in an answer of 1 row, such as pairs.jsonl:2" in note
    rows("pairs.jsonl", plain | {"margin": "big"})
    [fault] = rows_module.faults_of_rows(config, None, notes.append)
    assert "`margin` is 'big'" in fault


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, '{"prompt": "1+'], "data.train: train.jsonl:2: the row is not JSON"),
        ([GOOD, {"question": "1+1="}], "train.jsonl:2: a row must have either `messages` (chat turns) or `prompt`"),
        ([GOOD, {"prompt": "1"}], "train.jsonl:2: column `ground_truth` is missing; the configured rewards need it"),
        ([{"prompt": "123456789", "ground_truth": 1}], "the prompt has 9 tokens, rollout.max_prompt_tokens is 8"),
        ([" "], "data.train: train.jsonl holds no row"),
        (["{", "{", GOOD], "train.jsonl:1: the row is not JSON"),
        (["{", "{", GOOD], "(2 of 3 rows that were checked are bad); correct it, or set data.on_bad_row to skip"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(home, lines, message):
    rows("train.jsonl", *lines)
    [fault] = faults(grpo())
    assert message in fault


def test_an_estimator_of_pass_rates_needs_the_column(home):
    rows("train.jsonl", {**GOOD, "pass_rate": 0.5}, GOOD)
    algorithm = {"adv_estimator": {"kind": "a2po"}, "loss": {"kind": "a2po"}}
    [fault] = faults(grpo(algorithm=algorithm))
    assert "train.jsonl:2: `pass_rate` must be a number from 0 to 1, but it is None" in fault


def test_rows_that_will_be_skipped_are_counted(home):
    rows("train.jsonl", GOOD, "{", {"prompt": "123456789", "ground_truth": 1})
    notes = []
    assert preflight(grpo(data__on_bad_row="skip"), notes.append) == []
    assert len(notes) == 1 and notes[0].startswith("data.train: 2 of 3 rows of train.jsonl will be skipped; the first")
    rows("train.jsonl", "{")
    assert "no good row is left" in faults(grpo(data__on_bad_row="skip"))[0]


def test_missing_files(home):
    (home / "train.jsonl").unlink()
    (home / "eval.jsonl").unlink()
    (home / "eval.jsonl").mkdir()
    found = faults(grpo())
    assert ["data.train: there is no file train.jsonl" in found[0], "data.eval: there is no file" in found[1]] == [1, 1]


def test_every_source_of_a_mixture_is_checked_as_the_run_reads_it(home):
    rows("more.jsonl", {"question": "1+1=", "answer": "2"})
    more = {"path": "more.jsonl", "weight": 1, "columns": {"prompt": "question", "ground_truth": "answer"}}
    first = {"path": "train.jsonl", "weight": 3, "name": "sums"}
    rewards = [{"kind": "exact_answer", "datasets": ["sums", "more"]}]
    rows("train.jsonl", GOOD)
    notes = []
    assert preflight(grpo(data__train=[first, more], data__eval=None, rewards=rewards), notes.append) == []
    assert notes == []
    [fault] = faults(grpo(data__train=[first, {"path": "more.jsonl", "weight": 1}]))
    assert fault.startswith("data.train.1: more.jsonl:1: a row must have either `messages` (chat turns) or `prompt`")
    assert (
        "data.train.1: there is no file gone.jsonl"
        in faults(grpo(data__train=[first, more | {"path": "gone.jsonl"}]))[0]
    )
    [fault] = faults(grpo(data__train=[first, more | {"weight": 0.12345678}]))
    assert fault.startswith("data.train: the shares {'sums': 3.0, 'more': 0.12345678} of the sources repeat only after")


def test_when_the_time_is_up_the_number_of_checked_rows_is_told(home, monkeypatch):
    monkeypatch.setattr(rows_module, "ROWS_S", -1.0)
    rows("train.jsonl", *[GOOD] * 150, "{")
    notes = []
    assert preflight(grpo(), notes.append) == []
    assert notes == [
        "data.train: the first 100 rows of train.jsonl were checked, the others were left out to save time"
    ]


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("two", "ground_truth 'two' holds no number"),
        ([2, 3], "the exact_answer reward needs one ground truth, but the row has [2, 3]"),
    ],
)
def test_a_row_that_cannot_be_scored_is_an_abstention_or_a_fault(home, truth, message):
    rows("train.jsonl", GOOD, {"prompt": "1", "ground_truth": truth})
    reward = {"kind": "exact_answer", "answer": "last_number"}
    notes = []
    assert preflight(grpo(rewards=[reward]), notes.append) == []
    assert len(notes) == 1 and "1 of the rows will have no reward" in notes[0] and message in notes[0]
    assert f"train.jsonl:2: {message}" in faults(grpo(rewards=[{**reward, "on_error": "stop"}]))[0]


def test_rows_of_other_forms_are_read_as_the_run_reads_them(home):
    rows("train.jsonl", {"prompt": [{"role": "user", "content": "1+1="}], "data_source": "sums", "reward_model": {}})
    assert "column `ground_truth` is missing" in faults(grpo())[0]
    (home / "model" / "chat_template.jinja").write_text("{% if short %}{{ messages | length }}{% endif %}" + TEMPLATE)
    verl = {
        "prompt": [{"role": "user", "content": "1+1="}],
        "data_source": "sums",
        "reward_model": {"ground_truth": "2"},
    }
    rows("train.jsonl", verl)
    rewards = [{"kind": "exact_answer", "datasets": ["sums"]}]
    notes = []
    assert preflight(grpo(data__eval=None, rewards=rewards), notes.append) == []
    assert [note.split(":")[:2] for note in notes] == [
        ["data.train", " 1 of the rows that were checked is in verl's form"]
    ]
    longer = grpo(data__eval=None, rewards=rewards, data__chat_template={"short": True}, rollout__max_prompt_tokens=6)
    assert "the prompt has 7 tokens" in faults(longer)[0]
    rows("train.jsonl", {"question": "1+1=", "answer": "2"})
    columns = {"prompt": "question", "ground_truth": "answer"}
    assert faults(grpo(data__eval=None, data__columns=columns)) == []
    Path("train.jsonl").rename("train.parquet")
    assert "train.parquet cannot be read as parquet" in faults(grpo(data__eval=None, data__train="train.parquet"))[0]


CHAT = {"messages": [{"role": "user", "content": "1+1="}], "ground_truth": "2"}


CALLS_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% for name, value in call.function.arguments | items %}{{ name }}{% endfor %}{% endfor %}{% endfor %}"
)


CALL = {"type": "function", "function": {"name": "area", "arguments": '{"w": 6}'}}


CALLED = {
    "messages": [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "42"},
    ],
    "ground_truth": "42",
}


@pytest.mark.parametrize(
    ("template", "line", "message"),
    [
        (None, CHAT, "has no chat template, and rows have `messages`"),
        (TEMPLATE, CHAT | {"messages": [{"role": "system", "content": "1"}]}, "refuses `messages`: no system turns"),
        (TEMPLATE, CHAT | {"messages": [{"role": "user", "content": "1234567"}]}, "the prompt has 9 tokens"),
        (TEMPLATE, CHAT, None),
        ("{{ 1 + messages[0].content }}", CHAT, "train.jsonl:1: the chat template fails on this row: TypeError"),
        (
            CALLS_TEMPLATE,
            CALLED,
            "the chat template fails on this row: TypeError: .*; the arguments of a tool call are text, and this",
        ),
        (
            CALLS_TEMPLATE.replace(" | items", ".items()"),
            CALLED,
            "fails on this row: UndefinedError: 'str object' has no attribute 'items'; the arguments of a tool call",
        ),
    ],
)
def test_chats_go_through_the_template(home, template, line, message):
    if template:
        (home / "model" / "chat_template.jinja").write_text(template)
    rows("train.jsonl", line)
    found = faults(grpo())
    assert found == [] if message is None else re.search(message, found[0])


def test_a_template_of_transformers_own_tags_is_left_to_transformers(home):
    (home / "model" / "chat_template.jinja").write_text("{% generation %}{% endgeneration %}")
    rows("train.jsonl", CHAT | {"messages": [{"role": "user", "content": "1" * 99}]})
    notes = []
    assert preflight(grpo(), notes.append) == []
    assert "can be rendered by transformers alone" in notes[0]


def test_a_template_with_an_error_is_a_fault_with_its_line(home):
    (home / "model" / "chat_template.jinja").write_text("{{ messages }}\n{% if %}")
    rows("train.jsonl", CHAT)
    assert faults(grpo()) == [
        "model.path: the chat template has an error in line 2: Expected an expression, got 'end of statement block'"
    ]


def test_a_data_set_that_no_row_has_is_told(home):
    notes = []
    reward = {"kind": "exact_answer", "datasets": ["gsm8k", "maht"]}
    rows("train.jsonl", {"prompt": "1", "ground_truth": "1", "dataset": "gsm8k"})
    assert preflight(grpo(rewards=[reward]), notes.append) == []
    assert "rewards: no row that was checked has the `dataset` 'maht', which `datasets` there names" in notes


def test_a_row_without_its_thinking_budget_is_named(home):
    rows("train.jsonl", *({"prompt": "1", "ground_truth": "2", "n": n} for n in (3, 9)))
    tokens = {"kind": "column", "name": "n", "high": 8}
    section = {"thought_tokens": tokens, "response_tokens": 4}
    [fault] = faults(grpo(rollout__thinking=section, rollout__delimiter="end", data={"train": "train.jsonl"}))
    assert "train.jsonl:2: column `n` has 9, but rollout.thinking.thought_tokens needs an integer from 0 to 8" in fault


@pytest.mark.parametrize(
    ("num_rows", "on_bad_row", "told"),
    [(3, "fail", None), (4, "fail", "4 rows"), (1, "fail", "1 row"), (4, "skip", None), (2, "skip", "2 rows")],
)
def test_rows_that_came_or_went_since_the_checkpoint_are_told_with_their_numbers(home, num_rows, on_bad_row, told):
    folder = home / "runs" / "warm" / "checkpoints" / "step_000002"
    folder.mkdir(parents=True)
    config = sft(on_bad_row=on_bad_row)
    state = ShuffledStream({"sft.rows": ItemSource(range(3))}, 2, 0).state()
    (folder / "extra.json").write_text(json.dumps({"config": config.model_dump(mode="json"), "stream": state}))
    rows("rows.jsonl", *[{"prompt": "1+1=", "completion": "2"}] * num_rows)
    assert faults(config, resume=2) == faults(config, resume="auto")
    assert faults(config, resume="auto", planning=True) == (
        [
            f"sft.rows: rows.jsonl has {told}, and at runs/warm/checkpoints/step_000002 it had 3, so the run cannot go "
            "on in the order of then; give the rows of then, or begin a run with another run.name and, as model.path, "
            "what `megatron-rl export runs/warm FOLDER` writes"
        ]
        if told
        else []
    )
    assert faults(config, resume="auto") == faults(config, resume="auto", planning=True)


def test_rows_of_the_hub_are_asked_for_before_a_run(home, monkeypatch):
    """Without the package `datasets`, and with one that knows no data set."""
    mixture = [{"path": "train.jsonl", "weight": 1}, {"path": "hf://owner/name", "weight": 1}]
    named = grpo(data__train=mixture)
    monkeypatch.setattr("megatron_rl.preflight.rows.find_spec", lambda name: None)
    [fault] = faults(named)
    assert fault.startswith("data.train.1: the rows of hf://owner/name can only") and "pip install datasets" in fault
    assert faults(grpo()) == faults(named, planning=True) == [], "a plan may be made elsewhere"
    monkeypatch.setattr("megatron_rl.preflight.rows.find_spec", lambda name: "found")

    def unknown(source: str) -> None:
        raise ValueError(f"{source} cannot be loaded")

    monkeypatch.setattr("megatron_rl.preflight.rows.check_hub", unknown)
    assert faults(named) == ["data.train.1: hf://owner/name cannot be loaded"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1+1=", "completion": "234"}, None),
        ({"prompt": "1+1=", "completion": "2345"}, "the row has 9 tokens, but sft.max_tokens is 8"),
        ({"prompt": "1+1=", "completion": "234<eos>"}, None),
        ({"prompt": "1"}, "`completion` must be text"),
        ({"messages": [{"role": "user", "content": "1"}]}, "must end with a turn of the role assistant"),
        ({"messages": [{"role": "assistant", "content": "1234567"}]}, "the prompt has no tokens: turn 1 is the assist"),
    ],
)
def test_supervised_rows(home, row, message):
    (home / "model" / "chat_template.jinja").write_text(TEMPLATE)
    rows("rows.jsonl", {"prompt": "1", "completion": "2"}, row)
    found = faults(sft())
    assert found == [] if message is None else "rows.jsonl:2" in found[0] and message in found[0]
