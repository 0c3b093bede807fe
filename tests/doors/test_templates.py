"""The chat templates of models, as TRL has them: their calls of tools are read as they were written, and their turns
continue a transcript, or are told to change it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import real  # noqa: F401  # skips
import trl

from megatron_rl.environments import FORMATS, ChangedHistory, Continuation, calls_of, format_of
from megatron_rl.environments.asked_calls import QUESTION, AskedCall, Render, rendering_calls, without_end, written
from megatron_rl.preflight.tokenizer_files import ChatTemplate

FOLDER = Path(trl.__file__).parent / "chat_templates"
KINDS = {"text": "string", "count": "integer", "flag": "boolean", "parts": "array", "how": "object"}
TOOL = {
    "type": "function",
    "function": {
        "name": "edit_file",
        "description": "Edit a file.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": kind, "description": "what"} for name, kind in KINDS.items()},
            "required": ["text"],
        },
    },
}
ARGUMENTS = {"text": 'a\n  b "c" é <x> 6', "count": 6, "flag": True, "parts": [1, "two", {"k": None}], "how": {"x": 1}}
QWEN, GLM = ["<|im_end|>"], ["<|user|>", "<|observation|>"]
MODELS = {
    # file: (ends of turns, format, whether a turn has one call only, whether thoughts of earlier turns stay with tools)
    "qwen2_5": (QWEN, "hermes", False, True),
    "qwen3": (QWEN, "hermes", False, True),
    "qwen3_5_think": (QWEN, "qwen3_coder", False, True),
    "qwen3_6": (QWEN, "qwen3_coder", False, True),
    "qwen3_8": (QWEN, "qwen3_coder", False, True),
    "nemotron_3_nano": (QWEN, "qwen3_coder", False, True),
    "glm4moe": (GLM, "glm", False, True),
    "gptoss": (["<|return|>", "<|call|>"], "gpt_oss", True, True),
    "llama3_1": (["<|eot_id|>"], "llama3", True, False),
    "deepseekv3": (["<｜end▁of▁sentence｜>"], "deepseek", False, False),
}


def renderer(file: str, end: str) -> Render:
    template = ChatTemplate((FOLDER / f"{file}.jinja").read_text(), {"bos_token": "<bos>", "eos_token": end})

    def render(turns: Any, opens_answer: bool) -> str:
        text = template.render(turns, opens_answer, {"tools": [TOOL]})
        assert text is not None
        return text

    return render


@pytest.mark.parametrize("file", MODELS)
def test_what_a_template_writes_is_read_as_the_same_calls(file):
    ends, form, is_single, _ = MODELS[file]
    render = renderer(file, ends[0])
    assert format_of(render, ends, "edit_file") == form
    schemas = {"edit_file": TOOL["function"]["parameters"]}
    for count in (1,) if is_single else (1, 2):
        asked = [AskedCall(0, 0, True, "edit_file", ARGUMENTS) for _ in range(count)]
        turn = {"role": "assistant", "content": "", "tool_calls": list(map(written, asked))}
        text, end = without_end(rendering_calls(render)([QUESTION, turn], False), ends)
        opened = render([QUESTION], True)
        text = text.removeprefix(opened if text.startswith(opened) else render([QUESTION], False))
        found = calls_of(text + end * FORMATS[form].reads_end, FORMATS[form], schemas)
        assert [(call.name, dict(call.arguments), call.fault) for call in found] == [
            ("edit_file", ARGUMENTS, "")
        ] * count


@pytest.mark.parametrize("file", MODELS)
def test_a_transcript_continues_with_the_result_of_a_tool(file):
    ends, _, _, keeps = MODELS[file]
    render = renderer(file, ends[0])
    if not keeps:
        with pytest.raises(ChangedHistory):
            Continuation(render, ends, "tool", "</think>")
        return
    continuation = Continuation(render, ends, "tool", "</think>")
    text = continuation.text([{"role": "tool", "name": "edit_file", "content": "done"}])
    assert text.startswith(continuation.end) and "done" in text
    assert render([QUESTION], True)[-12:].strip() in text, "the next turn begins as the first one"
    assert continuation.begins_next == (file == "glm4moe")
