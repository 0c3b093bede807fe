"""Resources servers of NeMo Gym. The one here answers as its example_session_state_mgmt does, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientError, web
from patience import deadline

from megatron_rl.recipes.environment_libraries.nemo_gym import Malformed, items_of, messages_of, play, tools_of

ADD = {"type": "function", "name": "add", "description": "", "parameters": {"type": "object"}, "strict": True}
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "add 1, then 2"}], "tools": [ADD]},
    "initial": 3,
    "expected": 6,
}


@asynccontextmanager
async def serving(routes: dict):
    app = web.Application()
    app.add_routes([web.post(path, answer) for path, answer in routes.items()])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Counter:
    """A counter for each session, which its cookie names. The reward is whether it has the expected value."""

    def __init__(self, **verdict) -> None:
        self.counts: dict[str, int] = {}
        self.verified: list[dict] = []
        self.verdict = verdict
        self.routes = {"/seed_session": self.seed, "/add": self.add, "/verify": self.verify}

    async def seed(self, request):
        answer, session = web.json_response({}), str(len(self.counts))
        self.counts[session] = (await request.json())["initial"]
        answer.set_cookie("session", session)
        return answer

    async def add(self, request):
        given = await request.json()
        if given.get("die"):
            request.transport.close()
        if not isinstance(given.get("count"), int):
            return web.json_response({"detail": "count must be an integer"}, status=422)
        self.counts[request.cookies["session"]] += given["count"]
        return web.json_response({"success": True})

    async def verify(self, request):
        row = await request.json()
        self.verified.append(row)
        right = self.counts[request.cookies["session"]] == row["expected"]
        return web.json_response(self.verdict or row | {"reward": float(right)})


def call(name: str, arguments: str) -> dict:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def says(content: str, *calls: dict) -> dict:
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})


def episode(gym: Counter, *answers: dict, row: dict = ROW, finish: str = "stop", path: str = "", **arguments):
    """The reward of an episode in which the model answers so, and what the model was asked."""
    asked, remaining = [], iter(answers)

    async def complete(request):
        asked.append(await request.json())
        message = next(remaining)
        reason = "tool_calls" if "tool_calls" in message and finish == "stop" else finish
        return web.json_response({"choices": [{"message": message, "finish_reason": reason}]})

    async def run():
        async with serving(gym.routes) as url, serving({"/v1/chat/completions": complete}) as model:
            return await asyncio.wait_for(play(row, f"{model}/v1", url + path, **arguments), deadline(30))

    return asyncio.run(run()), asked


def test_an_episode_has_a_session_and_the_verifier_sees_all_of_it():
    gym = Counter()
    both = says("<think>I add.</think>Wait.", call("add", '{"count": 1}'), call("add", '{"count": 2}'))
    reward, asked = episode(gym, both, says("It is 6."))
    assert reward == 1.0 and gym.counts == {"0": 6}
    assert [turn["role"] for turn in asked[1]["messages"]] == ["user", "assistant", "tool", "tool"]
    assert asked[1]["messages"][1] == both, "the turn goes back as it was, so that its tokens are known"
    assert asked[0]["tools"] == [
        {"type": "function", "function": {n: ADD[n] for n in ("name", "description", "parameters")}}
    ]
    [seen] = gym.verified
    output = seen["response"]["output"]
    kinds = ["reasoning", "message", *["function_call"] * 2, *["function_call_output"] * 2, "message"]
    assert [item["type"] for item in output] == kinds
    assert output[0]["summary"] == [{"type": "summary_text", "text": "I add."}]
    assert [output[i]["content"][0]["text"] for i in (1, 6)] == ["Wait.", "It is 6."]
    assert (output[2]["arguments"], output[4]["output"]) == ('{"count": 1}', '{"success": true}')
    assert (seen["expected"], seen["response"]["tools"]) == (6, [ADD])


def test_episodes_at_the_same_time_have_sessions_of_their_own():
    gym = Counter()

    async def complete(request):
        turns = (await request.json())["messages"]
        count = turns[0]["content"]
        message = says("done") if len(turns) > 1 else says("", call("add", json.dumps({"count": int(count)})))
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})

    def row(n: int) -> dict:
        return {"responses_create_params": {"input": str(n), "tools": [ADD]}, "initial": 0, "expected": n % 5}

    async def run():
        async with serving(gym.routes) as url, serving({"/v1/chat/completions": complete}) as model:
            plays = [play(row(n), f"{model}/v1", url) for n in range(20)]
            return await asyncio.wait_for(asyncio.gather(*plays), deadline(30))

    assert asyncio.run(run()) == [1.0] * 5 + [0.0] * 15


def test_what_is_wrong_with_a_call_is_read_by_the_model():
    gym = Counter()
    calls = [call("add", '{"count": "x"}'), call("add", "no JSON"), call("verify", "{}"), call("add", '{"count": 3}')]
    reward, asked = episode(gym, says("", *calls), says("done"))
    results = [turn["content"] for turn in asked[1]["messages"][2:]]
    assert results[0] == '{"detail": "count must be an integer"}' and results[3] == '{"success": true}'
    assert json.loads(results[1])["error"].startswith("Invalid tool call arguments: JSONDecodeError")
    assert json.loads(results[2]) == {"error": "There is no tool 'verify'"}
    assert reward == 1.0 and len(gym.verified) == 1, "the model cannot ask the verifier"


def test_limits_end_an_episode_and_it_is_verified():
    again = says("", call("add", '{"count": 1}'))
    reward, asked = episode(Counter(), again, again, again, max_steps=3)
    assert (reward, len(asked)) == (1.0, 3)
    gym = Counter()
    reward, asked = episode(gym, again, finish="length")
    assert (reward, len(asked), gym.counts) == (0.0, 1, {"0": 3}), "the call of a turn that was cut is not made"


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        ({"reward": 0.0, "_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "no judge"}, "no judge"),
        ({"score": 1.0}, "gave no reward"),
    ],
)
def test_a_verifier_that_fails_gives_no_score(verdict, reason):
    with pytest.raises(RuntimeError, match=f"http://127.*/verify .*{reason}"):
        episode(Counter(**verdict), says("done"))


def test_faults_of_a_server_name_it():
    with pytest.raises(RuntimeError, match="elsewhere/seed_session .*404"):
        episode(Counter(), path="/elsewhere")
    with pytest.raises(ClientError, match="[Dd]isconnected"):
        episode(Counter(), says("", call("add", '{"die": true}')))
    with pytest.raises(ClientError, match="host 127.0.0.1:1"):
        asyncio.run(play(ROW, "http://127.0.0.1:1/v1", "http://127.0.0.1:1"))
    with pytest.raises(Malformed, match="`responses_create_params`.*'messages'"):
        episode(Counter(), row={"messages": []})


def test_histories_become_turns():
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I ask."}]},
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "2"},
        {"type": "function_call", "call_id": "2", "name": "add", "arguments": "{}"},
    ]

    def asks(number: str) -> dict:
        return {"id": number, "type": "function", "function": {"name": "add", "arguments": "{}"}}

    assert messages_of({"instructions": "Be kind.", "input": given}) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "I ask.", "tool_calls": [asks("1")]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "assistant", "content": "", "tool_calls": [asks("2")]},
    ]
    assert messages_of({"input": "a"}) == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"input": [{"type": "compaction"}]}, "an item of type 'compaction'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "a part of type 'input_image', but only text",
        ),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "a tool of type 'web_search', but only functions"),
    ],
)
def test_what_chat_completions_lack_is_refused(params, reason):
    with pytest.raises(Malformed, match=reason):
        messages_of(params)
        tools_of(params)


@pytest.mark.parametrize(
    ("text", "kinds", "texts"),
    [
        ("answer", ["message"], ["answer"]),
        ("", ["message"], [""]),
        ("<think>hm</think>answer", ["reasoning", "message"], ["hm", "answer"]),
        ("hm</think>\n\nanswer", ["reasoning", "message"], ["hm", "\n\nanswer"]),
        ("<think>no end", ["message"], ["<think>no end"]),
    ],
)
def test_a_thought_is_apart_from_the_answer(text, kinds, texts):
    items = items_of(says(text))
    assert [item["type"] for item in items] == kinds
    assert [(item.get("summary") or item["content"])[0]["text"] for item in items] == texts
