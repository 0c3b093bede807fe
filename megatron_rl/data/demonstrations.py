"""Divides supervised rows into text that is given and text that is trained. Run and dry run use the same functions.

A trained turn is what the model would sample: it begins after the generation prompt, and ends with the stop token.

Invariants (tests/unit/data): the texts of a row together are what the chat template writes, up to the last stop token;
nothing of a trained turn is left out; before a trained turn the model sees in training what it sees when it answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from os.path import commonprefix
from typing import Any, Literal, NamedTuple

from megatron_rl.data.forms import Reading, recognise
from megatron_rl.data.rows import CALLS, BadRow, Row, Turns, text_of, turns_of
from megatron_rl.data.template_coverage import TAG, THOUGHTS, Turn, has_thought, require_answer, require_turns

TrainedTurns = Literal["all", "last", "whole"]
READING = Reading(is_supervised=True)
SWITCHES = ("enable_thinking", "thinking")
"""The arguments by which templates switch thoughts on and off."""


class Template(NamedTuple):
    """How chats are written."""

    render: Callable[[Sequence[Turn], bool, Row], str]
    """Writes turns, with a generation prompt or without, with further arguments of the chat template."""
    ends: tuple[str, ...]
    """The texts of the stop tokens."""
    turns: TrainedTurns
    """The turns of the assistant that are trained: `all` or `last`; or the `whole` row."""
    is_divisible: bool = True
    """Whether a chat may become several demonstrations."""


class Exchange(NamedTuple):
    """A text that is given, and the text that is trained after it."""

    given: str
    trained: str


class Demonstration(NamedTuple):
    """A row's parts."""

    parts: list[Exchange]
    is_chat: bool
    is_ended: bool
    """Whether the last part ends with a stop token."""


class _Rewritten(BadRow):
    """The template writes a trained turn, or what is before it, differently once later turns follow."""


def demonstrations_of(row: Mapping[str, Any], template: Template) -> list[Demonstration]:
    """The parts of a row that are trained, and the parts before them. It is one demonstration, unless the template
    writes earlier turns differently once later turns follow, as templates do that leave out earlier thoughts: then each
    trained turn is in a demonstration of its own, after what the model sees when it answers.

    Raises:
        BadRow: the row is bad for a reason that `load_supervised` lists.
    """
    question = recognise(row, READING)
    turns, first = question.messages, 0
    if question.form == "language modelling":
        text = str(turns)
        if not text.strip():
            raise BadRow("`text` is blank, so nothing would be trained; remove the row")
        return [Demonstration([Exchange("", text)], False, text.endswith(template.ends))]
    if isinstance(turns, str):
        completion = _ended(text_of(row, "completion"), template.ends)
        if not completion.strip():
            raise BadRow("`completion` is blank, so nothing would be trained; give it a text, or remove the row")
        parts = Exchange("", turns + completion) if template.turns == "whole" else Exchange(turns, completion)
        return [Demonstration([parts], False, completion.endswith(template.ends))]
    if question.form == "TRL":
        first = len(turns)
        turns += turns_of(row, "completion")
    if turns[-1]["role"] != "assistant":
        column = "completion" if first else "messages"
        raise BadRow(f"`{column}` must end with a turn of the role assistant, not {turns[-1]['role']}")
    if template.turns == "whole":
        return [Demonstration([Exchange("", template.render(turns, False, question.template))], True, True)]
    return _Chat(turns, question.template, template).divided(first)


def _weight(turn: Turn, i: int) -> int:
    """Whether a turn is trained, by the key `weight` of OpenAI's form."""
    weight = turn.get("weight", 1)
    if weight not in (0, 1):
        raise BadRow(f"turn {i + 1} has the `weight` {weight!r}; it is 1, which trains the turn, or 0, which does not")
    return int(weight)


def _ended(text: str, ends: tuple[str, ...]) -> str:
    """The text up to its last stop token; all of it if it has none. Of several stop tokens in a row, the first counts:
    the model samples nothing after it."""
    one = "|".join(map(re.escape, sorted(ends, key=len, reverse=True)))
    runs = list(re.finditer(rf"({one})(?:\s*(?:{one}))*", text)) if ends else []
    return text[: runs[-1].end(1)] if runs else text


@dataclass(frozen=True, slots=True)
class _Chat:
    turns: Turns
    arguments: Row
    template: Template

    def divided(self, first: int) -> list[Demonstration]:
        """
        Args:
            first: the first turn that may be trained.
        """
        trained = [i for i in range(first, len(self.turns)) if self.turns[i]["role"] == "assistant"]
        if self.template.turns == "last":
            trained = trained[-1:]
        trained = [i for i in trained if _weight(self.turns[i], i)]
        if not trained:
            raise BadRow("the `weight` of every turn that would be trained is 0; remove the row, or one of the weights")
        try:
            return [self._together(trained)]
        except _Rewritten:
            if not self.template.is_divisible:
                raise
            return [replace(self, turns=self.turns[: i + 1])._together([i]) for i in trained]

    def _together(self, trained: Sequence[int]) -> Demonstration:
        whole = self._written(self.turns)
        require_turns(self.turns, whole, self._written, trained)
        parts: list[Exchange] = []
        done = 0
        for i in trained:
            before, start, completion = self._answer(i, whole)
            if not before.startswith(whole[:done]):
                raise self._rewritten(i)
            parts.append(Exchange(before[done:], completion))
            done = start + len(completion)
        return Demonstration(parts, True, parts[-1].trained.endswith(self.template.ends))

    def _answer(self, i: int, whole: str) -> tuple[str, int, str]:
        """The text before a turn that is trained, with the generation prompt; where the trained text begins in the
        conversation; and the trained text."""
        if i == 0:
            hint = "" if len(self.turns) == 1 else "; begin with the user's turn, or set sft.turns to last"
            raise BadRow(f"the prompt has no tokens: turn 1 is the assistant's, and nothing is before it{hint}")
        before, text = self._written(self.turns[:i], True), self._written(self.turns[: i + 1])
        start = self._start(i, before, text)
        completion = _ended(text[start:], self.template.ends)
        self._require_answer(i, text[start:])
        if not any(end in completion for end in self.template.ends):
            completion += self._stop(i, text, whole)
        if i + 1 < len(self.turns):
            if not completion.endswith(self.template.ends):
                raise BadRow(
                    f"the chat template writes no stop token after turn {i + 1}, so the end of this turn cannot be "
                    "trained; set sft.turns to last"
                )
            if not whole.startswith(text[:start] + completion):
                raise self._rewritten(i)
        return before, start, completion

    def _start(self, i: int, before: str, text: str) -> int:
        """The place where an answer begins, after the generation prompt. If the template writes another prompt there,
        the two may differ in white space alone."""
        if text.startswith(before):
            return len(before)
        history, common = self._written(self.turns[:i]), len(commonprefix([before, text]))
        if common < len(history) or not before.startswith(history):
            raise BadRow("the chat template writes the earlier turns differently once the answer is there")
        self._require_answer(i, text[len(history) :])
        prompt, rest = before[len(history) :], before[common:]
        tags = list(TAG.finditer(prompt))
        if tags and not tags[-1][1] and not has_thought(self.turns[i]):
            raise BadRow(
                f"turn {i + 1} has no reasoning, but the model answers after the generation prompt {prompt!r}, which "
                f"opens it; {self._remedy(i)}"
            )
        if tags and tags[-1][1] and has_thought(self.turns[i]):
            hint = self._switched(i, True) or "use a chat_template.jinja whose prompt does not"
            raise BadRow(
                f"turn {i + 1} has reasoning, but the model answers after the generation prompt {prompt!r}, which ends "
                f"it; {hint}, or remove the reasoning"
            )
        if not rest.isspace():
            raise BadRow(
                f"the model answers turn {i + 1} after the generation prompt {prompt!r}, but the chat template does "
                f"not write {rest!r} of it before this answer; use a chat_template.jinja that does"
            )
        return len(text) - len(text[common:].lstrip())

    def _require_answer(self, i: int, completion: str) -> None:
        def write(turn: Turn) -> str:
            return self._written([*self.turns[:i], turn])[len(self._written(self.turns[:i])) :]

        require_answer(self.turns[i], i + 1, completion, write)

    def _stop(self, i: int, text: str, whole: str) -> str:
        """The stop token that the template writes at the beginning of the next turn; empty if there is none."""
        if not self.template.ends:
            return ""
        follow: list[Turn] = [{"role": "user", "content": "x"}]
        if any(self.turns[i].get(key) for key in CALLS):
            follow.insert(0, {"role": "tool", "content": "x", "name": "x", "tool_call_id": "x"})
        pattern = re.compile(rf"\s*(?:{'|'.join(map(re.escape, self.template.ends))})")
        if i + 1 < len(self.turns):
            found = pattern.match(whole, len(text)) if whole.startswith(text) else None
            return found[0] if found else ""
        # A template may leave a thought out as soon as another turn follows.
        visible = TAG.split(str(self.turns[i]["content"]))[-1]
        bare = {key: self.turns[i][key] for key in ("role", *CALLS) if key in self.turns[i]} | {"content": visible}
        for answer, turn in product((self.turns[i], bare), follow):
            try:
                text = self._written([*self.turns[:i], answer])
                longer = self._written([*self.turns[:i], answer, turn])
            except BadRow:  # the template knows no such turn
                continue
            if longer.startswith(text) and (found := pattern.match(longer, len(text))):
                return found[0]
        return ""

    def _remedy(self, i: int) -> str:
        """How the answer could come after the generation prompt, found by rendering it in other forms."""
        turn, found = self.turns[i], []
        before = self._written(self.turns[:i], True)
        for key in THOUGHTS[:4]:
            if self._fits(before, [*self.turns[:i], {**turn, key: "x"}], {}):
                found.append(f"give it reasoning in `{key}`")
                break
        if not found and self._fits(
            before, [*self.turns[:i], {**turn, "content": f"<think>\nx\n</think>\n\n{turn['content']}"}], {}
        ):
            found.append("begin its `content` with the reasoning, from <think> to </think>")
        if switched := self._switched(i, False):
            found.append(switched)
        return ", or ".join(found) or "use a chat_template.jinja whose generation prompt opens none"

    def _switched(self, i: int, thinks: bool) -> str:
        """The argument of the template that makes the generation prompt fit the answer; empty if none does."""
        for name in SWITCHES:
            if self._fits(None, self.turns[: i + 1], {name: thinks}):
                return f"give the row the column `chat_template_kwargs` with {json.dumps({name: thinks})}"
        return ""

    def _fits(self, before: str | None, turns: Sequence[Turn], switch: Row) -> bool:
        """Whether the last turn comes after the generation prompt."""
        try:
            if before is None:
                before = self.template.render(turns[:-1], True, self.arguments | switch)
            text = self.template.render(turns, False, self.arguments | switch)
            return not before[len(commonprefix([before, text])) :].strip()
        except BadRow:
            return False

    def _written(self, turns: Sequence[Turn], add_generation_prompt: bool = False) -> str:
        return self.template.render(turns, add_generation_prompt, self.arguments)

    def _rewritten(self, i: int) -> _Rewritten:
        return _Rewritten(
            f"the chat template writes turn {i + 1} differently once later turns follow, as templates do that leave "
            "out earlier reasoning; give the earlier turns in `prompt`, or use a chat_template.jinja that does not"
        )
