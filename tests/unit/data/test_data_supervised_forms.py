"""The forms of supervised rows besides ours."""

from __future__ import annotations

import json

import pytest

from megatron_rl.data.forms import Reading, recognise
from megatron_rl.data.rows import BadRow, FilledRow

SUPERVISED = Reading(is_supervised=True)
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
SYSTEM = {"role": "system", "content": "Be brief."}
HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}
CALL = {"type": "function", "function": {"name": "get", "arguments": {"city": None}}}
ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}
ADDED = [{"role": "user", "content": "Add.\n1 2"}, {"role": "assistant", "content": "3"}]


@pytest.mark.parametrize("kind", [dict, FilledRow])
@pytest.mark.parametrize(
    ("row", "form", "messages"),
    [
        ({"text": "once"}, "language modelling", "once"),
        ({"conversations": [HUMAN, GPT]}, "ShareGPT", [USER, ANSWER]),
        ({"conversations": json.dumps([HUMAN, GPT])}, "ShareGPT", [USER, ANSWER]),
        ({"conversations": [{"from": "system", "value": "Be brief."}, HUMAN, GPT]}, "ShareGPT", [SYSTEM, USER, ANSWER]),
        ({"conversations": [HUMAN, GPT], "system": "Be brief."}, "ShareGPT", [SYSTEM, USER, ANSWER]),
        ({"conversations": [USER, ANSWER]}, "ShareGPT", [USER, ANSWER]),
        (
            {"conversations": [HUMAN, {"from": "observation", "value": "20"}, GPT]},
            "ShareGPT",
            [USER, {"role": "tool", "content": "20"}, ANSWER],
        ),
        (ALPACA, "Alpaca", ADDED),
        (ALPACA | {"text": "### Instruction"}, "Alpaca", ADDED),
        (ALPACA | {"system": "Be brief.", "history": [["hi", "yo"]]}, "Alpaca", [SYSTEM, USER, ANSWER, *ADDED]),
        ({"instruction": "hi", "input": "", "output": "yo"}, "Alpaca", [USER, ANSWER]),
        ({"messages": [USER, ANSWER], "text": "hi"}, "messages", [USER, ANSWER]),
        ({"prompt": "hi", "completion": "yo", "label": "greeting"}, "text", "hi"),
        ({"messages": None, "text": "once", "chosen": None}, "language modelling", "once"),
    ],
)
def test_a_row_of_another_form_becomes_ours(kind, row, form, messages):
    before = json.dumps(row)
    question = recognise(kind(row), SUPERVISED)
    assert (question.form, messages) == (form, messages if isinstance(messages, str) else list(question.messages))
    assert json.dumps(row) == before


def test_a_call_of_sharegpt():
    call = {"from": "function_call", "value": json.dumps(CALL["function"])}
    question = recognise({"conversations": [HUMAN, call], "tools": json.dumps([{"name": "get"}])}, SUPERVISED)
    assert question.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert question.template == {"tools": [{"name": "get"}]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1", "chosen": "2", "rejected": "3"}, "which `megatron-rl dpo` trains on"),
        ({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}, "a row of preferences"),
        ({"prompt": "1", "completion": "2", "label": False}, "dpo.loss.kind=kto"),
        ({"prompt": "1", "completion": "2", "label": True}, "dpo.loss.kind=kto"),
        ({"input_ids": [1, 2]}, "`input_ids` are tokens already"),
        (
            {"question": "1"},
            r"must have one of `messages`, .* but this one has only \['question'\]; rename its columns",
        ),
        ({"messages": [USER], "prompt": [USER]}, "this one has both"),
        ({"text": ""}, "`text` must be text and not empty"),
        ({"conversations": []}, "`conversations` must be a list of turns and not empty"),
        (
            {"conversations": [{"from": "alien", "value": "hi"}]},
            r"`conversations\[0\]` is from 'alien', which is none of",
        ),
        ({"conversations": [{"from": "human", "value": None}]}, "must have `value` as text"),
        ({"conversations": [{"from": "function_call", "value": "get()"}]}, "is a call, but its `value` is not JSON"),
        ({"conversations": [{"from": "function_call", "value": "[1]"}]}, "must be JSON with `name` and `arguments`"),
        ({"conversations": ["hi"]}, r"`messages\[0\]` must have `role` and `content`"),
        ({"instruction": "Add.", "response": "3"}, "must have `output`"),
        ({"instruction": "Add.", "output": 3}, "`output` must be text, but it is 3"),
        (ALPACA | {"history": ["hi"]}, "`history` must be a list of pairs"),
    ],
)
def test_a_row_of_no_form_or_for_other_training_is_refused(row, message):
    with pytest.raises(BadRow, match=message):
        recognise(row, SUPERVISED)


@pytest.mark.parametrize("row", [{"text": "once"}, {"conversations": [HUMAN]}, ALPACA])
def test_prompts_have_no_such_forms(row):
    with pytest.raises(BadRow, match="`messages`"):
        recognise(row, Reading())
