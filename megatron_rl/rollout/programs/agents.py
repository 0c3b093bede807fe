"""Answers of agents: a user's function calls the model freely, through a URL of its own (endpoint.py).

Each answer is a run of the agent with an address of its own. When the agent has ended, every conversation that it had
with the model is a sample (conversations.py), and all of them have the agent's reward. So a group can have more samples
than `rollout.samples_per_prompt`.

Invariants (tests/unit/rollout): an agent that raises, or takes too long, gives no reward, and what it has asked is not
lost; nothing is sampled for an agent that has ended.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import gethostname

from megatron_rl.config.environment import AgentEnvironment
from megatron_rl.config.exception_text import place, said
from megatron_rl.config.function import load_function, short_path
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.environments import FORMATS, fault_of_reward
from megatron_rl.environments.asked_calls import QUESTION
from megatron_rl.environments.calls import Calls, OutOfTime
from megatron_rl.environments.observations import opening_of
from megatron_rl.rollout.program import NEXT_CALL, Call, Completion, Request, Samples, Transcript, as_rollout
from megatron_rl.rollout.programs.chat_template import RenderCall, ends_of
from megatron_rl.rollout.programs.conversations import Conversations
from megatron_rl.rollout.programs.endpoint import AnswerLine, Endpoint, TurnReading
from megatron_rl.rollout.programs.episodes import Ask, Begin, EpisodeRequest, Plays, played_again
from megatron_rl.rollout.vocabulary import load_tokenizer
from megatron_rl.types import Conversation, Episode, Prompt, TokenReward

MAX_REASON = 500


class Agents:
    """
    Args:
        folder: the model's.
        rollout: with an environment of kind agent.
        render: the chat template, with the arguments that all rows have.
        form: the format of the model's calls of tools.

    Raises:
        ValueError: the agent cannot be imported.
    """

    def __init__(
        self,
        folder: Path,
        rollout: RolloutConfig,
        render: RenderCall,
        form: str,
        ask: Ask,
    ) -> None:
        cfg = rollout.environment
        assert isinstance(cfg, AgentEnvironment), "only agents need it"
        self._cfg, self._render, self._ask = cfg, render, ask
        self._run, self._calls = load_function(cfg.path), Calls(cfg.timeout_s)
        self._tokenizer = load_tokenizer(folder)
        self._ends = ends_of(folder)
        sampling = rollout.sampling
        own = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        opening = opening_of(render([QUESTION], [], True), rollout.delimiter)
        reading = TurnReading(FORMATS[form], rollout.delimiter, self._decode, opening)
        self._endpoint = Endpoint(reading, rollout.max_model_tokens, own, cfg.remote)
        self._starting: asyncio.Task[None] | None = None
        self._plays = Plays()

    async def answers(self, asked: EpisodeRequest, begin: Begin) -> Samples:
        """See `Answers`."""
        await begin([], not self._plays)
        plays = [
            played_again(
                partial(self._play, asked.prompt, asked.seed + sample, asked.is_greedy, (asked.ticket, sample)),
                self._cfg.retries,
            )
            for sample in asked.samples
        ]
        return [sample for played in await self._plays.carry_out(asked.ticket, plays) for sample in played]

    def cancel(self, ticket: int) -> None:
        """See `Answers`."""
        self._plays.cancel(ticket)

    async def close(self) -> None:
        """End the server."""
        await self._endpoint.close()

    async def _play(self, prompt: Prompt, seed: int, is_greedy: bool, answer: tuple[int, int]) -> Samples:
        """Run the agent once. Returns its conversations.

        Args:
            answer: the ticket of the group and the number of the answer, for `cancel`.
        """
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._endpoint.start())
        await self._starting
        num_calls = 0

        async def ask(ids: list[int], call: Call) -> Completion:
            nonlocal num_calls
            own = (seed + num_calls * NEXT_CALL) % 2**62
            num_calls += 1
            return await self._ask(Request(ids, call, own, is_greedy, answer, goes_on=num_calls > 1))

        conversations = Conversations(self._render, self._tokenizer, self._ends, self._cfg.history == "split")
        line = self._endpoint.open(conversations, ask)
        reward, fault = None, ""
        try:
            given = await self._calls.call(self._run, dict(prompt.columns), line.url, **self._cfg.arguments)
            if no_reward := fault_of_reward(given):
                fault = f"{short_path(self._cfg.path)} returned {given!r}, {no_reward}"
            elif given is not None:
                reward = float(given)
        except OutOfTime:
            reward = self._cfg.timeout_reward
            took = f"took more than rollout.environment.timeout_s = {self._cfg.timeout_s:g} s"
            fault = f"{short_path(self._cfg.path)} {took}" if reward is None else ""
        except Exception as error:  # an agent may raise anything
            fault = f"{short_path(self._cfg.path)} raised {said(error)}{place(error)}"
        finally:
            self._endpoint.end(line)
        return self._samples(prompt, line, reward, fault[:MAX_REASON])

    def _samples(self, prompt: Prompt, line: AnswerLine, reward: float | None, fault: str) -> Samples:
        found = line.conversations.transcripts()
        if not found:
            sample, tokens = as_rollout(prompt.token_ids, Transcript(), None)
            episode = Episode(
                0,
                len(prompt.token_ids),
                num_abandoned=line.num_abandoned,
                host=gethostname(),
                fault=fault or f"{short_path(self._cfg.path)} did not ask the model",
            )
            return [(replace(sample, episode=episode), tokens)]
        samples, seen = [], set[int]()
        for number, (ids, transcript, path) in enumerate(found):
            sample, tokens = as_rollout(ids, transcript, None)
            rewards = () if reward is None else (TokenReward(sample.length - 1, "environment", reward),)
            turns = path[-1].messages[len(path[0].messages) - 1 :]  # from the model's first answer on
            num_calls = sum(len(turn.get("tool_calls", ())) for turn in turns)
            num_turns = sum(id(node) not in seen for node in path)
            seen.update(map(id, path))
            host = gethostname() if fault else ""
            episode = Episode(
                num_turns, len(ids) + path[-1].num_before, num_tool_calls=num_calls, fault=fault, host=host
            )
            episode = replace(episode, conversation=number)
            if not number:
                retried = len(line.conversations.retried)
                episode = replace(episode, num_abandoned=line.num_abandoned, num_retried=retried)
            sample = replace(sample, token_rewards=rewards, episode=episode)
            samples.append((sample, replace(tokens, conversation=Conversation(turns))))
        return samples

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))
