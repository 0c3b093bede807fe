"""Turns text and chat turns into token ids.

Invariants: no special token is added to plain text; chat turns get the text of the model's chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, UndefinedError

from megatron_rl.data.rows import BadRow
from megatron_rl.data.template_coverage import require_turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return batch_ids(tokenizer, [encodable(text)])[0]


def batch_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of each text."""
    ids: list[list[int]] = tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False
    )["input_ids"]
    return ids


def encodable(text: str) -> str:
    """The text itself.

    Raises:
        BadRow: the text is no valid Unicode, which JSON can write down, but no tokenizer can read.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"the text is no valid Unicode: {error}") from error
    return text


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    arguments: Mapping[str, Any],
) -> str:
    """The text of a conversation; with `add_generation_prompt`, up to the point where the assistant's answer starts.

    Args:
        arguments: further arguments of the chat template, such as `tools` and `enable_thinking`.

    Raises:
        ValueError: the tokenizer has no chat template.
        BadRow: the template refuses the turns, raises any other error, or leaves one out.
    """
    text = rendered(tokenizer, turns, add_generation_prompt, arguments)
    of_text = [turn for turn in turns if isinstance(turn["content"], str)]  # the others have images
    require_turns(of_text, text, lambda other: rendered(tokenizer, other, add_generation_prompt, arguments))
    return text


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    arguments: Mapping[str, Any],
) -> str:
    """The text of `chat_text`, which may leave out turns and parts of them."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat template; use rows with "
            f"`prompt` (plain text), or a model folder with chat_template.jinja"
        )
    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(turn) for turn in turns],
                **arguments,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        )
    except Exception as error:  # a template is a program: it adds texts to numbers, and asks texts for their items
        if isinstance(error, TemplateError) and not isinstance(error, UndefinedError):
            raise BadRow(f"the chat template refuses `messages`: {error}") from error
        raise template_fault(error, turns) from error


def template_fault(error: Exception, turns: Sequence[Mapping[str, Any]]) -> BadRow:
    """The error about a row on which a chat template raised what is not its own error."""
    kinds = {
        type(call.get("function", call).get("arguments")) for turn in turns for call in turn.get("tool_calls") or ()
    }
    hint = ""
    if str in kinds:
        hint = "; the arguments of a tool call are text, and this template may need a mapping"
    elif dict in kinds and "concatenate" in str(error):
        hint = "; the arguments of a tool call are a mapping, and this template may need JSON text"
    return BadRow(f"the chat template fails on this row: {type(error).__name__}: {error}{hint}")
