"""What has happened in an answer of several turns, and the samples that it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from socket import gethostname
from typing import Any

from megatron_rl.environments import Closing, Reaction
from megatron_rl.rollout.program import Call, Completion, Program, Samples, Transcript, as_rollout, next_call
from megatron_rl.types import Conversation, Episode, Picture, Prompt, Rollout, TokenReward


@dataclass(slots=True)
class SampledTurn:
    """A turn of the model that is sampled."""

    program: Program
    transcript: Transcript = field(default_factory=Transcript)
    call: Call | None = None
    """The call that is running, or comes next; None: the turn is complete."""

    def sampled(self, completion: Completion) -> None:
        self.transcript.sampled(completion)
        self.call = next_call(self.program, self.transcript)


@dataclass(slots=True)
class Talk:
    """A conversation of an answer."""

    prompt_ids: tuple[int, ...]
    pictures: tuple[Picture, ...] = ()
    """Its images, of the prompt and of observations."""
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

    def took(self, turn: SampledTurn, delimiter: Sequence[int]) -> None:
        start = len(self.transcript.ids)
        self.transcript.append(turn.transcript)
        self.turns.append(range(start, len(self.transcript.ids)))
        self.thoughts.append(as_rollout((), turn.transcript, delimiter or None, turn.program.thought_tokens)[0])


@dataclass(slots=True)
class Played:
    """What has happened in one answer."""

    prompt: Prompt
    talks: list[Talk]
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
            sample, tokens = as_rollout(talk.prompt_ids, talk.transcript, None, pictures=talk.pictures)
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
                patches=tuple(picture.num_patches for picture in talk.pictures),
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
