"""Tools and classes of the user's own, good and bad."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
import some_tools
from patience import deadline
from tiny_chat import KEEPS, renderer

from megatron_rl.config.environment import ClassEnvironment, ToolsEnvironment
from megatron_rl.environments import EnvironmentFault, Reaction, Sessions, format_of, schemas_of

HERE = Path(some_tools.__file__)
SHORT_S = 0.05


@pytest.fixture(autouse=True)
def released():
    """Threads that hang end with the test."""
    some_tools.RELEASED.clear()
    yield
    some_tools.RELEASED.set()


def tools(*names: str, **options) -> ToolsEnvironment:
    return ToolsEnvironment(paths=tuple(f"some_tools:{name}" for name in names), **options)


def react(cfg, text: str, delimiter: str = "", row: dict | None = None) -> Reaction:
    async def play() -> Reaction:
        session = Sessions(cfg, delimiter).new()
        await session.begin(row or {})
        try:
            return await session.react(text)
        finally:
            await session.end()

    return asyncio.run(asyncio.wait_for(play(), deadline(30)))


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PRODUCT = call("multiply", '{"a": 6, "b": 7}')


def contents(reaction: Reaction) -> list[str]:
    return [message["content"] for message in reaction.messages]


def test_the_calls_of_a_turn_give_observations_in_their_order():
    text = "I ask: " + call("later", '{"text": "slow"}') + " and " + PRODUCT
    reaction = react(tools("multiply", "later"), text)
    assert reaction == Reaction(
        (
            {"role": "tool", "name": "later", "content": "slow"},
            {"role": "tool", "name": "multiply", "content": "42"},
        ),
        num_calls=2,
    )


def test_a_turn_without_a_call_ends_the_answer():
    assert react(tools("multiply"), "42") == Reaction(done=True)


@pytest.mark.parametrize(
    "text",
    [
        f"<think>{call('multiply')}</think>42",
        f"I could write {PRODUCT}, but</think>42",  # the prompt has opened the thought
        f"<think>I could write {PRODUCT}, but",
        f"<think>I could write <tool_call> or</think>{PRODUCT[:-12]}</think>",
    ],
)
def test_a_call_in_a_thought_is_none(text):
    assert contents(react(tools("multiply"), text, "</think>"))[:1] != ["42"]


@pytest.mark.parametrize(
    "text",
    [
        f"<think>so</think>{PRODUCT}",
        PRODUCT,
        f"{PRODUCT} is what I ask",
        f"<think>so</think>{PRODUCT} and </think>",
        f"<think>I write <tool_call> now</think>{PRODUCT}",
    ],
)
def test_a_call_after_the_thought_counts(text):
    assert contents(react(tools("multiply"), text, "</think>")) == ["42"]


@pytest.mark.parametrize("text", ["a </tool_call> b", "a <tool_call> b", f"write {PRODUCT}"])
def test_a_string_in_a_call_may_have_its_marks(text):
    asked = call("later", json.dumps({"text": text}))
    assert contents(react(tools("later", "multiply"), asked + PRODUCT)) == [text, "42"]


def test_an_argument_may_have_the_end_of_a_thought():
    for before in ("", "<think>so</think>"):
        asked = before + call("later", '{"text": "a </think> b"}')
        assert contents(react(tools("later"), asked, "</think>")) == ["a </think> b"]


HERMES = "{{ tools | tojson }} Write <tool_call>\n{'name': ..., 'arguments': ...}\n</tool_call>".replace("'", '"')
WRITES = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "CALL</tool_call>{% endfor %}{% endfor %}"
)
FORMS = {
    HERMES: "hermes",
    WRITES.replace(
        "CALL", '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    ): "hermes",
    WRITES.replace("CALL", "{{ c.function | tojson }}"): "hermes",
    WRITES.replace("CALL", "<function={{ c.function.name }}>"): "other",
    WRITES.replace("CALL", "{{ c.function.name }}<arg_key>x</arg_key>"): "other",
    HERMES + WRITES.replace("CALL", "{{ c.function.name }}"): "other",
    "Write <tool_call><function=NAME>": "qwen3_coder",
    "Answer with <|python_tag|> and JSON.": "other",
    "Write <|tool_call_start|>[NAME(x=1)]<|tool_call_end|>": "other",
    "[TOOL_CALLS] and a list": "mistral",
    KEEPS: "unknown",
}


@pytest.mark.parametrize("template", FORMS)
def test_the_form_in_which_a_template_asks_for_calls(template):
    assert format_of(renderer(template, tools=schemas_of(tools("multiply"))), ["<end>"], "multiply") == FORMS[template]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("date", "2026-11-28"),
        ("set", "{1}"),
        ("numpy", "3"),
        ("bytes", "b'x'"),
        ("circle", "[[...]]"),
        ("dict", '{"a": 1}'),
    ],
)
def test_a_result_that_json_does_not_know_is_what_python_prints(kind, text):
    assert contents(react(tools("gives"), call("gives", f'{{"kind": "{kind}"}}'))) == [text]


def test_arguments_may_have_any_name():
    asked = call("apply", '{"function": "f", "method": "m", "self": "s"}')
    assert contents(react(tools("apply"), asked)) == ["f m s"]
    for name in ("function", "method"):
        options = ClassEnvironment(path=f"{HERE}:Named", arguments={name: "x"})
        assert react(options, "1").messages[0]["content"] == "x"
    assert contents(react(tools("multiply"), f"<think>hm</think>{PRODUCT}", "</think>")) == ["42"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (call("divide"), "ValueError: there is no tool 'divide', only multiply, broken"),
        ("<tool_call>{name: multiply}</tool_call>", "ValueError: the call is not JSON: "),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "ValueError: the call is not JSON: "),
        ("<tool_call>[1]</tool_call>", 'ValueError: a call must be {"name": ..., "arguments": {...}}'),
        (call("multiply", "[1, 2]"), "ValueError: the arguments of a call must be a JSON object"),
        (call("multiply", '{"a": 1}'), "wrong arguments of multiply: arguments: 'b' is a required property"),
        (call("multiply", '{"a": 1, "b": "x"}'), "wrong arguments of multiply: b: 'x' is not of type 'integer'"),
        (
            call("multiply", '{"a": 1, "b": 2, "c": 3}'),
            "wrong arguments of multiply: arguments: Additional properties are not allowed ('c' was unexpected)",
        ),
        ('<tool_call>{"name": "multiply"', "ValueError: a <tool_call> without </tool_call>"),
        (call("broken", '{"kind": "raise"}'), "OSError: the disk is gone"),
        (call("broken", '{"kind": "exit"}'), "RuntimeError: it called sys.exit(3)"),
        (call("broken", '{"kind": "no JSON"}'), "TypeError: Object of type object is not JSON serializable"),
    ],
    ids=lambda value: value[:40],
)
def test_every_error_of_a_call_is_an_observation(text, message):
    reaction = react(tools("multiply", "broken"), text)
    [content] = contents(reaction)
    assert content.startswith(f"Error: {message}")
    assert (len(reaction.errors), reaction.done, reaction.reward) == (1, False, None)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("interrupt", "it raised KeyboardInterrupt"),
        ("generator", "it raised GeneratorExit: gone"),
        ("cancel", "it raised asyncio.exceptions.CancelledError: not me"),
        ("own", "it raised some_tools.Own: mine"),
        ("stop", "StopIteration"),
        ("half", r"ValueError: half: \ud800"),
        ("exit", "it called sys.exit(3)"),
    ],
)
@pytest.mark.parametrize("how", ["thread", "direct", "gathered", "group"])
def test_what_would_end_the_event_loop_is_an_error_of_its_call_alone(kind, message, how, caplog):
    failing = (
        call("broken", json.dumps({"kind": kind}))
        if how == "thread"
        else call("broken_within", json.dumps({"kind": kind, "how": how}))
    )
    error, product, later = contents(
        react(tools("broken", "broken_within", "multiply", "later"), failing + PRODUCT + call("later", '{"text": "l"}'))
    )
    if how == "group" and kind == "cancel":  # a group takes no notice of a task that was cancelled
        assert error == "done"
    else:
        assert error.startswith("Error: ") and message.removeprefix("it raised ") in error
    assert (product, later) == ("42", "l")
    if message.startswith("it ") and error != "done":
        assert re.search(r"raised .* \(.*some_tools.py:\d+\)", caplog.text)


def test_a_call_that_is_not_closed_does_not_hide_the_next_one():
    reaction = react(tools("multiply"), f"<tool_call>oh {PRODUCT}")
    assert contents(reaction) == ["Error: ValueError: a <tool_call> without </tool_call>", "42"]


@pytest.mark.parametrize("name", ["hang", "hang_async"])
def test_a_tool_that_hangs_is_given_up_and_holds_up_no_other(name):
    reaction = react(tools(name, "multiply", step_timeout_s=SHORT_S), call("hang_async" if "async" in name else "hang"))
    assert contents(reaction) == [f"Error: {name} gave no result after 0.05 s"]


def test_more_calls_hang_than_there_are_threads(monkeypatch):
    """Those that are given up make room."""
    monkeypatch.setattr("megatron_rl.environments.calls.MAX_THREADS", 2)
    text = call("hang") * 5 + PRODUCT
    reaction = react(tools("hang", "multiply", step_timeout_s=SHORT_S), text)
    assert contents(reaction) == ["Error: hang gave no result after 0.05 s"] * 5 + ["42"]


def test_a_megabyte_is_given_as_it_is():
    assert contents(react(tools("megabyte"), call("megabyte"))) == ["x" * 1_000_000]


def test_the_schemas_are_those_of_the_chat_template():
    [schema] = schemas_of(tools("multiply"))
    assert schema["function"]["name"] == "multiply"
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    assert schemas_of(None) == schemas_of(ClassEnvironment(path="some_tools:Countdown")) == []


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["without_types"], "some_tools:without_types cannot be offered as a tool: Argument a is missing a type hint"),
        (["Countdown"], "some_tools:Countdown is type, but must be a function"),
        (["multiply", "multiply"], "two tools are named 'multiply'"),
        (["absent"], "has no function 'absent'"),
    ],
)
def test_what_cannot_be_a_tool_is_refused(names, message):
    with pytest.raises(ValueError, match=message):
        Sessions(tools(*names), "")


@pytest.mark.parametrize("name", ["Countdown", "AsyncCountdown"])
def test_a_class_plays_an_episode(name):
    async def play() -> list[Reaction]:
        session = Sessions(ClassEnvironment(path=f"{HERE}:{name}", arguments={"rounds": 2}), "").new()
        await session.begin({"name": "n"})
        reactions = [await session.react(text) for text in ("1", "2.5")]
        await session.end()
        return reactions

    assert asyncio.run(play()) == [
        Reaction(({"role": "user", "content": "n 1, 1 left"},), 1.0),
        Reaction(({"role": "user", "content": "n 2.5, 0 left"},), 2.5, done=True),
    ]


class Unclear:
    def __bool__(self):
        raise KeyboardInterrupt("unclear")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (OSError("gone"), r"Returns, step raised OSError: gone \(.*some_tools.py:\d+\)"),
        (SystemExit(2), r"step raised RuntimeError: it called sys.exit\(2\)"),
        (KeyboardInterrupt(), r"step raised RuntimeError: it raised KeyboardInterrupt \(.*some_tools.py:\d+\)"),
        (asyncio.CancelledError(), r"it raised asyncio.*CancelledError \(.*some_tools.py:\d+\)"),
        (some_tools.Own("mine"), r"it raised some_tools.Own: mine \(.*some_tools.py:\d+\)"),
        (StopIteration("no more"), r"it raised StopIteration: no more \(.*some_tools.py:\d+\)"),
        (("a", 10**400, True), "returned the reward 10+, which is above"),
        (("a", 1e308, True), r"returned the reward 1e\+308, which is above 3.4e\+38"),
        (("a", 1.0, Unclear()), r"step returned a value that raised KeyboardInterrupt: unclear \(.*sessions.py"),
        ("text", "step returned 'text', but it must return"),
        ((), r"step returned \(\), but it must return"),
        ((1, 2.0, True), "returned the observation 1, but"),
        (("a", 2.0, "False"), "returned 'False' for done, but it must return"),
        (("a", float("nan"), True), "returned the reward nan, which is no finite number"),
        (("a", "1", True), "returned the reward '1', which is no finite number"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_a_class_gets_wrong_is_a_fault(given, message):
    with pytest.raises(EnvironmentFault, match=message):
        react(ClassEnvironment(path="some_tools:Returns"), "x", row={"given": given})


def test_an_exit_in_a_task_of_a_class_is_a_fault_with_its_line():
    with pytest.raises(
        EnvironmentFault, match=r"Gathers, step raised .* it called sys.exit\(3\) \(.*some_tools.py:\d+\)"
    ):
        react(ClassEnvironment(path="some_tools:Gathers"), "x", row={"given": "exit"})


def test_an_environment_that_hangs_fails_and_is_closed():
    some_tools.CLOSED.clear()
    with pytest.raises(EnvironmentFault, match="Hangs, step .*0.05 s"):
        react(ClassEnvironment(path="some_tools:Hangs", step_timeout_s=SHORT_S), "x", row={"name": "h"})
    assert some_tools.CLOSED == ["h"]


def test_the_first_observation_is_the_prompt():
    with pytest.raises(EnvironmentFault, match="'hello'"):
        react(ClassEnvironment(path="some_tools:Greets"), "x")


def test_a_class_without_the_methods_is_refused():
    with pytest.raises(ValueError, match="some_tools:multiply"):
        Sessions(ClassEnvironment(path="some_tools:multiply"), "")
