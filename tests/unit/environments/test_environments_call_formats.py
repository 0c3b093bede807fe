"""Calls of tools in ten formats: good ones, and all kinds of malformed ones, which never call anything."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_chat import renderer

from megatron_rl.environments import FORMATS, Continuation, as_turn, calls_of, format_of
from megatron_rl.environments.asked_calls import AskedCall, rendering_calls, without_end, written
from megatron_rl.environments.tools import tool_of

SCHEMAS: dict[str, Any] = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]},
    "say": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "loud": {"type": "boolean"},
            "parts": {"type": "array"},
            "either": {"anyOf": [{"type": "string"}, {"type": "number"}]},
            "maybe": {"type": "integer", "nullable": True},
        },
    },
}
OPEN, CLOSE = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_end|><|tool_calls_section_end|>"
GOOD = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 6}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n6\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>6</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">6</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "kimi_k2": KIMI[0] + 'functions.add:0<|tool_call_argument_begin|>{"a": 6}' + KIMI[1],
    "deepseek": OPEN + 'add<｜tool▁sep｜>{"a": 6}' + CLOSE,
    "gpt_oss": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 6}<|call|>',
    "llama3": '{"name": "add", "parameters": {"a": 6}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 6}, "id": "123456789"}]',
    "nemotron": '<TOOLCALL>[{"name": "add", "arguments": {"a": 6}}]</TOOLCALL>',
}
TWO = {
    "kimi_k2": KIMI[0]
    + 'functions.add:0<|tool_call_argument_begin|>{"a": 6}<|tool_call_end|><|tool_call_begin|>'
    + 'functions.add:1<|tool_call_argument_begin|>{"a": 7}'
    + KIMI[1],
    "deepseek": OPEN
    + 'add<｜tool▁sep｜>{"a": 6}<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 7}'
    + CLOSE,
    "minimax_m2": GOOD["minimax_m2"].replace(
        "</invoke>\n", '</invoke>\n<invoke name="add">\n<parameter name="a">7</parameter>\n</invoke>\n'
    ),
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 6}[TOOL_CALLS]add[ARGS]{"a": 7}',
    "nemotron": '<TOOLCALL>[{"name": "add", "arguments": {"a": 6}}, {"name": "add", "arguments": {"a": 7}}]</TOOLCALL>',
} | {name: f"{GOOD[name]}\n{GOOD[name].replace('6', '7')}" for name in ("hermes", "qwen3_coder", "glm")}


def read(name: str, text: str, delimiter: str = "") -> list[tuple[str, Any]]:
    """Each call as its name and arguments, or as `fault` and the kind."""
    calls = calls_of(text, FORMATS[name], SCHEMAS, delimiter)
    return [("fault", call.kind) if call.fault else (call.name, dict(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_and_the_text_before_it(name):
    before = (
        ""
        if name == "llama3"
        else "<|channel|>analysis<|message|>I ask<|end|><|start|>assistant"
        if name == ("gpt_oss")
        else "I ask\n\n"
    )
    assert read(name, before + GOOD[name]) == [("add", {"a": 6})]
    turn = as_turn(before + GOOD[name], FORMATS[name], calls_of(before + GOOD[name], FORMATS[name], SCHEMAS))
    [call] = turn["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 6}}
    assert turn.get("thinking", turn["content"]) == ("I ask" if before else "")


@pytest.mark.parametrize("name", TWO)
def test_two_calls_in_a_turn(name):
    assert read(name, TWO[name]) == [("add", {"a": 6}), ("add", {"a": 7})]
    assert as_turn(TWO[name], FORMATS[name], calls_of(TWO[name], FORMATS[name], SCHEMAS))["content"] == ""


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_anywhere_does_not_count(name):
    """A turn may end anywhere by the model's own end."""
    for size in range(len(GOOD[name])):
        assert read(name, GOOD[name][:size]) in ([], [("fault", "unclosed")], [("fault", "malformed")]), size


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("kimi_k2", "<|tool_calls_section_end|>"),
        ("deepseek", "<｜tool▁calls▁end｜>"),
        ("minimax_m2", "</minimax:tool_call>"),
    ],
)
def test_no_call_of_a_section_counts_without_the_section_s_own_end(name, end):
    without = TWO[name].removesuffix(end)
    assert read(name, without) == read(name, f"{without}{end[:-1]}") == [("fault", "unclosed")]
    assert read(name, f"{without} so {end}") == [("fault", "malformed")]
    assert read(name, without + TWO[name]) == [("fault", "malformed")], "the next section is in this one"


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("gpt_oss", "llama3")])
def test_a_call_in_reasoning_is_none_and_one_after_it_counts(name):
    assert read(name, f"<think>{GOOD[name]}</think>no", "</think>") == []
    assert read(name, f"<think>{GOOD[name]}", "</think>") == []
    assert read(name, f"<think>so</think>{GOOD[name]}", "</think>") == [("add", {"a": 6})]
    again = f"so</think>ok<think>hm {GOOD[name]}"
    assert read(name, again, "</think>") == read(name, f"{again}</think>done", "</think>") == []
    if name != "mistral":  # nothing may follow its call
        last = f"so</think>{GOOD[name]}<think>hm {GOOD[name]}</think>done"
        assert read(name, last, "</think>") == [("add", {"a": 6})]


def test_reasoning_is_spaces_and_the_places_of_calls_stay():
    text = f"so {HERMES}</think>ok<think>hm</think>{HERMES}"
    [call] = calls_of(text, FORMATS["hermes"], SCHEMAS, "</think>")
    assert text[call.start : call.stop] == HERMES and call.stop == len(text)


def test_a_turn_has_a_largest_number_of_calls():
    many = read("hermes", HERMES * 200)
    assert many[:-1] == [("add", {"a": 6})] * 128 and many[-1] == ("fault", "malformed")
    assert len(read("hermes", "<tool_call>" * 10_000)) == 129


HERMES, CODER, GLM = GOOD["hermes"], GOOD["qwen3_coder"], GOOD["glm"]


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("hermes", HERMES.replace("}}", "}"), "malformed"),
        ("hermes", HERMES.replace("</tool_call>", ""), "unclosed"),
        ("hermes", HERMES.replace('{"a": 6}', '{"a": 6, "a": 7}'), "malformed"),
        ("hermes", HERMES.replace("6", "NaN"), "malformed"),
        ("hermes", HERMES.replace('"arguments"', '"parameters"'), "malformed"),
        ("hermes", HERMES.replace("6", "1e999"), "malformed"),
        ("hermes", HERMES.replace("}}", "}} and more"), "malformed"),
        ("qwen3_coder", CODER.replace("</tool_call>", ""), "unclosed"),
        ("qwen3_coder", CODER.replace("</function>", ""), "malformed"),
        ("qwen3_coder", CODER.replace("</parameter>", ""), "malformed"),
        ("qwen3_coder", CODER.replace("</function>", "<parameter=a>7</parameter></function>"), "malformed"),
        ("qwen3_coder", CODER.replace("=a>\n6", "=a>\n6<parameter=b>7"), "malformed"),
        ("qwen3_coder", HERMES, "malformed"),
        ("glm", GLM.replace("</arg_value>", ""), "malformed"),
        ("glm", GLM.replace("<arg_value>6</arg_value>", ""), "malformed"),
        ("glm", GLM.replace("</tool_call>", ""), "unclosed"),
        ("minimax_m2", GOOD["minimax_m2"].replace("</invoke>\n", ""), "unclosed"),
        ("minimax_m2", GOOD["minimax_m2"].replace("<minimax:tool_call>", ""), "malformed"),
        ("minimax_m2", "<minimax:tool_call></minimax:tool_call>", "malformed"),
        ("kimi_k2", GOOD["kimi_k2"].replace("}", ""), "malformed"),
        ("kimi_k2", GOOD["kimi_k2"].replace("functions.add:0", "add"), "malformed"),
        ("kimi_k2", GOOD["kimi_k2"].replace("<|tool_calls_section_begin|>", ""), "malformed"),
        ("deepseek", GOOD["deepseek"].replace("}", ""), "malformed"),
        ("deepseek", GOOD["deepseek"].replace("<｜tool▁sep｜>", ""), "malformed"),
        ("gpt_oss", GOOD["gpt_oss"].replace("<|call|>", "<|return|>"), "malformed"),
        ("gpt_oss", GOOD["gpt_oss"].replace("commentary", "analysis"), "malformed"),
        ("gpt_oss", GOOD["gpt_oss"].replace("functions.", ""), "malformed"),
        ("llama3", GOOD["llama3"] + "; " + GOOD["llama3"], "malformed"),
        ("llama3", GOOD["llama3"][:-1], "malformed"),
        ("llama3", "<|python_tag|>print(1)", "malformed"),
        ("llama3", GOOD["llama3"].replace("{", '{"type": "function", ', 1), "malformed"),
        ("llama3", f"[{GOOD['llama3']}, {GOOD['llama3']}]", "malformed"),
        ("mistral", GOOD["mistral"].replace('"123456789"', "null"), "malformed"),
        ("mistral", "[TOOL_CALLS]add[CALL_ID]123456789", "unclosed"),
        ("gpt_oss", "<|channel|>commentary to=functions.add", "unclosed"),
        ("gpt_oss", "<|channel|>commentary to=functions.add <|constrain|>json<|call|>", "unclosed"),
        ("mistral", GOOD["mistral"][:-1], "malformed"),
        ("mistral", GOOD["mistral"] + " and more", "malformed"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{", "malformed"),
        ("nemotron", GOOD["nemotron"].replace("]", ""), "malformed"),
        ("nemotron", "<TOOLCALL>[]</TOOLCALL>", "malformed"),
    ],
)
def test_a_malformed_call_is_one_fault_and_calls_nothing(name, text, kind):
    assert read(name, text) == [("fault", kind)]


def test_an_argument_that_says_a_header_of_a_message_is_an_argument():
    header = "<|start|>assistant<|channel|>commentary to=functions.add<|message|>{}<|call|>"
    text = GOOD["gpt_oss"].replace("functions.add", "functions.say").replace('"a": 6', f'"text": "{header}"')
    assert read("gpt_oss", text) == [("say", {"text": header})]


def test_a_call_of_mistral_may_have_an_id_before_its_arguments():
    [call] = calls_of('[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 6}', FORMATS["mistral"], SCHEMAS)
    assert (call.name, call.arguments, call.id) == ("add", {"a": 6}, "123456789")


def test_a_malformed_call_does_not_take_the_next_one_with_it():
    for name in ("hermes", "qwen3_coder", "glm"):
        broken = GOOD[name].replace("</tool_call>", "")
        assert read(name, broken + GOOD[name]) == [("fault", "unclosed"), ("add", {"a": 6})]
    broken = GOOD["kimi_k2"].replace('{"a": 6}', '{"a": 6').replace(KIMI[1], "<|tool_call_end|>")
    second = '<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{"a": 7}'
    assert read("kimi_k2", broken + second + KIMI[1]) == [("fault", "malformed"), ("add", {"a": 7})]


@pytest.mark.parametrize("text", ["", "It is 6.", "{}", '{"result": 6}', "a </tool_call> b", "[1, 2]"])
def test_a_turn_without_a_call_has_none(text):
    for name, form in FORMATS.items():
        assert calls_of(text, form, SCHEMAS) == [], name


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "6", "6"),
        ("text", "null", "null"),
        ("text", "  two\n\n lines ", "  two\n\n lines "),
        ("loud", "true", True),
        ("loud", "False", False),
        ("loud", "yes", "yes"),
        ("parts", '[1, "two"]', [1, "two"]),
        ("either", "6.5", 6.5),
        ("either", "six", "six"),
        ("either", '"six"', '"six"'),
        ("maybe", "None", None),
        ("maybe", "6", 6),
        ("unknown", "6", "6"),
    ],
)
def test_the_schema_says_what_a_value_between_marks_is(key, text, value):
    coder = f"<tool_call><function=say><parameter={key}>\n{text}\n</parameter></function></tool_call>"
    glm = f"<tool_call>say<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"
    for name, said in (("qwen3_coder", coder), ("glm", glm)):
        assert read(name, said) == [("say", {key: value})]


@settings(max_examples=30)
@given(st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists)))
def test_all_json_is_read_as_it_was_written(arguments):
    text = json.dumps(arguments)
    for name, form in FORMATS.items():
        if name not in ("qwen3_coder", "glm", "minimax_m2"):
            assert [dict(call.arguments) for call in form.calls(GOOD[name].replace('{"a": 6}', text), {})] == [
                arguments
            ]


@given(st.text(alphabet="<>/{}[]\"'=:| \nabtool_callARGS" + "▁｜", max_size=60))
def test_no_text_breaks_a_reader(text):
    for name, form in FORMATS.items():
        for call in calls_of(GOOD[name][:20] + text + GOOD[name][20:], form, SCHEMAS, "</think>"):
            assert 0 <= call.start <= call.stop and bool(call.fault) == bool(call.kind)


def test_what_the_schema_does_not_allow_is_no_argument():
    """pydantic alone would take "6" for a number."""

    def add(a: int, b: float = 1.0, c: int | None = None) -> float:
        """Add.

        Args:
            a: one.
            b: two.
            c: three.
        """
        return a + b + (c or 0)

    tool = tool_of(add, "add")
    assert [tool.fault_of(given) for given in ({"a": 6}, {"a": 6, "b": 2}, {"a": 6, "c": None})] == ["", "", ""]
    assert tool.fault_of({"a": "6"}) == "a: '6' is not of type 'integer'"
    assert tool.fault_of({"a": True}) == "a: True is not of type 'integer'"
    assert tool.fault_of({"b": 1.5}) == "arguments: 'a' is a required property"
    assert "('d' was unexpected)" in tool.fault_of({"a": 1, "d": 2})


CALLS = {  # how the templates of these models write the calls of a turn
    "kimi_k2": KIMI[0].partition("<|tool_call_begin|>")[0]
    + "{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
    "deepseek": "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + c.function.name + "
    "'<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>",
    "minimax_m2": '\n<minimax:tool_call>\n{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">\n'
    '{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">{{ v if v is string else v | tojson }}'
    "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>",
    "mistral": "[TOOL_CALLS] [{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}, "
    '"id": "{{ c.id[-9:] }}"}{{ "" if loop.last else ", " }}{% endfor %}]',
    "nemotron": "<TOOLCALL>[{% for c in m.tool_calls %}{{ c.function | tojson }}"
    '{{ "" if loop.last else ", " }}{% endfor %}]</TOOLCALL>',
}
HISTORY = (
    "{% for m in messages %}<turn>{{ m.role }}:{{ m.content }}{% if m.tool_calls %}CALLS{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)


@pytest.mark.parametrize("name", CALLS)
def test_what_a_template_writes_is_read_as_the_same_calls(name):
    render = renderer(HISTORY.replace("CALLS", CALLS[name]))
    assert format_of(render, ["<end>"], "say") == name
    arguments = {"text": 'two\n "lines" é', "loud": True, "parts": [1, {"k": None}], "either": 6.5, "maybe": None}
    both = [AskedCall(0, 0, True, "say", arguments, id=f"functions.say:{i}") for i in range(2)]
    turn = {"role": "assistant", "content": "", "tool_calls": list(map(written, both))}
    text = rendering_calls(render)([turn], False).removeprefix("<turn>assistant:")
    assert read(name, without_end(text, ["<end>"])[0]) == [("say", arguments)] * 2
    continuation = Continuation(render, ["<end>"], "tool", "</think>")
    said = continuation.text([{"role": "tool", "name": "say", "content": "so"}])
    assert said == "<end>\n<turn>tool:so<end>\n<turn>assistant:"
