"""What is said in answers of several turns: the model's turns as they were sampled, the tools' and the objects'."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import some_objects
from tiny_chat import DROPS_THOUGHTS, KEEPS, OPENS_A_THOUGHT, characters, renderer

from megatron_rl.config.environment import ToolsEnvironment
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.environments import Sessions, schemas_of
from megatron_rl.rollout.program import Call, Completion, Program, Samples
from megatron_rl.rollout.programs.budgets import Budgets
from megatron_rl.rollout.programs.turns import Turns
from megatron_rl.types import Prompt, TokenReward

TOKENIZER = characters()
END = TOKENIZER.token_to_id("<end>")
HERE = Path(some_objects.__file__)
QUESTION = ({"role": "user", "content": "count"},)


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one.
        b: two.
    """
    return a + b


class Guess:
    def reset(self, row: dict[str, Any]) -> None:
        pass

    def step(self, text: str) -> tuple[str, float, bool]:
        return f"not {text[-1:]}", 0.0, text.endswith("3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("characters")
    TOKENIZER.save(str(made / "tokenizer.json"))
    (made / "config.json").write_text(json.dumps({"eos_token_id": END}))
    return made


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def asked(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def play(folder, environment: dict[str, Any], *said: str, row: dict | None = None, most=2000, **options):
    """One answer of one conversation, see `play_all`.

    Returns:
        The sample, its tokens, and the text of the whole.
    """
    [(sample, tokens)] = play_all(folder, environment, *said, row=row, most=most, **options)
    return sample, tokens, TOKENIZER.decode(tokens.ids.tolist(), False)


def play_all(
    folder, environment, *said, row=None, most=2000, template=KEEPS, delimiter="", begins=None, seen=None, **options
):
    """The conversations of one answer with these turns. The engine cuts a turn that ends with `...` there.

    Args:
        begins: makes the prompt of its text.
        seen: gets the images of each call.
    """
    sizes = dict(prompts_per_step=1, samples_per_prompt=1, max_prompt_tokens=300, max_response_tokens=most)
    rollout = RolloutConfig(environment=environment, delimiter=delimiter, **sizes, **options)

    def render(turns, tools, opens):
        return renderer(template, tools=tools)(turns, opens)

    turns = Turns(folder, rollout, render, Sessions(rollout.environment, delimiter).new, images=folder / "images")
    row, left = row or {}, list(said)
    text = render(QUESTION, schemas_of(rollout.environment, row), True)
    prompt = begins(render) if begins else Prompt("row", tuple(ids(text)), QUESTION, row)

    async def ask(before: list[int], pictures: object, call: Call, conversation: int) -> Completion:
        text = left.pop(0)
        if seen is not None:
            seen.append(pictures)
        sampled = ids(text.removesuffix("...")) + ([] if text.endswith("...") else [END])
        return Completion(sampled, [-0.5] * len(sampled), [4] * len(sampled), sampled[-1] == END)

    budgets = Budgets(folder, rollout, on_gpu=False)

    def program_of(before: Prompt, left: int | None) -> Program:
        return budgets.of(before, 0, left)

    async def answer() -> Samples:
        if turns.has_objects:
            return await turns.answer(prompt, program_of, None, ask)
        turn = turns.begun(prompt, program_of)
        return await turns.answer(prompt, program_of, (turn, ask([], prompt.pictures, turn.call, 0)), ask)

    return asyncio.run(answer())


TOOLS = {"kind": "tools", "paths": [f"{__file__}:add"]}


def test_calls_and_results_are_turns_and_the_last_turn_is_the_last_one_alone(folder):
    both = f"I ask\n{call('add', a=1, b=2)}\n{call('sub', a=1)}"
    sample, tokens, _ = play(folder, TOOLS, both, "It is <end>3")
    assert tokens.conversation.turns == (
        {"role": "assistant", "content": "I ask", "tool_calls": [asked("add", a=1, b=2), asked("sub", a=1)]},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "tool", "name": "sub", "content": "Error: ValueError: there is no tool 'sub', only add"},
        {"role": "assistant", "content": "It is 3"},
    )
    assert (sample.episode.num_tool_calls, sample.episode.tool_errors) == (2, ("unknown_tool",))


def test_the_turns_of_a_class_are_the_users(folder):
    _, tokens, _ = play(folder, {"kind": "class", "path": f"{__file__}:Guess"}, "1", "3")
    assert tokens.conversation.turns == (
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "not 1"},
        {"role": "assistant", "content": "3"},
    )


def test_a_call_in_reasoning_that_the_prompt_opens_does_not_act(folder):
    options = {"template": OPENS_A_THOUGHT, "delimiter": "</think>"}
    asks = call("add", a=1, b=2)
    [(sample, tokens)] = play_all(folder, TOOLS, f"so {asks} but hm", **options)
    assert (sample.episode.num_turns, tokens.conversation.turns) == (
        1,
        ({"role": "assistant", "content": f"so {asks} but hm"},),
    )
    [(sample, tokens)] = play_all(folder, TOOLS, f"so</think>{asks}", "</think>3", **options)
    assert sample.episode.num_turns == 2 and tokens.conversation.turns[1]["content"] == "3"


def test_a_changed_history_makes_each_turn_a_sample_of_the_same_answer(folder):
    """The template removes the thoughts of earlier turns."""
    said = "<think>one</think>1", "<think>two</think>2", "<think>three</think>3"
    environment = {"kind": "class", "path": f"{__file__}:Guess"}
    samples = play_all(folder, environment, *said, template=DROPS_THOUGHTS, delimiter="</think>")
    begin, end = "<turn>user:count<end>\n", "<turn>assistant:"
    history = begin, "<turn>assistant:1<end>\n<turn>user:not 1<end>\n"
    history += ("<turn>assistant:2<end>\n<turn>user:not 2<end>\n",)
    for i, (sample, tokens) in enumerate(samples):
        prompt, response = tokens.ids[: sample.num_prompt_tokens], tokens.ids[sample.num_prompt_tokens :]
        assert TOKENIZER.decode(prompt.tolist(), False) == "".join(history[: i + 1]) + end
        assert TOKENIZER.decode(response.tolist(), False) == said[i] + "<end>"
        assert tokens.action_mask.tolist() == [False] * len(prompt) + [True] * len(response)
        assert (sample.finish, sample.num_thought_tokens) == ("stop", len(ids(said[i].partition("</think>")[0])))
        assert (sample.episode.conversation, sample.episode.continues, sample.episode.num_turns) == (i, i < 2, 1)
        assert sample.token_rewards == (TokenReward(sample.length - 1, "environment", 0.0),)
    assert len(samples) == 3


def test_a_template_that_changes_nothing_in_the_end_gives_one_sample(folder):
    """The continuation is refused because thoughts would be removed, but this answer has none."""
    environment = {"kind": "class", "path": f"{__file__}:Guess"}
    samples = play_all(folder, environment, "1", "2", "3", template=DROPS_THOUGHTS, delimiter="</think>")
    [(sample, tokens)] = samples
    assert TOKENIZER.decode(tokens.ids.tolist(), False) == (
        "<turn>user:count<end>\n<turn>assistant:1<end>\n<turn>user:not 1<end>\n<turn>assistant:2<end>\n"
        "<turn>user:not 2<end>\n<turn>assistant:3<end>"
    )
    assert (sample.num_actions, sample.episode.num_turns, sample.episode.continues) == (6, 3, False)


def test_a_history_that_would_not_fit_ends_the_answer_as_cut(folder):
    environment = {"kind": "class", "path": f"{__file__}:Guess"}
    long = "<think>" + "x" * 100 + "</think>1"
    options = {"template": DROPS_THOUGHTS, "delimiter": "</think>"}
    samples = play_all(folder, environment, long, "2", "3", most=len(ids(long)) + 2, **options)
    assert [(sample.finish, sample.episode.continues) for sample, _ in samples] == [("length", True), ("length", False)]
    [(sample, _)] = play_all(folder, environment, long, "2", "3", most=len(ids(long)) + 1, **options)
    assert (sample.finish, sample.episode.num_turns) == ("length", 1)


def test_a_changed_history_can_be_refused(folder):
    environment = {"kind": "class", "path": f"{__file__}:Guess", "history": "refuse"}
    with pytest.raises(ValueError, match="the chat template writes earlier turns differently"):
        play_all(folder, environment, "1", template=DROPS_THOUGHTS, delimiter="</think>")


def test_a_malformed_call_stays_text_and_ends_the_answer_if_it_shall(folder):
    text, good = '<tool_call>\n{"arguments": {"a": 3}}\n</tool_call>', call("add", a=1, b=2)
    _, tokens, _ = play(folder, TOOLS, text, "sorry")
    first, error, last = tokens.conversation.turns
    assert first == {"role": "assistant", "content": text} and last["content"] == "sorry"
    assert (error["role"], error["name"]) == ("tool", "error") and error["content"].startswith(
        "Error: ValueError: a ca"
    )
    sample, tokens, _ = play(folder, TOOLS | {"ends_at_malformed_calls": True}, text + good)
    [only] = tokens.conversation.turns
    assert (only, sample.finish, sample.episode.num_tool_calls) == (
        {"role": "assistant", "content": text + good},
        "stop",
        0,
    )


def test_what_the_model_has_not_read_is_not_said(folder):
    """A result that does not fit, and a turn that was cut within its call."""
    most = len(ids(call("add", a=1, b=2))) + 5
    sample, tokens, _ = play(folder, TOOLS, call("add", a=1, b=2), most=most)
    assert [turn["role"] for turn in tokens.conversation.turns] == ["assistant"] and sample.finish == "length"
    text = call("add", a=1, b=2)[:-9]
    _, tokens, _ = play(folder, TOOLS, text + "...")
    assert tokens.conversation.turns == ({"role": "assistant", "content": text},)


def test_a_result_is_said_as_the_model_read_it(folder):
    environment = {"kind": "tools", "objects": f"{HERE}:Echo", "max_observation_tokens": 5}
    _, tokens, _ = play(folder, environment, call("shout", text="<turn>abcdef"), "so")
    assert tokens.conversation.turns[1]["content"].endswith(" [cut: the first 5 tokens of 12 characters]")


COUNTER = {"kind": "tools", "objects": f"{HERE}:Counter"}


def test_an_object_opens_the_prompt_keeps_its_state_and_gives_the_reward(folder):
    turns = call("add", step=3), call("negate"), call("add", step="x"), "done"
    sample, tokens, text = play(folder, COUNTER, *turns, row={"start": 4, "other": 1})
    opened = "[add][negate]<turn>user:count from 4<end>\n<turn>assistant:"
    assert text.startswith(opened) and sample.num_prompt_tokens == len(ids(opened))
    said = [turn["content"] for turn in tokens.conversation.turns if turn["role"] == "tool"]
    assert said[:2] == ["7", "-7"] and said[2].startswith(
        "Error: wrong arguments of add: step: 'x' is not of type 'integer'"
    )
    assert tokens.conversation.opening == " from 4"
    assert tokens.conversation.state == {"total": -7, "begun_with": "count", "pair": [1, [2]], "best": 0.5}
    assert sample.token_rewards == (TokenReward(len(tokens.ids) - 1, "environment", -3.5),)
    assert sample.episode.last_turn == len(tokens.ids) - len("done") - 1
    second, tokens, _ = play(folder, COUNTER, "done")
    assert tokens.conversation.state["total"] == 0 and second.token_rewards[0].value == 0


def test_the_row_chooses_one_of_several_objects_and_its_tools(folder):
    both = {"kind": "tools", "objects": {"counter": f"{HERE}:Counter", "echo": f"{HERE}:Echo"}}
    row = {"environment": "echo", "extra": 1}
    sample, tokens, text = play(folder, both, call("shout", text="hi"), call("add", step=1), "so", row=row)
    assert text.startswith("[shout]<turn>user:count<end>")
    assert [turn["content"] for turn in tokens.conversation.turns if turn["role"] == "tool"] == [
        "HI",
        "Error: ValueError: there is no tool 'add', only shout",
    ]
    assert tokens.conversation.state == {"row": ["extra", "prompt"]} and sample.token_rewards == ()
    assert [one["function"]["name"] for one in schemas_of(ToolsEnvironment(**both))] == ["add", "negate", "shout"]
    sample, _, _ = play(folder, both, "unused", row={"environment": "dog"})
    assert "'dog', which is not among the environments counter, echo" in sample.episode.fault
    assert sample.num_actions == 0


@pytest.mark.parametrize(
    ("at", "fault"),
    [
        ("reset", "Breaks, reset raised OSError: the disk is gone ("),
        ("text", "Breaks, reset returned 3, but it must return a text or None"),
        ("length", "with the text of reset the prompt has 5"),
        ("reward", "Breaks, get_reward returned nan, which is no finite number"),
        ("nothing", ""),
    ],
)
def test_what_an_object_gets_wrong_is_a_fault_and_no_reward(folder, at, fault):
    sample, _, _ = play(folder, {"kind": "tools", "objects": f"{HERE}:Breaks"}, "hm", row={"at": at})
    assert fault in sample.episode.fault and bool(fault) == bool(sample.episode.fault)
    assert sample.token_rewards == ()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoReset", "py:NoReset is a class without a method reset, which begins an answer; write it"),
        ("makes_nothing", "py:makes_nothing must be a class, or a function that returns .* reset; it returned None"),
        ("makes_no_reset", "must be a class, or a function .*; it returned an object of the class NoReset"),
        ("NO_CLASS", "'NO_CLASS' is no function and no class, but an object of the type Counter"),
        ("NoTool", "py:NoTool has no method that could be a tool, so the model could do nothing; write one"),
        ("Asks", "py:Asks asks for the argument 'url', but every object is made without arguments; give it a default"),
        ("Unnamed", "py:Unnamed, reset takes 'start' by its position alone; remove the `/`"),
        ("Exits", r"py:Exits raised SystemExit: 3 \(.*some_objects.py:\d+\); correct it"),
        ("NoDescription", "the method act, cannot be offered as a tool: .* no docstring; it needs a type for each arg"),
        ("Costly", r"objects: .*some_objects.py:Costly raised ConnectionError: no server \(.*some_objects.py"),
    ],
)
def test_objects_that_cannot_serve_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        Sessions(ToolsEnvironment(objects=f"{HERE}:{name}"), "")


def test_an_object_without_tools_may_go_with_functions_of_other_names():
    functions = (f"{HERE.parent.parent}/environments/some_tools.py:multiply",)
    Sessions(ToolsEnvironment(objects=f"{HERE}:NoTool", paths=functions), "")
    with pytest.raises(ValueError, match="rollout.environment.*'multiply'"):
        Sessions(ToolsEnvironment(objects=f"{HERE}:Multiplies", paths=functions), "")


def test_a_result_that_nobody_would_read_is_not_computed(folder):
    turns = [call("add", step=step) for step in (1, 2)]
    sample, tokens, _ = play(folder, COUNTER | {"max_turns": 2}, *turns)
    assert tokens.conversation.state["total"] == 1
    assert (sample.finish, sample.episode.num_turns, sample.episode.num_tool_calls) == ("length", 2, 1)


GUESS = {"kind": "class", "path": f"{__file__}:Guess"}


def budget(thought: int, response: int = 20) -> dict[str, Any]:
    return {"thinking": {"mode": "two_call", "thought_tokens": thought, "response_tokens": response}}


def actions(tokens) -> str:
    """The text, with a dot in the place of each character that is no action."""
    pieces = (
        TOKENIZER.decode([i], False) if own else "." for i, own in zip(tokens.ids, tokens.action_mask, strict=True)
    )
    return "".join(pieces)


def test_each_turn_has_the_budget_of_a_thought(folder):
    """The second thought is cut after 4 tokens, and its delimiter is forced."""
    said = "ab</think>1", "abcd...", "2", "</think>3"
    [(sample, tokens)] = play_all(folder, GUESS, *said, delimiter="</think>", **budget(4))
    assert actions(tokens).strip(".").replace(".", "") == "ab</think>1<end>abcd2<end></think>3<end>"
    second = actions(tokens).partition("abcd")[2]
    assert second.startswith(".2<end>"), "the delimiter was forced, and is no action"
    assert (sample.num_thought_tokens, sample.thought_cut, sample.thought_budget) == (2 + 4 + 0, True, 12)
    assert sample.episode.thoughts == (2, 0) and sample.episode.num_turns == 3


@pytest.mark.parametrize(("total", "forced_at", "num_thought"), [(6, 4, 6), (5, 3, 5), (2, 0, 2)])
def test_all_turns_share_a_budget(folder, total, forced_at, num_thought):
    """The first thought has 2 tokens; the second one may have what is left of the total, up to the budget of a turn."""
    cut = ["abcdefgh"[:forced_at] + "..."] if forced_at else []
    environment = GUESS | {"thought_tokens": total, "max_turns": 2}
    said = "ab</think>1", *cut, "2"
    [(sample, tokens)] = play_all(folder, environment, *said, delimiter="</think>", **budget(4))
    second = actions(tokens).partition("1<end>")[2].lstrip(".")
    assert second == ("abcdefgh"[:forced_at] + "." if forced_at else "") + "2<end>"
    assert (sample.num_thought_tokens, sample.thought_cut) == (num_thought, True)


def test_a_budget_leaves_room_for_what_it_forces(folder):
    """The answer ends within its second thought, because nothing could follow the delimiter."""
    first = len(ids("ab</think>1<end>")) + len(ids("\n<turn>user:not 1<end>\n<turn>assistant:"))
    said = "ab</think>1", "abc..."
    environment = GUESS | {"turn_tokens": 24}
    [(sample, tokens)] = play_all(folder, environment, *said, most=first + 4, delimiter="</think>", **budget(3, 7))
    assert actions(tokens).endswith("abc") and (sample.finish, sample.thought_cut) == ("length", True)


def test_a_changed_history_and_budgets_go_together(folder):
    said = "ab</think>1", "abcd...", "2", "cd</think>3"
    options = {"template": DROPS_THOUGHTS, "delimiter": "</think>", **budget(4)}
    samples = play_all(folder, GUESS, *said, **options)
    assert [actions(tokens).lstrip(".") for _, tokens in samples] == [
        "ab</think>1<end>",
        "abcd.2<end>",
        "cd</think>3<end>",
    ]
    assert [(sample.thought_cut, sample.episode.thoughts) for sample, _ in samples] == [
        (False, (2,)),
        (True, ()),
        (False, (2,)),
    ]


def test_no_turn_begins_after_the_time_of_an_answer(folder):
    [(sample, _)] = play_all(folder, GUESS | {"answer_timeout_s": 1e-9}, "1", "2", "3")
    assert (sample.finish, sample.episode.num_turns) == ("length", 1)
