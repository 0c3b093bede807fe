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
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from megatron_rl.config.environment import CHOOSES, TurnsEnvironment
from megatron_rl.config.exception_text import said
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.environments import (
    FORMATS,
    ChangedHistory,
    Continuation,
    EnvironmentFault,
    EnvironmentTimeout,
    Observations,
    Render,
    Schemas,
    Session,
    as_turn,
    calls_of,
    schemas_of,
)
from megatron_rl.environments.asked_calls import QUESTION, rendering_calls
from megatron_rl.environments.observations import opening_of
from megatron_rl.rollout.program import Bounded, Call, Completion, Program, Samples, Transcript, next_call
from megatron_rl.rollout.programs.chat_template import RenderCall, continuation_of, ends_of
from megatron_rl.rollout.programs.observed_images import ObservedImages
from megatron_rl.rollout.programs.played import Played, SampledTurn, Talk
from megatron_rl.rollout.vocabulary import load_tokenizer
from megatron_rl.types import Picture, Prompt

TurnProgram = Callable[[Prompt, int | None], Program]
"""The program of a turn, from all tokens before it and what is left of the budget of all turns, in thought tokens."""

Ask = Callable[[list[int], Sequence[Picture], Call, int], Awaitable[Completion]]
"""Sample what follows these tokens with these images, in this conversation of the answer."""


log = logging.getLogger(__name__)


class Turns:
    """How an engine carries out answers of several turns.

    Args:
        folder: the model's.
        rollout: with an environment.
        render: the chat template.
        new_session: makes the environment of an answer.
        form: the format of calls.
        images: the folder of the run's images (data/pictures.py).

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
        images: Path = Path(),
    ) -> None:
        assert isinstance(rollout.environment, TurnsEnvironment), "only answers of several turns need it"
        self._limits, self._most, self._new_session = rollout.environment, rollout.max_response_tokens, new_session
        self._render, self._max_prompt, self._end_of_thought = render, rollout.max_prompt_tokens, rollout.delimiter
        self._tokenizer, self._form = load_tokenizer(folder), FORMATS[form]
        self._images = ObservedImages(folder, images)
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

    def begun(self, prompt: Prompt, program_of: TurnProgram) -> SampledTurn:
        """The first turn of an answer, up to its first call.

        Args:
            program_of: the program of a turn.
        """
        return self._begun(Played(prompt, [Talk(prompt.token_ids, prompt.pictures)]), program_of)

    def _begun(self, played: Played, program_of: TurnProgram) -> SampledTurn:
        """The next turn, up to its first call. It has no call if there is no room for one."""
        talk, thinking = played.talks[-1], self._limits.thought_tokens
        left = None if thinking is None else max(0, thinking - played.num_thought_tokens)
        program = program_of(replace(played.prompt, token_ids=tuple(talk.ids)), left)
        room = min(self._max_prompt + self._most - len(talk.ids), self._most - played.num_sampled)
        if self._continuation:
            room = self._most - len(talk.transcript.ids)
        turn = SampledTurn(Bounded(program, min(room, self._limits.turn_tokens or room)))
        turn.call = next_call(turn.program, turn.transcript)
        return turn

    async def answer(
        self, prompt: Prompt, program_of: TurnProgram, first: tuple[SampledTurn, Awaitable[Completion]] | None, ask: Ask
    ) -> Samples:
        """One answer: its conversations.

        Args:
            program_of: the program of a turn.
            first: the first turn, of `begun`, and the completion of its call, which is running; None: it has not begun.
            ask: samples the later calls, and the first one if it has not begun.
        """
        played = Played(prompt, [Talk(prompt.token_ids, prompt.pictures)])
        session, deadline = self._new_session(), time.monotonic() + (self._limits.answer_timeout_s or inf)
        own = {"prompt": list(prompt.messages)} if self.has_objects else {}
        beginning = asyncio.ensure_future(session.begin({**own, **prompt.columns}))
        try:
            if first is None:
                played.prompt, played.opening = self._opened(prompt, await beginning)
                played.talks = [Talk(played.prompt.token_ids, prompt.pictures)]
                turn, running = self._begun(played, program_of), None
            else:
                turn, running = first
            while turn.call is not None:
                while turn.call is not None:
                    talk = played.talks[-1]
                    ids = [*talk.ids, *turn.transcript.ids]
                    turn.sampled(await (running or ask(ids, talk.pictures, turn.call, len(played.talks) - 1)))
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
        said = last["content"]
        own = opening if isinstance(said, str) else [{"type": "text", "text": opening}]
        turns = (*before, {**last, "content": said + own})
        text = self._render(turns, schemas_of(self._limits, prompt.columns), True)
        ids = self._tokenizer.encode(text.encode(errors="replace").decode(), add_special_tokens=False).ids
        ids = self._images.expanded(ids, prompt.pictures)
        if len(ids) > self._max_prompt:
            raise EnvironmentFault(
                f"with the text of reset the prompt has {len(ids)} tokens, but rollout.max_prompt_tokens is "
                f"{self._max_prompt}; raise it"
            )
        return replace(prompt, token_ids=tuple(ids), messages=turns), opening

    async def _goes_on(self, played: Played, turn: SampledTurn, session: Session, beginning: Awaitable[str]) -> bool:
        """Take a turn of the model, and what the environment answers. Returns whether another turn may follow."""
        talk = played.talks[-1]
        message = self._message(turn.transcript, self._parameters(played.prompt))
        talk.took(turn, self._delimiter)
        played.history.append(message)
        told = message["content"].removeprefix(self._opening)
        played.said.append({**message, "content": self._special.sub("", told)})
        if not turn.transcript.stopped:
            return False
        since = time.perf_counter()
        try:
            await beginning
            # A call is none in the reasoning, which the prompt may open; another environment reads what was sampled.
            opening = self._opening if self._limits.kind == "tools" else ""
            reaction = await session.react(opening + self._said(turn.transcript))
        finally:
            played.seconds += time.perf_counter() - since
        played.took(reaction)
        if reaction.done:
            return False
        talk.transcript.stopped = False  # the answer continues in any case
        if played.num_turns == self._limits.max_turns:
            return False
        messages, pictures = await self._images.taken(reaction.messages)
        read = self._observations.read(messages)
        go_on = self._continued if self._continuation else self._begun_again
        goes_on = go_on(played, read, pictures)
        played.said += read if goes_on else ()
        return goes_on

    def _continued(self, played: Played, read: Sequence[Mapping[str, Any]], pictures: tuple[Picture, ...]) -> bool:
        """Append observations. Returns whether there is room for another turn."""
        assert self._continuation is not None, "asked by the caller"
        talk = played.talks[-1]
        transcript = talk.transcript
        ends_otherwise = self._tokenizer.id_to_token(transcript.ids[-1]) != self._continuation.end
        if self._continuation.begins_next and ends_otherwise:  # the turn of another role has begun
            return False
        ids = self._images.expanded(self._observations.ids(self._continuation.text(read)), pictures)
        if len(transcript.ids) + len(ids) >= self._most:
            return False
        transcript.force(ids)
        talk.pictures += pictures
        return True

    def _begun_again(self, played: Played, read: Sequence[Mapping[str, Any]], pictures: tuple[Picture, ...]) -> bool:
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
        except (TemplateError, LookupError, TypeError, AttributeError, ValueError) as error:
            log.warning("an answer ends because the chat template cannot render it: %s", said(error))
            return False
        transcript = talk.transcript
        before = talk.text + self._decoded(transcript.ids[talk.num_read :])
        if text.startswith(before):
            ids = self._images.expanded(
                self._observations.ids(self._decoded(transcript.ids[-1:]) + text[len(before) :]), pictures
            )
            if not self._has_room(played, len(talk.ids) + len(ids)):
                return False
            transcript.force(ids)
            talk.pictures += pictures
            talk.text, talk.num_read = text, len(transcript.ids)
            return True
        pictures = talk.pictures + pictures
        prompt_ids = self._images.expanded(self._tokenizer.encode(text, add_special_tokens=False).ids, pictures)
        if not self._has_room(played, len(prompt_ids)):
            return False
        transcript.stopped = True
        played.talks.append(Talk(tuple(prompt_ids), pictures, text=text))
        return True

    def _has_room(self, played: Played, size: int) -> bool:
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
        """What the model has said, after what the prompt says of its turn."""
        text, limits = self._opening + self._said(turn), self._limits
        if limits.kind != "tools":
            return {"role": "assistant", "content": text}
        calls = calls_of(text, self._form, schemas, self._end_of_thought) if turn.stopped else []
        if limits.ends_at_malformed_calls and any(call.fault for call in calls):
            calls = []  # nothing was called
        return as_turn(text, self._form, calls)
