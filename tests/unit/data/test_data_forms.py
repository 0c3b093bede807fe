"""Rows as TRL, verl and open-instruct document them, and as a person would read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import DataConfig, GrpoRunConfig
from megatron_rl.data.forms import Reading, recognise
from megatron_rl.data.rows import BadRow, FilledRow

USER = {"role": "user", "content": "How many clips did Natalia sell altogether?"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0, "answer": "48 + 24 = 72 #### 72"},
}
CASES = [
    (
        {"messages": [USER], "ground_truth": "72", "level": 2},
        {},
        "messages",
        (USER,),
        {"ground_truth": "72", "level": 2},
    ),
    ({"prompt": "48 + 24 =", "ground_truth": 72}, {}, "text", "48 + 24 =", {"ground_truth": 72}),
    # TRL: a prompt of chat turns, and any columns for the reward functions.
    ({"prompt": [USER], "solution": "72"}, {}, "TRL", (USER,), {"solution": "72"}),
    # open-instruct: a row of two data sets, and a row of one as it was stored before there were lists.
    (
        {"messages": [USER], "ground_truth": ["72", "no commas"], "dataset": ["gsm8k", "ifeval"]},
        {},
        "messages",
        (USER,),
        {"ground_truth": ["72", "no commas"], "dataset": ["gsm8k", "ifeval"]},
    ),
    (
        VERL,
        {},
        "verl",
        (USER,),
        {"ground_truth": "72", "dataset": "openai/gsm8k"} | {k: VERL[k] for k in VERL if k != "prompt"},
    ),
    # A column of the row's own goes before what verl's form fills in.
    (
        {"prompt": [USER], "data_source": "a", "reward_model": {"ground_truth": "1"}, "dataset": "b"},
        {},
        "verl",
        (USER,),
        {"data_source": "a", "reward_model": {"ground_truth": "1"}, "dataset": "b", "ground_truth": "1"},
    ),
    # Parquet fills the columns that other rows of the file have with None.
    (
        {"messages": None, "prompt": [USER], "data_source": None, "reward_model": None, "solution": "72"},
        {},
        "TRL",
        (USER,),
        {"messages": None, "data_source": None, "reward_model": None, "solution": "72"},
    ),
    (
        {"conversation": [USER], "answer": "72", "source": "gsm8k"},
        {"messages": "conversation", "ground_truth": "answer", "dataset": "source"},
        "messages",
        (USER,),
        {"answer": "72", "source": "gsm8k", "ground_truth": "72", "dataset": "gsm8k"},
    ),
    # The question of openai/gsm8k is text. As `messages` it is a turn of the user, as `prompt` it stays text.
    (
        {"question": USER["content"], "answer": "72"},
        {"messages": "question"},
        "messages",
        (USER,),
        {"answer": "72"},
    ),
    ({"question": "48 + 24 ="}, {"prompt": "question"}, "text", "48 + 24 =", {}),
    # What data.columns names wins over a `prompt` that the row also has, as HumanEval and the Dolci rows do.
    ({"messages": [USER], "prompt": "def f"}, {"messages": "messages"}, "messages", (USER,), {"prompt": "def f"}),
    (
        VERL,
        {"ground_truth": "extra_info.answer"},
        "verl",
        (USER,),
        {"ground_truth": "48 + 24 = 72 #### 72", "dataset": "openai/gsm8k"}
        | {k: VERL[k] for k in VERL if k != "prompt"},
    ),
    ({"prompt": "1", "a.b": 3, "a": {"b": 4}}, {"level": "a.b"}, "text", "1", {"a.b": 3, "a": {"b": 4}, "level": 3}),
]


@pytest.mark.parametrize(("row", "columns", "form", "messages", "rest"), CASES)
def test_a_row_is_what_its_documentation_says(row, columns, form, messages, rest):
    before = json.dumps(row)
    question = recognise(row, Reading(columns))
    assert (question.form, question.messages, question.columns) == (form, messages, rest)
    assert question.template == {} and json.dumps(row) == before


@pytest.mark.parametrize("stored", [lambda value: value, json.dumps])
def test_tools_and_arguments_of_the_template_as_trl_has_them(stored):
    tool = {"type": "function", "function": {"name": "add", "description": None}}
    row = {"prompt": [USER], "tools": stored([tool]), "chat_template_kwargs": stored({"enable_thinking": False})}
    question = recognise(row, Reading())
    assert question.template == {
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "enable_thinking": False,
    }
    assert question.columns == {name: row[name] for name in ("tools", "chat_template_kwargs")}


SCHEMA = {"type": "object", "properties": {"x": {"enum": [None, 1], "default": None, "anyOf": [{"const": None}]}}}


@pytest.mark.parametrize("stored", [lambda value: value, json.dumps])
@pytest.mark.parametrize("kind", [dict, FilledRow])
def test_none_in_arguments_and_schemas_stays_unless_a_library_filled_it_in(stored, kind):
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": {"a": None, "b": [{"c": None}]}}}
    turns = [USER, {"role": "assistant", "content": None, "name": None, "tool_calls": [call]}]
    old = {"role": "assistant", "function_call": {"name": "f", "arguments": {"a": None}}, "content": None}
    tools = [{"type": "function", "function": {"name": "f", "description": None, "parameters": SCHEMA}}]
    question = recognise(kind(prompt=stored([*turns, old]), tools=stored(tools)), Reading())
    _, called, called_before = question.messages
    if kind is FilledRow and stored is not json.dumps:
        arguments, schema = {"b": [{}]}, {"type": "object", "properties": {"x": {"enum": [None, 1], "anyOf": [{}]}}}
    else:
        arguments, schema = {"a": None, "b": [{"c": None}]}, SCHEMA
    assert called == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
    }
    assert called_before["function_call"]["arguments"] == ({"a": None} if "a" in arguments else {})
    assert question.template == {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}


def test_the_system_prompt_and_the_template_arguments_of_a_run():
    system, own = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be long."}
    reading = Reading(system_prompt="Be brief.", chat_template={"enable_thinking": False, "effort": "low"})
    question = recognise({"messages": [USER], "chat_template_kwargs": {"effort": "high"}}, reading)
    assert question.messages == (system, USER) and question.template == {"enable_thinking": False, "effort": "high"}
    assert recognise({"prompt": [own, USER]}, reading).messages == (own, USER)
    for part in (Reading(system_prompt="Be brief."), Reading(chat_template={"enable_thinking": False})):
        with pytest.raises(BadRow, match=r"data.columns=\{messages: prompt\}"):
            recognise({"prompt": "hello"}, part)
    turned = recognise({"prompt": "hello"}, Reading({"messages": "prompt"}, "Be brief."))
    assert turned.messages == (system, {"role": "user", "content": "hello"}) and turned.columns == {}
    with pytest.raises(BadRow, match="data.chat_template.*'add_generation_prompt'"):
        recognise({"messages": [USER]}, Reading(chat_template={"add_generation_prompt": False}))


@given(st.dictionaries(st.sampled_from(["name", "tool_call_id", "thinking"]), st.sampled_from([None, "", "x"])))
def test_keys_of_a_turn_that_only_other_turns_have_are_left_out(more):
    [turn] = recognise({"messages": [USER | more]}, Reading()).messages
    assert turn == USER | {key: value for key, value in more.items() if value is not None}


CALL = {"type": "function", "function": {"name": "search", "arguments": {"q": 1}}}


@pytest.mark.parametrize(
    ("given", "content"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, ""),
        ({"role": "assistant", "tool_calls": [CALL]}, ""),
        (
            {"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]},
            "How many?",
        ),
        ({"role": "user", "content": []}, ""),
    ],
)
def test_the_content_of_a_turn_as_openai_has_it(given, content):
    [turn, _] = recognise({"messages": [given, USER]}, Reading()).messages
    assert turn == {**given, "content": content}


@pytest.mark.parametrize(
    "row", [{"prompt": [USER], "solution": "72"}, {"messages": [USER], "ground_truth": "72"}, VERL]
)
def test_turns_may_be_a_text_of_json(row):
    name = "messages" if "messages" in row else "prompt"
    stored = row | {name: " " + json.dumps(row[name])}
    assert recognise(stored, Reading()) == recognise(row, Reading())
    mapped = {"question": stored[name]} | {key: value for key, value in row.items() if key != name}
    assert recognise(mapped, Reading({"messages": "question"})).messages == (USER,)


@pytest.mark.parametrize("text", ['[1, 2] has "role"', '["role"]', "[1]"])
def test_a_prompt_that_only_looks_like_json_stays_text(text):
    assert recognise({"prompt": text}, Reading()).messages == text


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"messages": [{"role": "user", "content": None}]}, {}, r"`messages\[0\]` must have `role` and `content`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            {},
            r"`messages\[0\]` has parts that are no text",
        ),
        ({"prompt": '[{"role": "user"}]'}, {}, r"`prompt\[0\]` must have `role` and `content`"),
        (
            {"question": "1"},
            {},
            r"only \['question'\]; set data.columns, for example data.columns=\{messages: question\}",
        ),
        ({"messages": [USER], "prompt": [USER]}, {}, r"this one has both; set data.columns"),
        ({"prompt": [USER, "hello"]}, {}, r"`prompt\[1\]` must have `role` and `content` as text"),
        ({"prompt": ["hello"]}, {}, "`prompt` must be text and not empty"),
        ({"messages": "hello"}, {}, "`messages` must be a list of chat turns"),
        ({"question": ""}, {"messages": "question"}, "`messages` must be text and not empty"),
        (
            VERL,
            {"ground_truth": "extra_info.solution"},
            "takes `ground_truth` from `extra_info.solution`, but this row",
        ),
        (
            {"prompt": [USER], "tools": "calculator"},
            {},
            "`tools` is an argument of the chat template, but it is not JSON",
        ),
        ({"prompt": [USER], "tools": "{}"}, {}, "`tools` .* must be a list of JSON schemas"),
        ({"prompt": [USER], "chat_template_kwargs": [1]}, {}, "`chat_template_kwargs` .* must be a mapping"),
        ({"prompt": [USER], "chat_template_kwargs": {"tokenize": False}}, {}, r"must not hold \['tokenize'\]"),
    ],
)
def test_a_row_of_no_form_is_refused_with_what_it_has(row, columns, message):
    with pytest.raises(BadRow, match=message):
        recognise(row, Reading(columns))


@pytest.mark.parametrize(
    ("row", "dataset"),
    [
        ({"prompt": "x"}, "code"),
        ({"messages": [USER], "dataset": None, "data_source": "sums"}, "code"),
        ({"prompt": [USER], "data_source": "sums", "reward_model": {}}, "sums"),
        ({"prompt": "x", "dataset": ["a", "b"]}, ["a", "b"]),
    ],
)
def test_a_row_that_names_no_data_set_is_of_its_source(row, dataset):
    assert recognise(row, Reading(dataset="code")).columns["dataset"] == dataset


SOURCES = [{"path": "gsm8k.jsonl", "weight": 0.7}, {"path": "hf://openai/humaneval:test", "weight": 0.3}]


def test_a_mixture_in_the_configuration():
    data = DataConfig(train=SOURCES)
    assert [source.label for source in data.train] == ["gsm8k", "openai/humaneval"]
    assert DataConfig.model_validate_json(data.model_dump_json()) == data
    assert [str(source.path) for source in data.absolute().train] == [
        str(Path.cwd() / "gsm8k.jsonl"),
        "hf://openai/humaneval:test",
    ]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "data.train: the list has no source"),
        ([{"path": "a.jsonl"}], "data.train.0: the source a must have either `weight` or `count`"),
        ([{"path": "a.jsonl", "weight": 1, "count": 1}], "data.train.0: the source a must have either"),
        ([SOURCES[0], {"path": "b.jsonl", "weight": 0}], "data.train.1.weight: must be greater than 0"),
        ([{"path": "b.jsonl", "weight": -1}], "data.train.0.weight: must be greater than 0"),
        ([{"path": "b.jsonl", "count": 0}], "data.train.0.count: must be greater than 0"),
        (
            [SOURCES[0], {"path": "b.jsonl", "count": 3}],
            "data.train: some sources have a `weight` and others a `count`",
        ),
        ([SOURCES[0], {"path": "x/gsm8k.json", "weight": 1}], r"data.train: the names \['gsm8k', 'gsm8k'\]"),
        ([{"path": "a", "wieght": 1}], "data.train.0.wieght: unknown key; did you mean data.train.0.weight?"),
    ],
)
def test_a_mixture_that_is_refused(sources, message):
    with pytest.raises(ValueError, match=message):
        load_config(GrpoRunConfig, ["configs/run/tiny_grpo.yaml", f"data.train={json.dumps(sources)}"])


def test_the_configuration_names_columns_and_sources():
    given = {"train": "hf://openai/gsm8k/main:train", "eval": "rows/test.parquet", "columns": {"messages": "question"}}
    data = DataConfig(**given)
    assert json.loads(data.model_dump_json()) | given == json.loads(data.model_dump_json())
    assert data.absolute().train == "hf://openai/gsm8k/main:train" and data.absolute().eval.is_absolute()
    assert DataConfig.model_validate_json(data.model_dump_json()) == data
    with pytest.raises(ValueError, match="hf://owner/name:split, .* 3"):
        DataConfig(train=3)
    with pytest.raises(ValueError, match="a row has one question; remove one of them"):
        DataConfig(train="rows.jsonl", columns={"messages": "question", "prompt": "text"})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "48 + 24 ="}, "an answer goes on by the chat template, but this row's `prompt` is plain text"),
        ({"messages": [USER], "tools": [{"name": "a"}]}, "`tools` gives this row arguments of the chat template"),
        ({"messages": [USER], "chat_template_kwargs": {"a": 1}}, "`chat_template_kwargs` gives this row arguments"),
    ],
)
def test_with_several_turns_all_rows_are_chats_with_the_same_arguments(row, message):
    with pytest.raises(BadRow, match=message):
        recognise(row, Reading(in_turns=True, chat_template={"tools": []}))
    given = recognise({"messages": [USER]}, Reading(in_turns=True, chat_template={"tools": [1]}))
    assert given.template == {"tools": [1]}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(USER),
        json.dumps({"messages": [USER]}),
        str([USER]),  # as pandas writes a list
        json.dumps([[USER]]),
        json.dumps([{"from": "human", "value": "48 + 24 ="}]),
        json.dumps([USER])[:-5],
    ],
)
def test_turns_that_were_written_as_text_in_another_form_are_no_question(text):
    with pytest.raises(BadRow, match="`prompt`"):
        recognise({"prompt": text}, Reading())
    assert recognise({"prompt": f"What is {text}?"}, Reading()).messages.startswith("What")
