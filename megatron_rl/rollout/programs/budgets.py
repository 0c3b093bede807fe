"""Chooses the program that generates an answer, by the thinking budget of the configuration and the numbers of one
request.

Invariants (tests/unit/rollout): the budget counts from the first sampled token, also if the prompt has opened the
thought; an answer to a prompt that has closed its thought has no budget for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.rollout.program import Program
from megatron_rl.rollout.programs.beams import BeamSearch
from megatron_rl.rollout.programs.thinking import NativeBudget, OneCall, ThoughtAlone, TwoCallBudget
from megatron_rl.rollout.vocabulary import image_tokens, load_tokenizer, native_fault, thinking_faults, token_ids
from megatron_rl.types import Prompt

MAX_BLANKS = 8
"""The largest number of white-space tokens that a chat template appends to a thought that it has closed."""


class Budgets:
    """
    Args:
        folder: the model's.
        on_gpu: whether the engine runs on GPUs.

    Raises:
        ValueError: a text of `rollout.thinking` does not fit the tokenizer, the engine cannot keep the budget, the
            budgets do not fit into max_response_tokens, or `rollout.beams` does not fit (see `BeamSearch.of`).
    """

    def __init__(self, folder: Path, rollout: RolloutConfig, on_gpu: bool) -> None:
        self._thinking, self._most = rollout.thinking, rollout.max_response_tokens
        self.delimiter = token_ids(folder, rollout.delimiter) if rollout.delimiter else None
        """The tokens that end a thought; None if the model does not think."""
        self.opening: int | None = None
        """The token that opens a thought; None if the engine need not know."""
        self.closing: tuple[int, ...] | None = self.delimiter
        """The tokens that close a thought which has no room left; None if nothing does."""
        self.beams = BeamSearch.of(folder, rollout) if rollout.beams is not None else None
        """What follows a thought; None: the model answers itself."""
        if (thinking := self._thinking) is None:
            return
        assert self.delimiter is not None, "the configuration was validated"
        self._tokenizer = load_tokenizer(folder)
        is_native = thinking.mode == "native"
        opening = thinking.opening if is_native else None
        if thinking.mode == "truncate":
            self.closing = None
        elif thinking.closing is not None:
            self.closing = token_ids(folder, thinking.closing, "rollout.thinking.closing")
        if is_native:
            opened = token_ids(folder, thinking.opening, "rollout.thinking.opening")
            if len(opened) > 1:
                raise ValueError(
                    f"rollout.thinking.opening {thinking.opening!r} is the tokens {list(opened)}, but mode native "
                    "needs one token; set rollout.thinking.mode to two_call"
                )
            [self.opening] = opened
        faults = thinking_faults(self._tokenizer, rollout.delimiter, thinking.closing, opening)
        if {*self.delimiter, *(self.closing or ())}.intersection(image_tokens(folder)):
            faults.append("rollout.delimiter and rollout.thinking.closing may have no token that stands for images")
        if is_native and not on_gpu:
            assert self.closing is not None, "only mode truncate has none"
            faults += filter(None, [native_fault(self.delimiter, self.closing)])
        needed = thinking.thought_tokens.largest + len(self.closing or ()) + thinking.response_tokens
        if needed > self._most:
            faults.append(
                f"rollout.max_response_tokens ({self._most}) is below the largest of rollout.thinking's "
                f"thought_tokens + the closing's {len(self.closing or ())} tokens + response_tokens = {needed}; raise "
                "it"
            )
        if faults:
            raise ValueError("; ".join(faults))

    def of(self, prompt: Prompt, sample: int, left: int | None = None) -> Program:
        """The program that generates an answer, or a turn of one.

        Args:
            prompt: of a turn, all tokens before it.
            sample: the number of the answer within its group.
            left: what is left of the budget of all turns, in thought tokens; None: it has none.

        Raises:
            ValueError: the row has no usable budget, or the engine could not keep it, or `rollout.beams` has no thought
                to begin with.
        """
        thinking = self._thinking
        if thinking is None:
            return OneCall(self._most, self.delimiter)
        ids = prompt.token_ids
        if self.has_closed(ids):
            if self.beams is not None:
                raise ValueError(
                    f"prompt {prompt.uid} has closed its reasoning already, but with rollout.beams each answer begins "
                    "with it; change the chat template, or remove the row"
                )
            return OneCall(thinking.response_tokens)
        try:
            budget = prompt.thought_budgets[sample] if prompt.thought_budgets else thinking.of_row(prompt.columns)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.uid}: {error}") from None
        largest, most = thinking.thought_tokens.largest, thinking.response_tokens
        if not 0 <= budget <= largest:
            raise ValueError(f"prompt {prompt.uid} has a reasoning budget of {budget} tokens, not of 0 to {largest}")
        budget = budget if left is None else min(budget, left)
        delimiter, closing = self.delimiter, self.closing
        assert delimiter is not None, "the configuration was validated"
        if self.beams is None and thinking.mode != "native":
            return TwoCallBudget(delimiter, closing, budget, most)
        assert closing is not None, "only mode truncate has none"
        if self.beams is not None:
            return ThoughtAlone(delimiter, closing, budget)
        assert self.opening is not None, "mode native has one"
        before = next((size for size, token in enumerate(reversed(ids)) if token == self.opening), None)
        if before is None or _last(ids[len(ids) - before :], delimiter) is not None:
            raise ValueError(
                f"prompt {prompt.uid} does not open the reasoning with {thinking.opening!r}, where vLLM begins to "
                f"count; set rollout.thinking.opening to the token that does, or rollout.thinking.mode to two_call"
            )
        return NativeBudget(self.opening, delimiter, closing, budget, most, before)

    def has_closed(self, ids: Sequence[int]) -> bool:
        """Whether a prompt ends with a thought that is closed: after its last delimiter there is only white space."""
        assert self.delimiter is not None, "the configuration was validated"
        tail = list(ids[-len(self.delimiter) - MAX_BLANKS :])
        end = _last(tail, self.delimiter)
        if end is None:
            return False
        rest = tail[end + len(self.delimiter) :]
        return not self._tokenizer.decode(rest, skip_special_tokens=False).strip()


def _last(ids: Sequence[int], part: Sequence[int]) -> int | None:
    """The index at which the last `part` begins; None if there is none."""
    starts = range(len(ids) - len(part), -1, -1)
    return next((i for i in starts if tuple(ids[i : i + len(part)]) == tuple(part)), None)
