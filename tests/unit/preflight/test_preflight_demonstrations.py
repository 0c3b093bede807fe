"""The dry run divides and refuses supervised rows as the run does."""

from __future__ import annotations

from functools import partial

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_rl.data.demonstrations import Template, demonstrations_of
from megatron_rl.data.encode import rendered
from megatron_rl.data.rows import BadRow
from megatron_rl.preflight.tokenizer_files import ChatTemplate

USER, ANSWER = {"role": "user", "content": "hi there"}, {"role": "assistant", "content": "good day"}
THOUGHT = ANSWER | {"reasoning_content": "hm"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "get", "arguments": {"x": "y"}}}]}
RESULT = {"role": "tool", "content": '{"t": 20}'}


@pytest.mark.parametrize(
    "answer",
    [
        "{{ m.content }}",
        "<think>{{ m.reasoning_content or '' }}</think>{{ m.content }}",
        "{% if loop.last %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}",
        "{{ m.tool_calls | tojson if m.tool_calls else m.content }}",
    ],
)
@pytest.mark.parametrize("prompt", ["<a>", "<a><think>\n"])
def test_both_say_the_same(answer, prompt):
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<a>" + answer + "{% else %}<o>{{ m.content | tojson }}"
        "{% endif %}<end>\n{% endfor %}{% if add_generation_prompt %}" + prompt + "{% endif %}"
    )
    core = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", chat_template=source)
    renders = partial(rendered, tokenizer), ChatTemplate(source, {"eos_token": "<end>"}).render
    for turns in ([USER, ANSWER], [USER, THOUGHT], [USER, CALL, RESULT, ANSWER], [USER, THOUGHT, USER, THOUGHT]):
        for which in ("all", "last"):
            found = []
            for render in renders:
                try:
                    found.append(demonstrations_of({"messages": turns}, Template(render, ("<end>",), which)))
                except BadRow as error:
                    found.append(str(error))
            assert found[0] == found[1]
