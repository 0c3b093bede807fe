"""An answer of several turns: the model's, and what an environment answers to them.

The environment begins while the first turn is sampled. A turn ends with an end-of-sequence token of the model, which
stays where it is, as an action. The environment gets the text of the turn, and the tokens of its observation are
appended. Then the next call begins.

If the chat template changes earlier turns (most remove their reasoning), a turn may begin with another history than
the model has sampled. Then the answer has several conversations, each a sample with a prompt of its own.

    <user>q<assistant>  so</think>call<end>  <tool>4<end><assistant>  hm</think>it is 4<end>    keeps: one sample
    <user>q<assistant>  so</think>call<end>                                                     changes: two
    <user>q<assistant>call<end><tool>4<end><assistant>  hm</think>it is 4<end>

Invariants (tests/unit/rollout): observations are no actions; each sampled token is an action of one sample, and is not
made again from text there; the tokens of all turns and observations of a conversation are at most
`rollout.max_response_tokens`, and so are the sampled tokens of all; however the environment ends, the answer has all
tokens that were sampled.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from socket import gethostname
from typing import Any

from jinja2 import TemplateError

from megatron_rl.config.environment import CHOOSES, EnvironmentConfig, TurnsEnvironment
from megatron_rl.config.exception_text import said
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.environments import (
    FORMATS,
    ChangedHistory,
    Closing,
    Continuation,
    EnvironmentFault,
    EnvironmentTimeout,
    Observations,
    Reaction,
    Render,
    Schemas,
    Session,
    as_turn,
    calls_of,
    format_of,
    schemas_of,
)
from megatron_rl.environments.asked_calls import QUESTION, rendering_calls
from megatron_rl.environments.observations import opening_of
from megatron_rl.rollout.program import (
    Bounded,
    Call,
    Completion,
    Program,
    Samples,
    Transcript,
    as_rollout,
    next_call,
)
from megatron_rl.rollout.programs.conversations import RenderCall
from megatron_rl.rollout.vocabulary import load_tokenizer, stop_ids
from megatron_rl.types import Conversation, Episode, Prompt, Rollout, TokenReward

TurnProgram = Callable[[Prompt, int | None], Program]
"""The program of a turn, from all tokens before it and what is left of the budget of all turns, in thought tokens."""

Ask = Callable[[list[int], Call, int], Awaitable[Completion]]
"""Sample what follows these tokens, in this conversation of the answer."""


log = logging.getLogger(__name__)

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


class Turns:
    """How an engine carries out answers of several turns.

    Args:
        folder: the model's.
        rollout: with an environment.
        render: the chat template.
        new_session: makes the environment of an answer.
        form: the format of calls.

    Raises:
        ValueError: the chat template cannot continue a transcript.
    """

    def __init__(
        self,
        folder: Path,
        rollout: RolloutConfig,
        render: RenderCall,
        new_session: Callable[[], Session],
        form: str = "hermes",
    ) -> None:
        assert isinstance(rollout.environment, TurnsEnvironment), "only answers of several turns need it"
        self._limits, self._most, self._new_session = rollout.environment, rollout.max_response_tokens, new_session
        self._render, self._max_prompt, self._end_of_thought = render, rollout.max_prompt_tokens, rollout.delimiter
        self._tokenizer, self._form = load_tokenizer(folder), FORMATS[form]
        tools = schemas_of(rollout.environment)
        rendered: Render = lambda turns, opens: render(turns, tools, opens)  # noqa: E731
        self._continuation: Continuation | None = None
        self._opening = opening_of(rendered([QUESTION], True), rollout.delimiter)
        try:
            self._continuation = continuation_of(folder, rollout, rendered)
        except ChangedHistory:
            if self._limits.history == "refuse":
                raise
        ends = ends_of(folder)
        self._observations = Observations(ends, self._tokenizer, self._limits.max_observation_tokens)
        delimiter = self._tokenizer.encode(rollout.delimiter, add_special_tokens=False).ids
        self._delimiter = tuple(delimiter)
        self._schemas: dict[str, Schemas] = {}
        special = [t.content for t in self._tokenizer.get_added_tokens_decoder().values() if t.special]
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    @property
    def retries(self) -> int:
        return self._limits.retries

    @property
    def has_objects(self) -> bool:
        """Whether objects have a part in the prompt, so that the first turn waits for them."""
        return self._limits.kind == "tools" and self._limits.objects is not None

    def begun(self, prompt: Prompt, program_of: TurnProgram) -> Turn:
        """The first turn of an answer, up to its first call.

        Args:
            program_of: the program of a turn.
        """
        return self._begun(_Played(prompt, [_Talk(prompt.token_ids)]), program_of)

    def _begun(self, played: _Played, program_of: TurnProgram) -> Turn:
        """The next turn, up to its first call. It has no call if there is no room for one."""
        talk, thinking = played.talks[-1], self._limits.thought_tokens
        left = None if thinking is None else max(0, thinking - played.num_thought_tokens)
        program = program_of(replace(played.prompt, token_ids=tuple(talk.ids)), left)
        room = min(self._max_prompt + self._most - len(talk.ids), self._most - played.num_sampled)
        if self._continuation:
            room = self._most - len(talk.transcript.ids)
        turn = Turn(Bounded(program, min(room, self._limits.turn_tokens or room)))
        turn.call = next_call(turn.program, turn.transcript)
        return turn

    async def answer(
        self, prompt: Prompt, program_of: TurnProgram, first: tuple[Turn, Awaitable[Completion]] | None, ask: Ask
    ) -> Samples:
        """One answer: its conversations.

        Args:
            program_of: the program of a turn.
            first: the first turn, of `begun`, and the completion of its call, which is running; None: it has not begun.
            ask: samples the later calls, and the first one if it has not begun.
        """
        played = _Played(prompt, [_Talk(prompt.token_ids)])
        session, deadline = self._new_session(), time.monotonic() + (self._limits.answer_timeout_s or inf)
        own = {"prompt": list(prompt.messages)} if self.has_objects else {}
        beginning = asyncio.ensure_future(session.begin({**own, **prompt.columns}))
        try:
            if first is None:
                played.prompt, played.opening = self._opened(prompt, await beginning)
                played.talks = [_Talk(played.prompt.token_ids)]
                turn, running = self._begun(played, program_of), None
            else:
                turn, running = first
            while turn.call is not None:
                while turn.call is not None:
                    ids = [*played.talks[-1].ids, *turn.transcript.ids]
                    turn.sampled(await (running or ask(ids, turn.call, len(played.talks) - 1)))
                    running = None
                if not await self._goes_on(played, turn, session, beginning) or time.monotonic() > deadline:
                    break
                turn = self._begun(played, program_of)
            if self.has_objects:
                played.ended(await session.closing())
        except EnvironmentFault as fault:
            if isinstance(fault, EnvironmentTimeout) and self._limits.timeout_reward is not None:
                played.timed_out(self._limits.timeout_reward)
            else:
                played.fault = str(fault)
        finally:
            beginning.cancel()
            await asyncio.gather(beginning, return_exceptions=True)
            await session.end()
        return played.samples()

    def _opened(self, prompt: Prompt, opening: str) -> tuple[Prompt, str]:
        """The prompt of an answer, with its own tools, and what its object appends.

        Raises:
            EnvironmentFault: it is too long.
        """
        assert not isinstance(prompt.messages, str), "rows with an environment are chats"
        *before, last = prompt.messages
        turns = (*before, {**last, "content": last["content"] + opening})
        text = self._render(turns, schemas_of(self._limits, prompt.columns), True)
        ids = self._tokenizer.encode(text.encode(errors="replace").decode(), add_special_tokens=False).ids
        if len(ids) > self._max_prompt:
            raise EnvironmentFault(
                f"with the text of reset the prompt has {len(ids)} tokens, but rollout.max_prompt_tokens is "
                f"{self._max_prompt}; raise it"
            )
        return replace(prompt, token_ids=tuple(ids), messages=turns), opening

    async def _goes_on(self, played: _Played, turn: Turn, session: Session, beginning: Awaitable[str]) -> bool:
        """Take a turn of the model, and what the environment answers. Returns whether another turn may follow."""
        talk = played.talks[-1]
        message = self._message(turn.transcript, self._parameters(played.prompt))
        talk.took(turn, self._delimiter)
        played.history.append({**message, "content": self._opening + message["content"]})
        played.said.append({**message, "content": self._special.sub("", message["content"])})
        if not turn.transcript.stopped:
            return False
        since = time.perf_counter()
        try:
            await beginning
            reaction = await session.react(self._said(turn.transcript))
        finally:
            played.seconds += time.perf_counter() - since
        played.took(reaction)
        if reaction.done:
            return False
        talk.transcript.stopped = False  # the answer continues in any case
        if played.num_turns == self._limits.max_turns:
            return False
        read = self._observations.read(reaction.messages)
        goes_on = self._continued(talk, read) if self._continuation else self._begun_again(played, read)
        played.said += read if goes_on else ()
        return goes_on

    def _continued(self, talk: _Talk, read: Sequence[Mapping[str, str]]) -> bool:
        """Append observations. Returns whether there is room for another turn."""
        assert self._continuation is not None, "asked by the caller"
        transcript = talk.transcript
        ends_otherwise = self._tokenizer.id_to_token(transcript.ids[-1]) != self._continuation.end
        if self._continuation.begins_next and ends_otherwise:  # the turn of another role has begun
            return False
        ids = self._observations.ids(self._continuation.text(read))
        if len(transcript.ids) + len(ids) >= self._most:
            return False
        transcript.force(ids)
        return True

    def _begun_again(self, played: _Played, read: Sequence[Mapping[str, str]]) -> bool:
        """Append observations by a new conversation, or to the old one if the chat template has not changed it. Returns
        whether there is room for another turn; there is none if the template cannot render the model's turn."""
        played.history += read
        talk, question = played.talks[-1], played.prompt.messages
        assert not isinstance(question, str), "rows with an environment are chats"
        tools = schemas_of(self._limits, played.prompt.columns if self.has_objects else {})
        rendered = rendering_calls(lambda turns, opens: self._render(turns, tools, opens))
        if not talk.text:
            talk.text = rendered(question, True)
        try:
            text = rendered([*question, *played.history], True)
        except TemplateError as error:
            log.warning("an answer ends because the chat template cannot render it: %s", said(error))
            return False
        transcript = talk.transcript
        before = talk.text + self._decoded(transcript.ids[talk.num_read :])
        if text.startswith(before):
            ids = self._observations.ids(self._decoded(transcript.ids[-1:]) + text[len(before) :])
            if not self._has_room(played, len(talk.ids) + len(ids)):
                return False
            transcript.force(ids)
            talk.text, talk.num_read = text, len(transcript.ids)
            return True
        prompt_ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not self._has_room(played, len(prompt_ids)):
            return False
        transcript.stopped = True
        played.talks.append(_Talk(tuple(prompt_ids), text=text))
        return True

    def _has_room(self, played: _Played, size: int) -> bool:
        """Whether a token can be sampled after a conversation of this size."""
        return size < self._max_prompt + self._most and played.num_sampled < self._most

    def _parameters(self, prompt: Prompt) -> Schemas:
        """The schemas of the arguments of the tools that a row offers."""
        row = prompt.columns if self.has_objects else {}
        kind = str(row.get(CHOOSES))
        if kind not in self._schemas:
            own = [schema["function"] for schema in schemas_of(self._limits, row)]
            self._schemas[kind] = {tool["name"]: tool["parameters"] for tool in own}
        return self._schemas[kind]

    def _said(self, turn: Transcript) -> str:
        """The text of a turn, without its end if the format of calls does not need it."""
        ids = turn.ids[:-1] if turn.stopped and not self._form.reads_end else turn.ids
        return self._decoded(ids)

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _message(self, turn: Transcript, schemas: Schemas) -> dict[str, Any]:
        """What the model has said."""
        text, limits = self._said(turn), self._limits
        if limits.kind != "tools":
            return {"role": "assistant", "content": text}
        calls = calls_of(text, self._form, schemas, self._end_of_thought) if turn.stopped else []
        if limits.ends_at_malformed_calls and any(call.fault for call in calls):
            calls = []  # nothing was called
        return as_turn(text, self._form, calls)


@dataclass(slots=True)
class Turn:
    """A turn of the model that is sampled."""

    program: Program
    transcript: Transcript = field(default_factory=Transcript)
    call: Call | None = None
    """The call that is running, or comes next; None: the turn is complete."""

    def sampled(self, completion: Completion) -> None:
        self.transcript.sampled(completion)
        self.call = next_call(self.program, self.transcript)


@dataclass(slots=True)
class _Talk:
    """A conversation of an answer."""

    prompt_ids: tuple[int, ...]
    transcript: Transcript = field(default_factory=Transcript)
    turns: list[range] = field(default_factory=list)
    """The indices of each turn's tokens in the transcript."""
    thoughts: list[Rollout] = field(default_factory=list)
    """Each turn as an answer of its own, for its reasoning."""
    text: str = ""
    """The text of the prompt and of the first `num_read` tokens of the transcript; empty if nobody has asked for it."""
    num_read: int = 0

    @property
    def ids(self) -> list[int]:
        return [*self.prompt_ids, *self.transcript.ids]

    def took(self, turn: Turn, delimiter: Sequence[int]) -> None:
        start = len(self.transcript.ids)
        self.transcript.append(turn.transcript)
        self.turns.append(range(start, len(self.transcript.ids)))
        self.thoughts.append(as_rollout((), turn.transcript, delimiter or None, turn.program.thought_tokens)[0])


@dataclass(slots=True)
class _Played:
    """What has happened in one answer."""

    prompt: Prompt
    talks: list[_Talk]
    """Its conversations: one, unless the chat template has changed the history."""
    opening: str = ""
    said: list[Mapping[str, Any]] = field(default_factory=list)
    """All turns after the prompt, without special tokens."""
    history: list[Mapping[str, Any]] = field(default_factory=list)
    """The same turns for the chat template, as they were sampled."""
    state: Mapping[str, Any] | None = None
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """The rewards of turns, with the index of the last token of the turn in the transcript of its conversation."""
    errors: list[str] = field(default_factory=list)
    num_calls: int = 0
    seconds: float = 0.0
    fault: str = ""

    @property
    def num_turns(self) -> int:
        return sum(len(talk.turns) for talk in self.talks)

    @property
    def num_sampled(self) -> int:
        return sum(sum(talk.transcript.is_action) for talk in self.talks)

    @property
    def num_thought_tokens(self) -> int:
        return sum(turn.num_thought_tokens for talk in self.talks for turn in talk.thoughts)

    def took(self, reaction: Reaction) -> None:
        self.errors += reaction.errors
        self.num_calls += reaction.num_calls
        self._gave(reaction.reward)

    def timed_out(self, reward: float) -> None:
        self.talks[-1].transcript.stopped = False
        self._gave(reward)

    def ended(self, closing: Closing) -> None:
        self.state = closing.state
        self._gave(closing.reward)

    def _gave(self, reward: float | None) -> None:
        if reward is not None:
            self.rewards.append((len(self.talks[-1].transcript.ids) - 1, reward))

    def samples(self) -> Samples:
        """The conversations. The last one has what holds for the whole answer, and its finish is the finish of all. The
        rewards of several conversations are one, at the end of each."""
        finish = "stop" if self.talks[-1].transcript.stopped else "length"
        total = sum(value for _, value in self.rewards)
        found: Samples = []
        for number, talk in enumerate(self.talks):
            before, is_last = len(talk.prompt_ids), number == len(self.talks) - 1
            sample, tokens = as_rollout(talk.prompt_ids, talk.transcript, None)
            budgets = [turn.thought_budget for turn in talk.thoughts if turn.thought_budget is not None]
            uncut = [turn.num_thought_tokens for turn in talk.thoughts if not turn.thought_cut]
            rewards = (
                self.rewards if len(self.talks) == 1 else [(len(talk.transcript.ids) - 1, total)] * bool(self.rewards)
            )
            episode = Episode(
                num_turns=len(talk.turns),
                last_turn=before + (talk.turns[-1].start if talk.turns else 0),
                fault=self.fault,
                host=gethostname() if self.fault else "",
                conversation=number,
                continues=not is_last,
                thoughts=tuple(uncut) if budgets else (),
            )
            if is_last:
                errors, num_calls = tuple(self.errors), self.num_calls
                episode = replace(episode, tool_errors=errors, num_tool_calls=num_calls, step_s=self.seconds)
            sample = replace(
                sample,
                num_thought_tokens=sum(turn.num_thought_tokens for turn in talk.thoughts),
                thought_cut=any(turn.thought_cut for turn in talk.thoughts),
                thought_budget=sum(budgets) if budgets else None,
                token_rewards=tuple(TokenReward(before + i, "environment", value) for i, value in rewards),
                episode=episode,
                finish=finish,
            )
            said = Conversation(tuple(self.said), self.opening, self.state)
            found.append((sample, replace(tokens, conversation=said)))
        return found


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
