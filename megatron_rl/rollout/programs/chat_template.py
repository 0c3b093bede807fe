"""The chat template of a model: its text, how it continues turns, and how it writes calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.environments import FORMATS, Continuation, Render, format_of, schemas_of
from megatron_rl.rollout.vocabulary import load_tokenizer, stop_ids

RenderCall = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]
"""The chat template: (turns, tools, whether the text ends where the assistant's answer begins) -> the text."""
ANY_TOOL = {
    "type": "function",
    "function": {
        "name": "some_tool",
        "description": "Some tool.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "a text"}}},
    },
}
"""What a chat template is asked with about the calls of an agent, whose tools are not known."""
OTHER_FORMAT = (
    f"the chat template asks for calls of tools in another format than {', '.join(FORMATS)}; give the folder a "
    "chat_template.jinja with one of them, or let an environment of the kind class read the model's own format"
)


def chat_template(folder: Path, arguments: Mapping[str, Any]) -> RenderCall:
    """The chat template of a model.

    Args:
        arguments: the arguments of all conversations, `data.chat_template`.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def render(turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], opens_answer: bool) -> str:
        given = {**arguments, **({"tools": list(tools)} if tools else {})}
        options = {**given, "add_generation_prompt": opens_answer, "tokenize": False}
        return str(tokenizer.apply_chat_template([dict(turn) for turn in turns], **options))

    return render


def call_format_of(folder: Path, environment: EnvironmentConfig, render: RenderCall) -> str:
    """The format of an environment's calls of tools.

    Raises:
        ValueError: the chat template asks for calls in a format that this project does not know.
    """
    if environment.kind == "class" or environment.format is not None:
        return getattr(environment, "format", None) or "hermes"
    tools = schemas_of(environment) or [ANY_TOOL]
    form = format_of(lambda turns, opens: render(turns, tools, opens), ends_of(folder), tools[0]["function"]["name"])
    if form == "other" and environment.kind == "tools":
        raise ValueError(f"rollout.environment: {folder}: {OTHER_FORMAT}")
    return form if form in FORMATS else "hermes"


def ends_of(folder: Path) -> list[str]:
    """The texts of the tokens that end a turn of a model."""
    tokenizer = load_tokenizer(folder)
    return [token for i in stop_ids(folder) if (token := tokenizer.id_to_token(i)) is not None]


def continuation_of(folder: Path, rollout: RolloutConfig, render: Render) -> Continuation:
    """What the chat template of a model writes between the turns of an answer.

    Raises:
        ValueError: the chat template cannot continue a transcript.
    """
    assert rollout.environment is not None, "only answers of several turns need it"
    role = "tool" if rollout.environment.kind == "tools" else "user"
    try:
        return Continuation(render, ends_of(folder), role, rollout.delimiter)
    except ValueError as error:
        raise type(error)(f"rollout.environment: {folder}: {error}") from error
