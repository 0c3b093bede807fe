"""Agents that ask in the forms of OpenAI's Responses and of Anthropic's Messages, with these companies' own clients,
and what chat completions can ask for beside one answer."""

from __future__ import annotations

import asyncio
import json
from socket import gethostname

import httpx
import pytest
from agent_conversations import READING, WITH_CALLS, client, completion, conversations, play, say, text_of, user
from anthropic import AsyncAnthropic
from patience import deadline
from tiny_chat import KEEPS

from megatron_rl.rollout.programs import endpoint as endpoint_module
from megatron_rl.rollout.programs.endpoint import Endpoint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = 'I ask.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
WHOLE = CALL + "<end>\n<turn>tool:2<end>\n<turn>assistant:It is 2.<end>"
"""What follows the question in each dialect: the call, its result and the answer."""


def anthropic(url: str) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="any", max_retries=0)


async def responses_agent(url: str, streams: bool):
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}, {"type": "web_search"}]
    turns: list = [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]

    async def ask():
        common = {"model": "m", "input": turns, "tools": tools, "instructions": "Be brief.", "store": False}
        if not streams:
            return await model.responses.create(**common)
        async with model.responses.stream(**common) as stream:
            return await stream.get_final_response()

    async with client(url) as model:
        first = await ask()
        [said, call] = first.output
        assert (said.content[0].text, call.name, json.loads(call.arguments)) == ("I ask.", "add", {"a": 1})
        turns += [one.model_dump(exclude_none=True) for one in first.output]
        turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "2"})
        last = await ask()
    return last.output_text, last.status, last.usage.output_tokens


async def messages_agent(url: str, streams: bool):
    tools = [{"name": "add", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}]
    turns: list = [{"role": "user", "content": "a"}]

    async def ask():
        common = {"model": "m", "max_tokens": 100, "messages": turns, "tools": tools, "system": "Be brief."}
        if not streams:
            return await model.messages.create(**common)
        async with model.messages.stream(**common) as stream:
            return await stream.get_final_message()

    async with anthropic(url) as model:
        first = await ask()
        [said, call] = first.content
        assert (said.text, call.name, call.input, first.stop_reason) == ("I ask.", "add", {"a": 1}, "tool_use")
        turns.append({"role": "assistant", "content": [one.model_dump(exclude_none=True) for one in first.content]})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "2"}]}
        turns.append({"role": "user", "content": [result]})
        counted = await model.messages.count_tokens(model="m", messages=turns, tools=tools, system="Be brief.")
        last = await ask()
        assert counted.input_tokens == last.usage.input_tokens
    return last.content[0].text, last.stop_reason, last.usage.output_tokens


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("agent", "status"), [(responses_agent, "completed"), (messages_agent, "end_turn")])
def test_a_conversation_with_a_tool_is_one_sample_in_every_dialect(agent, status, streams, caplog):
    answered, held, calls = play(lambda url: agent(url, streams), CALL, "It is 2.", template=WITH_CALLS)
    assert answered == ("It is 2.", status, len("It is 2.") + 1) and len(calls) == 2
    [(prompt, transcript, path)] = held.transcripts()
    assert "<turn>system:Be brief.<end>" in text_of(prompt) and text_of(transcript.ids) == WHOLE and len(path) == 2
    [told] = [one.getMessage() for one in caplog.records if "no functions" in one.getMessage()]
    assert "web_search" in told, "a tool that only the company's own server has"


def test_an_answer_that_a_limit_has_cut_says_so_in_every_dialect():
    async def agent(url: str):
        async with client(url) as model:
            turns = [{"role": "developer", "content": "Be brief."}, user("a")]
            response = await model.responses.create(model="m", input=turns, max_output_tokens=3)
        async with anthropic(url) as model:
            message = await model.messages.create(model="m", max_tokens=3, messages=[user("a")])
        return response.status, response.incomplete_details.reason, message.stop_reason

    answered, _, calls = play(agent, "one", "one", stopped=False)
    assert answered == ("incomplete", "max_output_tokens", "max_tokens") and [call.max_tokens for call in calls] == [
        3,
        3,
    ]


def test_an_answer_ends_before_a_text_that_the_agent_does_not_want():
    """What comes after the token that completes the text is no part of the sample."""

    async def agent(url: str):
        async with client(url) as model:
            turns = [user("a")]
            ask = model.chat.completions.create
            first = (await ask(model="m", messages=turns, stop=["Never", "Observation:"])).choices[0]
            turns += [first.message.model_dump(exclude_none=True), user("4")]
            await ask(model="m", messages=turns, stop="Never")
        async with anthropic(url) as model:
            last = await model.messages.create(model="m", max_tokens=99, messages=[user("b")], stop_sequences=["is"])
        return first.message.content, first.finish_reason, last.content[0].text, last.stop_sequence

    answered, held, _ = play(agent, "Act 2+2\nObservation: 5", "It is 4.", "This")
    assert answered == ("Act 2+2\n", "stop", "Th", "is")
    first, second = held.transcripts()
    end = "<end>\n<turn>user:4<end>\n<turn>assistant:"
    assert text_of(first[1].ids) == "Act 2+2\nObservation:" + end + "It is 4.<end>"
    assert text_of(second[1].ids) == "This" and not second[1].stopped
    assert len(first[1].logp) == len(first[1].version) == len(first[1].ids)


def test_several_answers_to_one_request_are_alternatives():
    """None of them is a retry of another one, although the agent goes on from the last one alone."""

    async def agent(url: str):
        async with client(url) as model:
            ask = model.chat.completions.create
            given = await ask(model="m", messages=[user("a")], n=3, logprobs=True)
            turns = [user("a"), given.choices[2].message.model_dump(exclude_none=True), user("b")]
            await ask(model="m", messages=turns)
            stream = await ask(model="m", messages=[user("c")], n=2, stream=True)
            pieces = [piece.choices[0] async for piece in stream if piece.choices]
        return given, {piece.index: piece.delta.content for piece in pieces if piece.delta.content}

    (given, streamed), held, calls = play(agent, "x", "yy", "z", "on", "p", "q")
    assert [choice.message.content for choice in given.choices] == ["x", "yy", "z"] and streamed == {0: "p", 1: "q"}
    assert [(one.token, one.logprob) for one in given.choices[1].logprobs.content] == [
        *[("y", -0.5)] * 2,
        ("<end>", -0.5),
    ]
    assert given.usage.completion_tokens == 7 and len(calls) == 6
    assert not held.retried and sum(sum(t.is_action) for _, t, _ in held.transcripts()) == 7 + 3 + 4


def test_calls_that_were_asked_together_are_no_retries():
    held = conversations()
    first, second = held.ask([user("a")], []), held.ask([user("a")], [])
    held.answered(first, completion("one"), {"role": "assistant", "content": "one"})
    held.answered(second, completion("two"), {"role": "assistant", "content": "two"})
    say(held, [user("a"), {"role": "assistant", "content": "two"}, user("b")], "three")
    assert not held.retried and len(held.transcripts()) == 2


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
WRONG = [
    ("responses", {}, "input: "),
    ("responses", {"input": []}, "input: "),
    ("responses", {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id: nothing is kept"),
    ("responses", {"input": [{"type": "reasoning"}]}, "'reasoning'"),
    ("responses", {"input": [IMAGE]}, "a part of type 'input_image'"),
    ("responses", {"input": ["a"]}, "another type"),
    ("responses", {"input": "a", "max_output_tokens": 0}, "max_completion_tokens"),
    ("responses", {"input": "a", "tools": [1]}, "another type"),
    ("responses", {"input": "a", "n": 2}, "n: a request to responses has one answer"),
    ("messages", {"messages": [user("a")], "n": 2}, "n: a request to messages has one answer"),
    ("messages", {"max_tokens": 9}, "messages"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part of type 'image'"),
    ("messages", {"messages": [user("a")], "max_tokens": -1}, "max_tokens"),
    ("messages", {"messages": [None]}, "another type"),
    ("messages/count_tokens", {"messages": []}, "messages"),
]


@pytest.mark.parametrize(("path", "body", "said"), WRONG, ids=lambda one: str(one)[:40])
def test_a_malformed_request_of_a_dialect_asks_the_engine_nothing(path, body, said):
    async def agent(url: str):
        async with httpx.AsyncClient() as http:
            return await http.post(f"{url}/{path}", json=body)

    given, held, calls = play(agent)
    assert given.status_code == 400 and said in given.json()["error"]["message"], given.text
    assert given.json().get("type") == ("error" if path.startswith("messages") else None)
    assert not held.nodes and not calls


def test_a_stream_shows_signs_of_life_until_its_answer_is_there(monkeypatch):
    monkeypatch.setattr(endpoint_module, "SIGN_OF_LIFE_S", 0.01)

    async def run():
        may_answer = asyncio.Event()

        async def ask(ids, call):
            await may_answer.wait()
            return completion("one")

        endpoint = Endpoint(READING, 500, {})
        await endpoint.start()
        url = endpoint.open(conversations(), ask).url
        async with httpx.AsyncClient(timeout=deadline(30)) as http:
            body = {"messages": [user("a")], "stream": True}
            async with http.stream("POST", f"{url}/chat/completions", json=body) as stream:
                lines = stream.aiter_lines()
                comments = [await anext(lines) for _ in range(3)]
                may_answer.set()
                rest = [line async for line in lines]
        await endpoint.close()
        return comments, rest

    comments, rest = asyncio.run(run())
    assert comments == [": the model answers", "", ": the model answers"]
    assert any('"content": "one"' in line for line in rest) and rest[-2:] == ["data: [DONE]", ""]


def test_a_body_that_does_not_arrive_ends_its_request(monkeypatch):
    monkeypatch.setattr(endpoint_module, "BODY_S", 0.05)

    async def agent(url: str):
        place = httpx.URL(url)
        reader, writer = await asyncio.open_connection(place.host, place.port)
        head = f"POST {place.path}/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        writer.write(head.encode() + b"{")
        status = await reader.readline()
        writer.close()
        return status

    status, held, calls = play(agent)
    assert b" 408 " in status and not held.nodes and not calls


def test_an_error_after_the_beginning_of_a_stream_is_an_event():
    raises = KEEPS.replace("= m.content", "= (m.content if m.role == 'user' else m.content.absent())")

    async def agent(url: str):
        async with httpx.AsyncClient() as http:
            body = {"messages": [user("a")], "stream": True}
            return [(await http.post(f"{url}/{path}", json=body)).text for path in ("chat/completions", "messages")]

    (chat, messages), held, _ = play(agent, "one", "two", template=raises)
    assert "cannot render the conversation" in chat and "cannot render the conversation" in messages
    assert messages.startswith("event: error\n") and not held.nodes


def test_other_machines_reach_the_server_by_the_name_of_this_one():
    async def addresses(remote: bool) -> tuple[str, str]:
        endpoint = Endpoint(READING, 500, {}, remote)
        await endpoint.start()
        line = endpoint.open(conversations(), None)
        async with httpx.AsyncClient() as http:
            listed = await http.get(f"{line.url}/models")
        [site] = endpoint._runner.sites
        await endpoint.close()
        assert listed.status_code == 200 and len(line.name) >= 22
        return httpx.URL(line.url).host, site.name.split("/")[2].split(":")[0]

    assert asyncio.run(addresses(False)) == ("127.0.0.1", "127.0.0.1")
    assert asyncio.run(addresses(True)) == (gethostname(), "0.0.0.0")
