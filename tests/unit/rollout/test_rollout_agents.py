"""Agents of somebody else, which reach the model by an OpenAI-compatible address. The client is OpenAI's own."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest
from agent_conversations import (
    END,
    READING,
    TOKENIZER,
    VERSION,
    WITH_CALLS,
    assistant,
    client,
    completion,
    conversations,
    ids_of,
    play,
    render_with,
    say,
    text_of,
    user,
)
from openai import BadRequestError, OpenAI
from patience import deadline
from tiny_chat import DROPS_THOUGHTS, KEEPS, OFFERS_NOTHING

from megatron_rl.config.environment import AgentEnvironment
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.environments import FORMATS
from megatron_rl.rollout.program import Call, Completion
from megatron_rl.rollout.programs.agents import Agents
from megatron_rl.rollout.programs.conversations import Refused
from megatron_rl.rollout.programs.endpoint import Endpoint, TurnReading
from megatron_rl.rollout.programs.episodes import EpisodeRequest
from megatron_rl.types import Prompt

# Conversations.


def test_a_call_goes_on_from_the_tokens_of_the_call_before_it():
    held = conversations()
    assert say(held, [user("a")], "one") == "<turn>user:a<end>\n<turn>assistant:"
    turns = [user("a"), assistant("one"), user("b")]
    rest = "<end>\n<turn>user:b<end>\n<turn>assistant:"
    assert say(held, turns, "two") == "<turn>user:a<end>\n<turn>assistant:one" + rest
    [(prompt, transcript, path)] = held.transcripts()
    assert text_of(prompt) == "<turn>user:a<end>\n<turn>assistant:"
    #          the answer and its end are actions, what the template adds is not, the last answer is
    mask = [True] * 4 + [False] * (len(ids_of(rest)) - 1) + [True] * 4
    assert text_of(transcript.ids) == "one" + rest + "two<end>" and transcript.is_action == mask
    assert [v for v, own in zip(transcript.version, mask, strict=True) if own] == [VERSION] * 8
    assert len(path) == 2 and transcript.stopped


def test_calls_that_branch_share_their_tokens_and_each_action_is_of_one_sample():
    held = conversations()
    say(held, [user("a")], "one")
    say(held, [user("a"), assistant("one"), user("b")], "two")
    say(held, [user("a"), assistant("one"), user("c")], "three")
    say(held, [user("other")], "four")
    found = [(text_of(t.ids), text_of(np.array(t.ids)[np.array(t.is_action)])) for _, t, _ in held.transcripts()]
    assert found == [
        ("one<end>\n<turn>user:b<end>\n<turn>assistant:two<end>", "one<end>two<end>"),
        ("one<end>\n<turn>user:c<end>\n<turn>assistant:three<end>", "three<end>"),
        ("four<end>", "four<end>"),
    ]


def test_what_the_agent_changes_in_an_answer_begins_a_conversation_anew():
    held = conversations()
    say(held, [user("a")], "one")
    say(held, [user("a"), assistant("One!"), user("b")], "two")
    prompts = [text_of(prompt) for prompt, *_ in held.transcripts()]
    assert prompts == [
        "<turn>user:a<end>\n<turn>assistant:",
        "<turn>user:a<end>\n<turn>assistant:One!<end>\n<turn>user:b<end>\n<turn>assistant:",
    ]


def test_other_tools_begin_a_conversation_anew():
    held = conversations()
    tool = {"type": "function", "function": {"name": "f"}}
    say(held, [user("a")], "one")
    assert say(held, [user("a"), assistant("one"), user("b")], "two", tools=[tool]).startswith("[f]<turn>user:a")
    assert len(held.transcripts()) == 2


def test_a_template_that_does_not_show_tools_is_refused():
    held = conversations(OFFERS_NOTHING)
    tool = {"type": "function", "function": {"name": "f"}}
    say(held, [user("a")], "one")
    with pytest.raises(Refused, match="the chat template does not show tools"):
        held.ask([user("a")], [tool])


def test_an_answer_that_was_cut_gets_its_end():
    held = conversations()
    say(held, [user("a")], "on", stopped=False)
    say(held, [user("a"), assistant("on"), user("b")], "two")
    [(_, transcript, _)] = held.transcripts()
    assert text_of(transcript.ids) == "on<end>\n<turn>user:b<end>\n<turn>assistant:two<end>"
    assert transcript.is_action[:3] == [True, True, False]


def test_a_template_that_drops_thoughts_is_refused_with_the_position():
    held = conversations(DROPS_THOUGHTS)
    held.splits = False
    say(held, [user("a")], "<think>hm</think>one")
    position = len("<turn>user:a<end>\n<turn>assistant:")
    with pytest.raises(Refused, match=rf"rewrites earlier turns: from character {position} on it renders 'one<end>"):
        held.ask([user("a"), assistant("<think>hm</think>one"), user("b")], [])
    assert len(held.transcripts()) == 1, "a refused call changes nothing"


def test_a_template_that_drops_thoughts_begins_another_conversation():
    held = conversations(DROPS_THOUGHTS)
    say(held, [user("a")], "<think>hm</think>one")
    say(held, [user("a"), assistant("<think>hm</think>one"), user("b")], "two")
    first, second = held.transcripts()
    assert [text_of(first[0]), text_of(first[1].ids)] == [
        "<turn>user:a<end>\n<turn>assistant:",
        "<think>hm</think>one<end>",
    ]
    history = "<turn>user:a<end>\n<turn>assistant:one<end>\n<turn>user:b<end>\n<turn>assistant:"
    assert [text_of(second[0]), text_of(second[1].ids)] == [history, "two<end>"]
    assert all(first[1].is_action) and all(second[1].is_action), "each sampled token is trained once"


def test_a_shortened_history_and_a_sub_agent_are_conversations_of_the_same_answer():
    """The agent asks a, and goes on; then it shortens its history to a summary, and asks another agent."""
    held = conversations()
    say(held, [user("a")], "one")
    say(held, [user("a"), assistant("one"), user("b")], "two")
    say(held, [user("so far: one, two"), user("c")], "three")
    say(held, [user("sub")], "four")
    say(held, [user("so far: one, two"), user("c"), assistant("three"), user("four")], "five")
    found = [(len(path), sum(transcript.is_action)) for _, transcript, path in held.transcripts()]
    assert found == [(2, 8), (1, 5), (2, 11)]


def test_an_answer_that_the_agent_asked_for_again_is_left_out():
    """Two answers from which nothing goes on are two samples."""
    held = conversations()
    say(held, [user("a")], "broken")
    say(held, [user("a")], "one")
    say(held, [user("a"), assistant("one"), user("b")], "two")
    [(_, transcript, _)] = held.transcripts()
    assert text_of(transcript.ids).startswith("one<end>") and len(held.retried) == 1
    best_of_two = conversations()
    say(best_of_two, [user("a")], "one")
    say(best_of_two, [user("a")], "two")
    assert len(best_of_two.transcripts()) == 2 and not best_of_two.retried


def test_arguments_that_come_back_in_another_order_go_on_from_the_same_tokens():
    held = conversations(
        "{% for m in messages %}<turn>{{ m.role }}:{{ m.content }}{{ m.tool_calls }}<end>\n{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    asked = held.ask([user("a")], [])
    held.answered(asked, completion("call"), {**assistant(""), "tool_calls": [call]})
    back = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"b":2,"a":1}'}}
    again = held.ask([user("a"), {**assistant(""), "tool_calls": [back]}, {"role": "tool", "content": "4"}], [])
    assert again.before is held.nodes[0]


def test_contents_in_parts_are_joined_and_pictures_are_refused():
    held = conversations()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user:ab<end>" in say(held, [{"role": "user", "content": parts}], "one")
    with pytest.raises(Refused, match="'image_url'"):
        held.ask([{"role": "user", "content": [{"type": "image_url"}]}], [])


# The address.


def test_hundreds_may_connect_while_the_server_does_something_else():
    """Nothing is accepted here, because the event loop stands."""
    if int(Path("/proc/sys/net/core/somaxconn").read_text()) < 400:
        pytest.skip("this system keeps fewer connections waiting")

    async def connect() -> None:
        endpoint = Endpoint(READING, 500, {})
        await endpoint.start()
        url = endpoint.open(conversations(), None).url
        with ExitStack() as stack:
            for _ in range(400):
                address = "127.0.0.1", httpx.URL(url).port
                stack.enter_context(socket.create_connection(address, timeout=deadline(5)))
        await endpoint.close()

    asyncio.run(connect())


def test_an_answer_that_its_caller_did_not_wait_for_is_left_out():
    """A client that gives up and asks again has one answer of the two."""
    held, asked, gone, answers = conversations(), asyncio.Event(), asyncio.Event(), iter(["lost", "one"])

    async def ask(ids: list[int], call: Call) -> Completion:
        asked.set()
        await gone.wait()
        return completion(next(answers))

    async def run():
        endpoint = Endpoint(READING, 500, {})
        await endpoint.start()
        line = endpoint.open(held, ask)
        body = {"model": "any", "messages": [user("a")]}
        async with httpx.AsyncClient(timeout=deadline(30)) as impatient:
            waiting = asyncio.create_task(impatient.post(f"{line.url}/chat/completions", json=body))
            await asked.wait()
            waiting.cancel()
        async with httpx.AsyncClient(timeout=deadline(30)) as again:
            await again.get(f"{line.url}/models")  # when this is answered, the server has seen the other one go
            gone.set()
            told = (await again.post(f"{line.url}/chat/completions", json=body)).json()
        endpoint.end(line)
        await endpoint.close()
        return line, told["choices"][0]["message"]["content"]

    line, said = asyncio.run(run())
    assert said == "one" and line.num_abandoned == 1
    assert [text_of(transcript.ids) for _, transcript, _ in held.transcripts()] == ["one<end>"]


def test_openais_client_has_a_conversation():
    async def agent(url: str):
        turns = [user("a")]
        async with client(url) as model:
            assert [m.id for m in (await model.models.list()).data] == ["policy"]
            for text in ("b", "c"):
                given = await model.chat.completions.create(model="any", messages=turns, max_tokens=9, temperature=0.3)
                turns += [given.choices[0].message.model_dump(exclude_none=True), user(text)]
            return given

    given, held, calls = play(agent, "one", "two")
    assert (given.choices[0].message.content, given.choices[0].finish_reason) == ("two", "stop")
    node = held.nodes[1]
    assert given.usage.completion_tokens == 4 and given.usage.prompt_tokens == len(node.prompt) + node.num_before
    assert [call.max_tokens for call in calls] == [9, 9]
    [(_, transcript, path)] = held.transcripts()
    assert len(path) == 2 and sum(transcript.is_action) == 8


def test_calls_of_tools_arrive_as_tool_calls_and_go_on_with_their_results():
    text = 'I ask.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

    async def agent(url: str):
        async with client(url) as model:
            tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
            first = await model.chat.completions.create(model="m", messages=[user("a")], tools=tools)
            asked = first.choices[0].message
            [call] = asked.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
            assert (asked.content, first.choices[0].finish_reason) == ("I ask.", "tool_calls")
            result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
            turns = [user("a"), asked.model_dump(exclude_none=True), result]
            return await model.chat.completions.create(model="m", messages=turns, tools=tools)

    given, held, _ = play(agent, text, "2", template=WITH_CALLS)
    assert given.choices[0].message.content == "2"
    [(_, transcript, path)] = held.transcripts()
    assert len(path) == 2
    assert text_of(transcript.ids) == text + "<end>\n<turn>tool:2<end>\n<turn>assistant:2<end>"


def test_a_call_in_reasoning_that_the_prompt_opens_is_text():
    reading = TurnReading(FORMATS["hermes"], "</think>", text_of, "<think>\n")
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert reading.message(completion(f"so {call} hm"), {}) == assistant(f"so {call} hm")
    said = reading.message(completion(f"so</think>ok\n{call}"), {})
    assert said["content"] == "so</think>ok" and [one["function"]["name"] for one in said["tool_calls"]] == ["add"]


def test_a_stream_is_the_answer_in_one_piece():
    async def agent(url: str):
        async with client(url) as model:
            asked = {"model": "m", "messages": [user("a")], "stream": True}
            stream = await model.chat.completions.create(**asked, stream_options={"include_usage": True})
            plain = await model.chat.completions.create(**asked)
            return [piece async for piece in stream], [piece async for piece in plain]

    (pieces, plain), *_ = play(agent, "one", "two")
    assert all(piece.choices for piece in plain)  # agents read the first one
    choices = [piece.choices[0] for piece in pieces if piece.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "one"
    assert choices[-1].finish_reason == "stop" and pieces[-1].usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [user("a")], "n": 129}, "n: Input should be less than or equal to 128"),
        (
            {"messages": [user("a" * 600)]},
            "prompt is too long: 6.. tokens > 500 maximum. This model's maximum context length is rollout.max_prompt",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_and_says_why(request_, reason):
    async def agent(url: str):
        async with client(url) as model:
            with pytest.raises(BadRequestError, match=reason):
                await model.chat.completions.create(model="m", **request_)

    _, held, calls = play(agent)
    assert not held.nodes and not calls


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", "the request is no JSON"),
        (b"[" * 100_000, "the request is no JSON"),
        (b"[1]", "Input should be a valid dictionary"),
        ({"messages": "a"}, "messages"),
        ({"messages": ["a"]}, "messages.0"),
        ({"messages": [None]}, "messages.0"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": {"text": "a"}}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of type 'image_url'"),
        ({"messages": [user("a") | {"tool_calls": ["a"]}]}, "messages.0.tool_calls.0"),
        ({"messages": [user("a") | {"tool_calls": [{"function": None}]}]}, "messages.0.tool_calls.0.function"),
        ({"messages": [user("a")], "tools": ["a"]}, "tools.0"),
        ({"messages": [user("a")], "tools": [{"type": "function", "function": "add"}]}, "tools: "),
        *(({"messages": [user("a")], "max_tokens": wrong}, "max_tokens") for wrong in (-1, 0, 2.5, True, "8", [8])),
        ({"messages": [user("a")], "max_completion_tokens": -1}, "max_completion_tokens"),
        ({"messages": [user("a")], "n": "1"}, "n: "),
    ],
    ids=repr,
)
def test_a_malformed_request_is_refused_with_its_field_and_asks_the_engine_nothing(body, field):
    async def agent(url: str):
        async with httpx.AsyncClient() as http:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await http.post(f"{url}/chat/completions", content=content)

    given, held, calls = play(agent)
    assert given.status_code == 400 and field in given.json()["error"]["message"], given.text
    assert not held.nodes and not calls


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "user", "content": "a\ud800b"},
        {"role": "user", "content": [{"type": "text", "text": "\ud800"}]},
        {"role": "us\udfffer", "content": "a"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]},
    ],
    ids=repr,
)
def test_what_no_tokenizer_can_read_is_refused(turn):
    async def agent(url: str):
        async with httpx.AsyncClient() as http:
            return await http.post(f"{url}/chat/completions", content=json.dumps({"messages": [user("a"), turn]}))

    given, held, calls = play(
        agent, template=WITH_CALLS.replace("'function') | map('tojson')", "'function.arguments.a')")
    )
    assert given.status_code == 400 and len(given.text) < 1000, given.text
    assert re.search("unicode|surrogate pair|no JSON object", given.json()["error"]["message"])
    assert not held.nodes and not calls


@pytest.mark.parametrize("how", ["gzip", "deflate"])
def test_a_body_that_is_not_compressed_as_it_says_is_refused(how):
    async def agent(url: str):
        async with httpx.AsyncClient() as http:
            return await http.post(f"{url}/chat/completions", content=b"no gzip", headers={"content-encoding": how})

    given, *_ = play(agent)
    assert given.status_code == 400 and "body of the request cannot be read" in given.json()["error"]["message"]


def test_a_template_that_raises_on_the_answer_refuses_the_call():
    raises = KEEPS.replace("= m.content", "= (m.content if m.role == 'user' else m.content.absent())")

    async def agent(url: str):
        async with client(url) as model:
            with pytest.raises(BadRequestError, match="cannot render the conversation with the model's answer"):
                await model.chat.completions.create(model="m", messages=[user("a")])

    assert raises != KEEPS
    _, held, calls = play(agent, "one", template=raises)
    assert len(calls) == 1 and not held.nodes


def test_what_a_request_asks_for_without_effect_is_told_once_by_name(caplog):
    ignored = {
        "top_logprobs": 2,
        "tool_choice": "required",
        "logit_bias": {"5": 100},
        "response_format": {"type": "json_object"},
        "temperature": 0.5,
        "frequency_penalty": 1.0,
    }
    neutral = {
        "stop": None,
        "top_logprobs": 0,
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "temperature": 1,
        "user": "me",
    }

    async def agent(url: str):
        async with client(url) as model:
            for options in (neutral, ignored, ignored):
                await model.chat.completions.create(model="m", messages=[user("a")], **options)

    play(agent, "one", "two", "three")
    told = [record.getMessage() for record in caplog.records if "an agent asks" in record.getMessage()]
    assert sorted(message.split()[4] for message in told) == sorted(ignored)
    assert "an agent asks for top_logprobs 2, which is not supported and has no effect" in told
    assert "an agent asks for temperature 0.5, but the run samples with 1.0" in told


def test_an_unknown_charset_is_refused():
    async def agent(url: str):
        async with httpx.AsyncClient() as http:
            kind = {"content-type": "application/json; charset=no-such"}
            return await http.post(f"{url}/chat/completions", content=b"{}", headers=kind)

    assert play(agent)[0].status_code == 400


def test_an_answer_that_has_ended_is_no_longer_there():
    async def agent(url: str):
        async with httpx.AsyncClient() as http:
            wrong = url.replace(url.split("/")[3], "nobody")
            return [(await http.post(f"{wrong}/chat/completions", json={"messages": [user("a")]})).status_code]

    assert play(agent)[0] == [404]


def test_a_call_that_is_no_json_stays_text():
    text = "<tool_call>{name: add}</tool_call>"
    assert READING.message(completion(text), {}) == {"role": "assistant", "content": text}


# Agents.


def two_turns(row, base_url, question="b"):
    """An agent with a synchronous client, as people write them."""
    with OpenAI(base_url=base_url, api_key="any", max_retries=0) as model:
        turns = [user(row["name"])]
        for _ in range(2):
            given = model.chat.completions.create(model="m", messages=turns).choices[0].message.content
            turns += [assistant(given), user(question)]
    return float(len(turns))


async def best_of_two(row, base_url):
    async with client(base_url) as model:
        ask = model.chat.completions.create
        both = [await ask(model="m", messages=[user(row["name"])]) for _ in range(2)]
    return None if row["name"] == "none" else both[0].choices[0].message.content == both[1].choices[0].message.content


def breaks(row, base_url):
    two_turns(row, base_url)
    raise RuntimeError("the tool is gone")


async def exits(row, base_url):
    async with client(base_url) as model:
        await model.chat.completions.create(model="m", messages=[user(row["name"])])

    async def one():
        raise SystemExit(3)

    await asyncio.gather(one())


def interrupts(row, base_url):
    raise KeyboardInterrupt


async def cancels(row, base_url):
    raise asyncio.CancelledError


def silent(row, base_url):
    return 1.0


async def hangs(row, base_url):
    await asyncio.Event().wait()


def senseless(row, base_url):
    return "good"


def program(prompt, sample, left):
    raise AssertionError("agents have no budgets")


class Model:
    """Stands for the engine: its n-th answer is the number n, and it notes what it was asked."""

    def __init__(self) -> None:
        self.requests, self.begun = [], []

    async def begin(self, requests, is_first):
        assert not requests, "agents ask themselves"
        self.begun.append(is_first)
        return []

    async def ask(self, request):
        self.requests.append(request)
        return completion(str(len(self.requests)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    TOKENIZER.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END}))
    return folder


def agents(folder, agent, model: Model, **options) -> Agents:
    environment = AgentEnvironment(path=f"{__file__}:{agent}", **options)
    rollout = RolloutConfig(
        prompts_per_step=1,
        samples_per_prompt=1,
        max_prompt_tokens=100,
        max_response_tokens=200,
        delimiter="",
        environment=environment,
    )
    return Agents(folder, rollout, render_with(KEEPS), "hermes", model.ask)


def groups_of(playing: Agents, model: Model, names: list[str], num_samples: int = 1):
    asked = [
        EpisodeRequest(i, Prompt(name, (5, 6), "", {"name": name}), range(num_samples), 100 * i, False, program)
        for i, name in enumerate(names)
    ]

    async def run():
        try:
            return await asyncio.gather(*(playing.answers(one, model.begin) for one in asked))
        finally:
            await playing.close()

    return asyncio.run(asyncio.wait_for(run(), deadline(60)))


def test_an_agent_of_somebody_else_is_an_answer(folder):
    model = Model()
    playing = agents(folder, "two_turns", model, arguments={"question": "go"})
    [first, second] = groups_of(playing, model, ["x", "y"], 2)
    for name, group in (("x", first), ("y", second)):
        assert len(group) == 2
        for sample, tokens in group:
            text = text_of(tokens.ids)
            assert text.startswith(f"<turn>user:{name}<end>") and text.count("<turn>user:go<end>") == 1
            assert sample.num_prompt_tokens == len(ids_of(f"<turn>user:{name}<end>\n<turn>assistant:"))
            assert (sample.length, sample.num_actions) == (len(tokens.ids), int(tokens.action_mask.sum()))
            assert sample.episode.num_turns == 2 and not sample.episode.fault and sample.finish == "stop"
            assert tokens.ids[sample.episode.last_turn] == tokens.ids[-2] and tokens.action_mask[-2:].all()
            assert sample.token_rewards == ((sample.length - 1, "environment", 5.0),)
            said = tokens.conversation.turns
            assert [turn["role"] for turn in said] == ["assistant", "user", "assistant"] and said[1]["content"] == "go"
    assert model.begun == [True, False] and model.requests[0].call.max_tokens > 200
    assert len({request.seed for request in model.requests}) == 8, "each call has a seed of its own"


def test_conversations_that_branch_are_samples_with_the_same_reward(folder):
    model = Model()
    [group] = groups_of(agents(folder, "best_of_two", model), model, ["x"])
    assert [sample.token_rewards[0].value for sample, _ in group] == [0.0, 0.0]
    assert [tokens.action_mask.sum() for _, tokens in group] == [2, 2]
    [group] = groups_of(agents(folder, "best_of_two", model), model, ["none"])
    assert [(sample.token_rewards, sample.episode.fault) for sample, _ in group] == [((), ""), ((), "")]


@pytest.mark.parametrize(
    ("agent", "num_actions", "fault"),
    [
        ("breaks", 4, r"breaks raised RuntimeError: the tool is gone \(.*agents.py:\d+\)"),
        ("exits", 2, r"exits raised RuntimeError: it called sys.exit\(3\) \(.*agents.py:\d+\)"),
        ("interrupts", 0, r"interrupts raised RuntimeError: it raised KeyboardInterrupt \(.*agents.py:\d+\)"),
        ("cancels", 0, r"cancels raised RuntimeError: it raised asyncio.*CancelledError \(.*agents.py:\d+\)"),
        ("silent", 0, "silent did not ask the model"),
        ("hangs", 0, "hangs took more than rollout.environment.timeout_s = 0.2 s"),
        ("senseless", 0, "senseless returned 'good', which is no finite number and not None"),
    ],
)
def test_an_agent_that_fails_gives_no_reward_and_keeps_what_was_sampled(folder, agent, num_actions, fault):
    model, timeout_s = Model(), 0.2 if agent == "hangs" else 60
    [[(sample, tokens)]] = groups_of(agents(folder, agent, model, timeout_s=timeout_s, retries=0), model, ["x"])
    assert re.search(f"{fault}$", sample.episode.fault) and not sample.token_rewards
    assert tokens.action_mask.sum() == num_actions


def test_a_cancelled_group_ends(folder):
    model = Model()
    playing = agents(folder, "hangs", model)
    asked = EpisodeRequest(7, Prompt("x", (5,), "", {"name": "x"}), range(3), 1, False, program)

    async def run():
        answers = asyncio.ensure_future(playing.answers(asked, model.begin))
        while not playing._plays:
            await asyncio.sleep(0)
        playing.cancel(7)
        with pytest.raises(RuntimeError, match="the group was cancelled"):
            await answers
        await playing.close()

    asyncio.run(asyncio.wait_for(run(), deadline(30)))
