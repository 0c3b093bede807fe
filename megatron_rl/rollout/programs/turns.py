"""An answer of several turns: the model's, and what an environment answers to them.

The environment begins while the first turn is sampled. A turn ends with an end-of-sequence token of the model, which
stays where it is, as an action. The environment gets the text of the turn, and the tokens of its observation are
appended. Then the next call begins.

Invariants (tests/unit/rollout): observations are no actions; no token is made again from text; the tokens of all turns
and observations together are at most `rollout.max_response_tokens`; however the environment ends, the answer has all
tokens that were sampled.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.environment import TurnsEnvironment
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.environments import (
    Closing,
    Continuation,
    EnvironmentFault,
    Observations,
    Reaction,
    Render,
    Session,
    as_turn,
    calls_of,
    schemas_of,
)
from megatron_rl.rollout.program import Call, Completion, Transcript, as_rollout, find_delimiter
from megatron_rl.rollout.programs.conversations import RenderCall
from megatron_rl.rollout.vocabulary import load_tokenizer, stop_ids
from megatron_rl.types import Conversation, Episode, Prompt, Rollout, TokenReward, Tokens

Ask = Callable[[Prompt, Transcript, Call], Awaitable[Completion]]
"""Sample the next tokens of a transcript."""


class Turns:
    """How an engine carries out answers of several turns.

    Args:
        folder: the model's.
        rollout: with an environment.
        render: the chat template.
        new_session: makes the environment of an answer.

    Raises:
        ValueError: the chat template cannot continue a transcript.
    """

    def __init__(
        self,
        folder: Path,
        rollout: RolloutConfig,
        render: RenderCall,
        new_session: Callable[[], Session],
    ) -> None:
        assert isinstance(rollout.environment, TurnsEnvironment), "only answers of several turns need it"
        self._limits, self._most, self._new_session = rollout.environment, rollout.max_response_tokens, new_session
        self._render, self._max_prompt, self._end_of_thought = render, rollout.max_prompt_tokens, rollout.delimiter
        self._tokenizer = load_tokenizer(folder)
        tools = schemas_of(rollout.environment)
        continuation = continuation_of(folder, rollout, lambda turns, opens: render(turns, tools, opens))
        self._observations = Observations(continuation, self._tokenizer, self._limits.max_observation_tokens)
        delimiter = self._tokenizer.encode(rollout.delimiter, add_special_tokens=False).ids
        self._delimiter = tuple(delimiter)
        special = [t.content for t in self._tokenizer.get_added_tokens_decoder().values() if t.special]
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    @property
    def first_call(self) -> Call:
        return self._call(0)

    @property
    def has_objects(self) -> bool:
        """Whether objects have a part in the prompt, so that the first turn waits for them."""
        return self._limits.kind == "tools" and self._limits.objects is not None

    async def answer(self, prompt: Prompt, first: Awaitable[Completion] | None, ask: Ask) -> tuple[Rollout, Tokens]:
        """One answer.

        Args:
            first: the completion of `first_call`, which is running; None: it has not begun.
            ask: samples the later turns, and the first one if it has not begun.
        """
        played = _Played(self._new_session(), Transcript(), prompt)
        own = {"prompt": list(prompt.messages)} if self.has_objects else {}
        beginning = asyncio.ensure_future(played.session.begin({**own, **prompt.columns}))
        try:
            if first is None:
                played.prompt, played.opening = self._opened(prompt, await beginning)
                first = ask(played.prompt, played.transcript, self.first_call)
            completion = await first
            while (call := await self._turn(played, completion, beginning)) is not None:
                completion = await ask(played.prompt, played.transcript, call)
            if self.has_objects and not played.fault:
                played.ended(await played.session.closing())
        except EnvironmentFault as fault:
            played.fault = str(fault)
        finally:
            beginning.cancel()
            await asyncio.gather(beginning, return_exceptions=True)
            await played.session.end()
        return played.sample(self._delimiter)

    def _opened(self, prompt: Prompt, opening: str) -> tuple[Prompt, str]:
        """The prompt of an answer, with its own tools, and what its object appends.

        Raises:
            EnvironmentFault: it is too long.
        """
        assert not isinstance(prompt.messages, str), "rows with an environment are chats"
        *before, last = prompt.messages
        turns = [*before, {**last, "content": last["content"] + opening}]
        text = self._render(turns, schemas_of(self._limits, prompt.columns), True)
        ids = self._tokenizer.encode(text.encode(errors="replace").decode(), add_special_tokens=False).ids
        if len(ids) > self._max_prompt:
            raise EnvironmentFault(
                f"with the text of reset the prompt has {len(ids)} tokens, but rollout.max_prompt_tokens is "
                f"{self._max_prompt}; raise it"
            )
        return replace(prompt, token_ids=tuple(ids)), opening

    async def _turn(self, played: _Played, completion: Completion, beginning: Awaitable[str]) -> Call | None:
        """Take a turn of the model, and what the environment answers. Returns the call of the next turn; None if the
        answer is complete."""
        transcript = played.transcript
        start = len(transcript.ids)
        transcript.sampled(completion)
        played.turns.append(range(start, len(transcript.ids)))
        played.said.append(self._message(completion))
        if not transcript.stopped:
            return None
        since = time.perf_counter()
        try:
            await beginning
            reaction = await played.session.react(self._text(completion.ids[:-1]))
        finally:
            played.seconds += time.perf_counter() - since
        played.took(reaction)
        if reaction.done:
            return None
        transcript.stopped = False  # the answer continues in any case
        if len(played.turns) == self._limits.max_turns:
            return None
        read = self._observations.read(reaction.messages)
        ids = self._observations.ids(read)
        if len(transcript.ids) + len(ids) >= self._most:
            return None
        transcript.force(ids)
        played.said += read
        return self._call(len(transcript.ids))

    def _call(self, num_tokens: int) -> Call:
        """The call after this number of tokens of the answer."""
        left = self._most - num_tokens
        return Call(min(left, self._limits.turn_tokens or left))

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _message(self, completion: Completion) -> dict[str, Any]:
        """What the model has said, without special tokens."""
        text, limits = self._text(completion.ids[:-1] if completion.stopped else completion.ids), self._limits
        calls = calls_of(text, self._end_of_thought) if limits.kind == "tools" else []
        if limits.kind == "tools" and limits.ends_at_malformed_calls and any(call.fault for call in calls):
            calls = []  # nothing was called
        turn = as_turn(text, calls)
        return {**turn, "content": self._special.sub("", turn["content"])}


@dataclass(slots=True)
class _Played:
    """What has happened in one answer."""

    session: Session
    transcript: Transcript
    prompt: Prompt
    opening: str = ""
    said: list[Mapping[str, Any]] = field(default_factory=list)
    """All turns after the prompt."""
    state: Mapping[str, Any] | None = None
    turns: list[range] = field(default_factory=list)
    """The indices of each turn's tokens in the transcript."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """The rewards of turns, with the index of the last token of the turn in the transcript."""
    num_errors: int = 0
    num_calls: int = 0
    seconds: float = 0.0
    fault: str = ""

    def took(self, reaction: Reaction) -> None:
        self.num_errors += reaction.num_errors
        self.num_calls += reaction.num_calls
        self._gave(reaction.reward)

    def ended(self, closing: Closing) -> None:
        self.state = closing.state
        self._gave(closing.reward)

    def _gave(self, reward: float | None) -> None:
        if reward is not None:
            self.rewards.append((len(self.transcript.ids) - 1, reward))

    def sample(self, delimiter: Sequence[int]) -> tuple[Rollout, Tokens]:
        before, transcript = len(self.prompt.token_ids), self.transcript
        sample, tokens = as_rollout(self.prompt.token_ids, transcript, None)
        turns = [transcript.ids[turn.start : turn.stop] for turn in self.turns]
        thoughts = [find_delimiter(turn, delimiter) for turn in turns] if delimiter else []
        return replace(
            sample,
            num_thought_tokens=sum(thought or 0 for thought in thoughts),
            token_rewards=tuple(TokenReward(before + i, "environment", value) for i, value in self.rewards),
            episode=Episode(
                num_turns=len(self.turns),
                last_turn=before + (self.turns[-1].start if self.turns else 0),
                num_tool_errors=self.num_errors,
                num_tool_calls=self.num_calls,
                step_s=self.seconds,
                fault=self.fault,
            ),
        ), replace(tokens, conversation=Conversation(tuple(self.said), self.opening, self.state))


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


def continuation_of(folder: Path, rollout: RolloutConfig, render: Render) -> Continuation:
    """What the chat template of a model writes between the turns of an answer.

    Raises:
        ValueError: the chat template cannot continue a transcript.
    """
    assert rollout.environment is not None, "only answers of several turns need it"
    tokenizer = load_tokenizer(folder)
    ends = [token for i in stop_ids(folder) if (token := tokenizer.id_to_token(i)) is not None]
    role = "tool" if rollout.environment.kind == "tools" else "user"
    try:
        return Continuation(render, ends, role, rollout.delimiter)
    except ValueError as error:
        raise ValueError(f"rollout.environment: {folder}: {error}") from error
