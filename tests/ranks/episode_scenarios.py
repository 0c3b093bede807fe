"""Episodes whose history changes, as an agent's endpoint makes samples of them, and one update on a group of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from agent_conversations import assistant, conversations, say, user
from scenarios import Layout, build
from tiny_chat import DROPS_THOUGHTS, KEEPS

from megatron_rl.actor.weights import gather_gradient
from megatron_rl.algorithms import estimate_advantages
from megatron_rl.algorithms.aggregation import loss_weights
from megatron_rl.balance import plan_microbatches
from megatron_rl.balance.packing import padded
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.balance import BalanceConfig
from megatron_rl.config.optimizer import AdamConfig
from megatron_rl.config.policy import ParallelConfig
from megatron_rl.loop.shares import deal
from megatron_rl.models import read_shape
from megatron_rl.rollout.program import as_rollout
from megatron_rl.rollout.programs.conversations import Conversations
from megatron_rl.types import Episode, Group, Prompt, Share, StepBatch, Verdict

ALGORITHM = AlgorithmConfig()


def stripped() -> Conversations:
    """The template drops the thoughts of earlier turns: each turn is a row."""
    held, turns = conversations(DROPS_THOUGHTS), [user("a")]
    for said, reply in (("<think>hm</think>one", "b"), ("<think>so it is</think>two", "c"), ("three", "")):
        say(held, turns, said)
        turns += [assistant(said), user(reply)]
    return held


def compacted() -> Conversations:
    """The agent goes on from a summary of its own."""
    held = conversations(KEEPS)
    say(held, [user("a")], "one")
    say(held, [user("a"), assistant("one"), user("b")], "two")
    say(held, [user("so far: two"), user("c")], "three")
    return held


def delegated() -> Conversations:
    """The agent asks a sub-agent, and two of its calls branch from a common beginning."""
    held = conversations(KEEPS)
    say(held, [user("plan")], "ask")
    say(held, [user("sub")], "four")
    say(held, [user("plan"), assistant("ask"), user("four")], "done")
    say(held, [user("plan"), assistant("ask"), user("five")], "other")
    return held


def retried() -> Conversations:
    """The first answer is asked for again."""
    held = conversations(KEEPS)
    say(held, [user("a")], "broken")
    say(held, [user("a")], "one")
    say(held, [user("a"), assistant("one"), user("b")], "two")
    return held


EPISODES = {
    stripped: ["<think>hm</think>one", "<think>so it is</think>two", "three"],
    compacted: ["one", "two", "three"],
    delegated: ["four", "ask", "done", "other"],
    retried: ["one", "two"],
}
"""The episodes, with the answers that are trained, in the order of their rows."""
REWARDS = ((1.0, 0.0, 0.25, 1.0), (0.0, 0.5, 1.0, 0.0))
"""The rewards of the four episodes, in two groups."""


def groups() -> list[Group]:
    found = []
    for number, rewards in enumerate(REWARDS):
        rollouts, payload = [], []
        for episode, reward in zip(EPISODES, rewards, strict=True):
            for place, (ids, transcript, path) in enumerate(episode().transcripts()):
                sample, tokens = as_rollout(ids, transcript, None)
                told = Episode(len(path), len(ids), conversation=place)
                rollouts.append(replace(sample, episode=told, verdict=Verdict(reward, parts=(reward,))))
                payload.append(tokens)
        found.append(Group(Prompt(f"row {number}", (1,), ""), rollouts, payload, 0))
    return found


def shares_of(folder: Path, given: Sequence[Group], parallel: ParallelConfig, num_microbatches: int) -> list[Share]:
    """One mini-batch, in about this number of micro-batches for each data-parallel rank."""
    batch = StepBatch.of_groups(given, 0)
    credit, _ = estimate_advantages(batch, ALGORITHM)
    sizes = padded(batch.lengths, parallel.alignment)
    cap = max(int(sizes.max()), -(-int(sizes.sum()) // (num_microbatches * parallel.data)))
    balance = BalanceConfig(max_tokens_per_microbatch=cap)
    plan = plan_microbatches(batch, credit.active, read_shape(folder), parallel, balance)
    return deal(batch, plan, parallel.data, loss_weights(batch, plan, ALGORITHM.aggregation), credit)


def policy_gradient(rank, world_size, url, *, folder, layout: Layout, shares: list[Share]):
    """The number of micro-batches of this rank, and the gradient, which is whole on rank 0."""
    actor = build(rank, world_size, url, folder, layout, ALGORITHM, AdamConfig(clip_grad=0.0), temperature=1.0)
    own = shares[layout.mesh.coordinates(rank)[2]]
    actor.begin(own, {})
    actor.update(0, {})
    gradient = {name: tensor.numpy().astype(np.float64) for name, tensor in gather_gradient(actor).items()}
    actor.close()
    return len(own.minibatches[0]), gradient
