"""Text and chat turns to token ids.

Invariants: plain text gets no token that it does not hold; chat turns get what the model's template says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from megatron_rl.data.rows import BadRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def chat_ids(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, str]], add_generation_prompt: bool
) -> list[int]:
    """Ids of a conversation; with `add_generation_prompt`, up to where the assistant's answer starts.

    Raises:
        ValueError: the tokenizer has no chat template.
        BadRow: the template refuses the turns.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat template: give rows with "
            f"`prompt` (plain text), or a model folder with chat_template.jinja"
        )
    try:
        return list(
            tokenizer.apply_chat_template(
                [dict(turn) for turn in turns],
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
            )
        )
    except TemplateError as error:
        raise BadRow(f"the chat template refuses `messages`: {error}") from error
