"""The text whose last token has a reward model's score: a question with an answer to it.

Chat turns are the text of the chat template, without a generation prompt and up to its end. Plain text is the prompt,
the answer and the end-of-sequence token. Training and scoring read the same tokens. The score is the one at the last
token that is no padding token, which is where `AutoModelForSequenceClassification` of transformers reads it; so padding
tokens at the end are left out.

Invariant (tests/unit/data): the tokens of a chat are those of `apply_chat_template` of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.data.encode import encodable, plain_ids, rendered
from megatron_rl.data.forms import Reading, recognise
from megatron_rl.data.rows import BadRow, LongRow, Row, turns_of
from megatron_rl.data.template_coverage import Turn
from megatron_rl.types import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

READING = Reading(is_supervised=True)


def scored_text(row: Row, render: Callable[[Sequence[Turn], bool, Row], str], end: str) -> str:
    """The text of a row with `prompt` and `completion`, each as text or as chat turns. An answer as text to a chat is
    the assistant's turn; it may be empty. Without a prompt a text is scored as it is.

    Args:
        render: writes turns, with a generation prompt or without, with arguments of the chat template.
        end: the end-of-sequence token.

    Raises:
        BadRow: a column has a wrong value, or the template refuses the turns.
    """
    answer = row["completion"]
    if row.get("prompt") is None and isinstance(answer, str):
        return answer if answer.endswith(end) else answer + end
    question = recognise(row, READING)
    if isinstance(question.messages, str):
        if not isinstance(answer, str):
            raise BadRow(f"`prompt` is a text, and the answer is not: {answer!r}")
        text = question.messages + answer
        return text if text.endswith(end) else text + end
    turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else turns_of(row, "completion")
    return render([*question.messages, *turns], False, question.template)


def scored_ids(tokenizer: PreTrainedTokenizerBase, row: Row, padding: int | None) -> list[int]:
    """The tokens of `scored_text` without padding tokens at the end.

    Args:
        padding: the reward model's padding token (`padding_id`); None if it has none.

    Raises:
        BadRow: see `scored_text`.
        ValueError: chat turns, and the tokenizer has no chat template.
    """

    def render(turns: Sequence[Turn], add_generation_prompt: bool, arguments: Row) -> str:
        return rendered(tokenizer, turns, add_generation_prompt, arguments)

    ids = plain_ids(tokenizer, encodable(scored_text(row, render, str(tokenizer.eos_token or ""))))
    while ids and ids[-1] == padding:
        ids.pop()
    return ids


def scored_reader(tokenizer: PreTrainedTokenizerBase, padding: int | None, max_tokens: int) -> Callable[[Row], Tokens]:
    """A function that gives the tokens of a row with `prompt` and `completion`.

    Raises:
        BadRow: see `scored_text`, or the row has fewer than two tokens, or more than `max_tokens`.
    """

    def read(row: Row) -> Tokens:
        ids = scored_ids(tokenizer, row, padding)
        if len(ids) < 2:
            raise BadRow(f"prompt and answer have {len(ids)} tokens together; remove the row")
        if len(ids) > max_tokens:
            raise LongRow(f"the row has {len(ids)} tokens, but reward_model.max_tokens is {max_tokens}")
        return scored_tokens(np.array(ids, np.int32), 1)

    return read


def scored_tokens(ids: np.ndarray, num_common: int) -> Tokens:
    """Tokens of which those after the first `num_common` count as an answer, so that answers with the same beginning
    share it in a packed row. There is at least one on each side."""
    start = min(max(num_common, 1), len(ids) - 1)
    return Tokens(
        ids=ids,
        action_mask=np.arange(len(ids)) >= start,
        logp_rollout=np.zeros(len(ids), np.float32),
        version=np.full(len(ids), -1, np.int32),
    )


def with_common_prefix(chosen: Tokens, rejected: Tokens) -> tuple[Tokens, Tokens]:
    """The tokens of a pair, both with the beginning that they have in common as prompt."""
    shortest = min(len(chosen.ids), len(rejected.ids))
    differ = np.flatnonzero(chosen.ids[:shortest] != rejected.ids[:shortest])
    num_common = min(int(differ[0]) if len(differ) else shortest, shortest - 1)
    return scored_tokens(chosen.ids, num_common), scored_tokens(rejected.ids, num_common)
