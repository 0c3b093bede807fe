"""What an agent has asked of a model, as a tree of tokens.

An agent sends a whole conversation in each call: it repeats the turns before it. The tokens that the model sampled in
these turns are known, and are not tokenised again. If a call begins with the conversation and the answer of an earlier
call, it continues that call, and only the text after it is tokenised. Calls with a common beginning that then differ
are branches: with other tools, with a shortened history, or of another agent. A call whose earlier turns the chat
template now renders in another way is a branch, too. If an agent asks the same call again and goes on from the later
answer only, the earlier answer had no effect, and is left out.

Invariants (tests/unit/rollout): the tokens of a call are the tokens of the previous call, followed by the text that the
chat template adds; they are the text that it renders for the whole conversation, if the answers are read as they were
sampled; each sampled token is an action of at most one sample.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_rl.config.exception_text import said
from megatron_rl.rollout.program import Completion, Transcript
from megatron_rl.rollout.programs.chat_template import RenderCall

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = Mapping[str, Any]
SHOWN = 40
MAX_SHOWN = 300
HALF = re.compile("[\ud800-\udfff]")
"""JSON can say it, but no tokenizer can read it."""


class Refused(ValueError):
    """A call that cannot be answered; the message is for the agent's author."""


@dataclass(eq=False)
class AnsweredCall:
    """A call that was answered."""

    messages: tuple[Message, ...]
    """The conversation with its answer, as `normalised`."""
    tools: str
    """The tools of the call as JSON."""
    rendered: str | None
    """The text of the conversation with its answer, without what follows the end of the answer. None if the template
    changes what is before the answer, so that no call goes on from it."""
    end: str
    """The text that the chat template adds at the end of the answer."""
    before: AnsweredCall | None
    """The call that it goes on from."""
    prompt: list[int]
    """The tokens before the first answer of the conversation."""
    transcript: Transcript
    """The tokens after them, up to the end of this answer."""
    num_before: int
    """The number of the transcript's tokens before this answer."""
    num_known: int
    """The number of answers that were there when it was asked."""
    is_last: bool = True
    """Whether no call goes on from it."""

    @property
    def path(self) -> list[AnsweredCall]:
        """The calls from the beginning of the conversation to this one."""
        return [*(self.before.path if self.before else ()), self]


@dataclass(eq=False)
class Asked:
    """A call that is to be answered."""

    messages: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]]
    text: str
    """What the chat template renders for the call."""
    before: AnsweredCall | None
    """The call that it goes on from; None if it begins a conversation."""
    prompt: list[int]
    transcript: Transcript
    num_known: int
    """The number of answers that were there when it was asked."""

    @property
    def ids(self) -> list[int]:
        """All tokens before the answer."""
        return [*self.prompt, *self.transcript.ids]


@dataclass
class Conversations:
    """
    Args:
        ends: the texts of the tokens that end a turn.
        splits: whether a call whose earlier turns are rendered in another way begins a conversation. If not, it is
            refused.
    """

    render: RenderCall
    tokenizer: Tokenizer
    ends: Sequence[str]
    splits: bool = True
    nodes: list[AnsweredCall] = field(default_factory=list)

    def ask(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Asked:
        """
        Raises:
            Refused: the chat template cannot render the turns or the tools, or it rewrites turns that were sampled.
        """
        wanted: tuple[Message, ...] = tuple(map(normalised, messages))
        key = json.dumps(tools, sort_keys=True)
        fitting = [n for n in self.nodes if n.tools == key and n.messages == wanted[: len(n.messages)]]
        before = max(fitting, key=lambda node: len(node.messages), default=None)
        if before is not None:  # the keys of arguments may have come back in another order
            wanted = (*before.messages, *wanted[len(before.messages) :])
        text = self._rendered(wanted, tools, True)
        if before is None and tools and text == self._rendered(wanted, [], True):
            raise Refused("the chat template does not show tools: use a model whose template writes `tools`")
        if before is not None and not self.splits:
            _require_beginning(before.rendered or "", text)
        if before is None or before.rendered is None or not text.startswith(before.rendered):
            return Asked(wanted, tools, text, None, self._ids(text), Transcript(), len(self.nodes))
        transcript = before.transcript.copy()
        [end, *after] = self._ids(before.end + text[len(before.rendered) :])
        # An answer that a limit has cut has no end of its own.
        transcript.force(after if transcript.stopped else [end, *after])
        return Asked(wanted, tools, text, before, before.prompt, transcript, len(self.nodes))

    def answered(self, asked: Asked, completion: Completion, answer: Message) -> None:
        """Note what the model answered.

        Args:
            answer: the turn that the agent gets.

        Raises:
            Refused: the chat template cannot render the conversation with the answer, or it rewrites turns before the
                answer, or it does not end it as the model does.
        """
        messages = (*asked.messages, normalised(answer))
        rendered = self._rendered(messages, asked.tools, False)
        text, end = None, self.ends[0]
        if rendered.startswith(asked.text) or not self.splits:
            _require_beginning(asked.text, rendered)
            cut, end = max((rendered.rfind(end), end) for end in self.ends)
            if cut < len(asked.text) or rendered[cut + len(end) :].strip():
                expected = ", ".join(map(repr, self.ends))
                raise Refused(
                    f"the model ends a turn with one of {expected}, but the chat template ends an answer with "
                    f"{rendered[-SHOWN:]!r}"
                )
            text = rendered[: cut + len(end)]
        num_before = len(asked.transcript.ids)
        asked.transcript.sampled(completion)
        if asked.before is not None:
            asked.before.is_last = False
        key, own = json.dumps(asked.tools, sort_keys=True), (asked.before, asked.prompt, asked.transcript)
        self.nodes.append(AnsweredCall(messages, key, text, end, *own, num_before, asked.num_known))

    @property
    def retried(self) -> list[AnsweredCall]:
        """The calls from which none goes on, although one goes on from the same call that was asked again when the
        answer was there. Answers that were asked for together are alternatives, and none is a retry."""
        return [
            node
            for i, node in enumerate(self.nodes)
            if node.is_last
            and any(
                not later.is_last
                and later.num_known > i
                and (later.tools, later.messages[:-1]) == (node.tools, node.messages[:-1])
                for later in self.nodes[i + 1 :]
            )
        ]

    def transcripts(self) -> list[tuple[list[int], Transcript, list[AnsweredCall]]]:
        """Each conversation that no other call goes on from, as the tokens of the prompt, the transcript and its calls,
        in the order of the last calls, without the calls of `retried`. An answer that several of them contain is an
        action of the first one alone."""
        found, seen, retried = [], set[int](), set(map(id, self.retried))
        for last in (node for node in self.nodes if node.is_last and id(node) not in retried):
            transcript = last.transcript.copy()
            for node in last.path:
                if id(node) in seen:
                    transcript.disown(range(node.num_before, len(node.transcript.ids)))
                seen.add(id(node))
            found.append((last.prompt, transcript, last.path))
        return found

    def _rendered(self, turns: Sequence[Message], tools: Sequence[Mapping[str, Any]], opens_answer: bool) -> str:
        try:
            return self.render(turns, tools, opens_answer)
        except Exception as error:  # templates raise jinja's errors and any others
            whole = "these messages" if opens_answer else "the conversation with the model's answer"
            raise Refused(f"the chat template cannot render {whole}: {said(error)}") from None

    def _ids(self, text: str) -> list[int]:
        if half := HALF.search(text):
            raise Refused(
                f"the messages have half of a surrogate pair, {half[0]!r}, which is no character, before "
                f"{text[half.end() : half.end() + SHOWN]!r}"
            )
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def normalised(message: Message) -> dict[str, Any]:
    """A turn as chat templates expect it: the content is text, and the arguments of a tool's call are an object.

    Raises:
        Refused: the content has other parts than text, or the arguments are no JSON object.
    """
    content = message.get("content") or ""
    if not isinstance(content, str):
        others = [part.get("type") for part in content if part.get("type") != "text"]
        if others:
            raise Refused(f"a message has a part of type {others[0]!r}, but only text can be answered")
        content = "".join(part["text"] for part in content)
    found = {"role": message.get("role"), "content": content}
    found |= {name: message[name] for name in ("name", "reasoning_content") if message.get(name)}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_normalised_call(call) for call in calls]
    return found


def _normalised_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments") or {}
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise Refused(f"the arguments of a tool's call are no JSON object: {str(arguments)[:MAX_SHOWN]!r}")
    return {"type": "function", "function": {"name": function.get("name"), "arguments": given}}


def _require_beginning(expected: str, text: str) -> None:
    if text.startswith(expected):
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, text, strict=False)) if a != b), min(len(expected), len(text))
    )
    raise Refused(
        f"the chat template rewrites earlier turns: from character {at} on it renders {text[at : at + SHOWN]!r}, but "
        f"what the model has seen is {expected[at : at + SHOWN]!r}. Use a template that keeps all turns, reasoning "
        "included, as they were"
    )
