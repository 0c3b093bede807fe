"""A teacher's server: what is asked, what is read, and replies that make no sense."""

from __future__ import annotations

import asyncio

import pytest
from service_server import serving

from megatron_rl.config.teachers import TeacherConfig
from megatron_rl.verifiers.teacher_server import ATTEMPTS, TeacherServer


class Letters:
    def decode(self, ids, *, skip_special_tokens):
        return "".join(chr(97 + i) for i in ids)


def entry(token: int, text: str | None = None, logp=-0.5):
    return {str(token): {"logprob": logp * token, "rank": 1, "decoded_token": text or chr(97 + token)}}


def asked(reply, texts=(((1, 2, 3), 2), ((4, 5), 1)), checks=()):
    """(what the server gave, or its error; the requests)"""
    with serving(reply) as served:
        server = TeacherServer(TeacherConfig(server=served.url, model="big"), "teachers.0")

        async def ask():
            if checks:
                await server.check(Letters(), checks)
            return await server.score(texts)

        try:
            return asyncio.run(ask()), served.bodies
        except ValueError as error:
            return str(error), served.bodies


def right(body, earlier):
    return 200, {"choices": [{"prompt_logprobs": [None, *(entry(token) for token in body["prompt"][1:])]}]}


def test_the_last_tokens_have_their_log_probs():
    given, bodies = asked(right)
    assert given == [[-1.0, -1.5], [-2.5]]
    expected = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, "model": "big"}
    assert sorted(bodies, key=str) == [{**expected, "prompt": ids} for ids in ([1, 2, 3], [4, 5])]


@pytest.mark.parametrize(
    "entries",
    [None, [None], [None, entry(2), entry(2)], [None, entry(2), entry(3, logp=float("nan"))], [None, entry(2), {}]],
)
def test_a_reply_without_each_tokens_log_prob_is_none(entries):
    reply = {"choices": [{"prompt_logprobs": entries}] if entries else []}
    told, bodies = asked(lambda body, earlier: (200, reply), texts=[((1, 2, 3), 2)])
    assert "makes no sense" in told and "teachers.0" in told and len(bodies) == ATTEMPTS


def test_a_server_that_recovers_is_asked_again():
    given, bodies = asked(lambda body, earlier: right(body, 0) if earlier else (503, "busy"), texts=[((1, 2), 1)])
    assert given == [[-1.0]] and len(bodies) == 2


def test_the_first_token_with_another_text_is_named():
    def other(body, earlier):
        texts = ["?" if token in (3, 4) else None for token in body["prompt"][1:]]
        told = [entry(token, text) for token, text in zip(body["prompt"][1:], texts, strict=True)]
        return 200, {"choices": [{"prompt_logprobs": [None, *told]}]}

    assert asked(right, checks=range(6))[0] == [[-1.0, -1.5], [-2.5]]
    told, _ = asked(other, checks=range(6))
    assert told.startswith("teachers.0: token 3 is 'd' for the policy, and '?' for the teacher's server")
