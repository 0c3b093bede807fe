"""Answers with their verdicts, and their metrics: lengths, cuts, abstentions, held-out accuracy."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.config.schema import GrpoRunConfig, RewardConfig
from megatron_rl.ports import Sink
from megatron_rl.types import Batch, Group, Metrics, Prompt, Verdict

if TYPE_CHECKING:
    from megatron_rl.loop.train import Ports

EVALUATION_SEED = 2**20
"""Evaluations use the seed before this one in every step, so that their accuracies can be compared. The steps have
other seeds."""


def answer_and_verify(
    config: GrpoRunConfig, ports: Ports, prompts: Sequence[Prompt], step: int, sink: Sink
) -> tuple[list[Group], Metrics]:
    """The verified groups of one step, and their metrics.

    Raises:
        ValueError: every verdict is an abstention. The message has the most frequent reason.
    """
    start = time.perf_counter()
    with sink.phase("generate"):
        groups = ports.engine.generate(
            prompts, config.rollout.samples_per_prompt, step, config.run.seed * EVALUATION_SEED + step
        )
    generate_s = time.perf_counter() - start
    with sink.phase("verify"):
        scoring = score(ports, groups)
    metrics = describe(groups) | describe_rewards(config.rewards, groups) | scoring
    if config.algorithm.shaping:  # reward/mean is the mean of the shaped rewards
        scores = [sample.reward for group in groups for sample in group.samples if sample.reward is not None]
        metrics["score/mean"] = fmean(scores)
    return groups, metrics | {"rollout/tokens_per_s": metrics["rollout/num_tokens"] / generate_s}


def score(ports: Ports, groups: Sequence[Group]) -> Metrics:
    """Fill in the rewards of all samples, and return the verifier's metrics.

    Raises:
        ValueError: every verdict is an abstention. The message has the most frequent reason.
    """
    verdicts, metrics = ports.verifier.score(groups)
    for group, given in zip(groups, verdicts, strict=True):
        for sample, verdict in zip(group.samples, given, strict=True):
            sample.reward, sample.reward_parts = verdict.score, verdict.parts
            sample.shaped_reward = verdict.score if verdict.shaped is None else verdict.shaped
    require_a_score([verdict for given in verdicts for verdict in given])
    return metrics


def describe_rewards(rewards: Sequence[RewardConfig], groups: Sequence[Group]) -> Metrics:
    """For each reward, by its name, the mean of its scores, not weighted, and the share of the answers on which it
    abstained."""
    metrics: Metrics = {}
    rows = [sample.reward_parts for group in groups for sample in group.samples]
    for reward, column in zip(rewards, zip(*rows, strict=True), strict=True):
        scores = [part for part in column if part is not None]
        metrics[f"reward/{reward.label}/abstained"] = 1 - len(scores) / len(column)
        if scores:
            metrics[f"reward/{reward.label}/mean"] = fmean(scores)
    return metrics


class SilentRewards:
    """Counts, for each reward, the steps in a row in which it scored no answer. The sum of the rewards would hide it
    if another reward gives scores."""

    def __init__(self, rewards: Sequence[RewardConfig]) -> None:
        self._rewards = rewards
        self._silent_steps = [0] * len(rewards)
        self._told: set[str] = set()

    def count(self, groups: Sequence[Group], metrics: Metrics, sink: Sink) -> None:
        """Count a step, and warn.

        Args:
            metrics: the metrics that the verifier returned.

        Raises:
            ValueError: a reward has been silent for its `max_silent_steps`.
        """
        rows = [sample.reward_parts for group in groups for sample in group.samples]
        for i, reward in enumerate(self._rewards):
            failed = metrics.get(f"reward/{reward.label}/failed", 0.0)
            if failed and reward.label not in self._told:
                self._told.add(reward.label)
                sink.warn(
                    f"reward {reward.label} could not score {failed:.0%} of the answers; logs/rewards.log says why"
                )
            if any(parts[i] is not None for parts in rows):
                self._silent_steps[i] = 0
                continue
            self._silent_steps[i] += 1
            seen = f"reward {reward.label} scored none of {len(rows)} answers"
            if reward.max_silent_steps is not None and self._silent_steps[i] >= reward.max_silent_steps:
                raise ValueError(
                    f"{seen} in {self._silent_steps[i]} steps in a row; logs/rewards.log says why. Correct the reward, "
                    f"or raise its max_silent_steps"
                )
            sink.warn(f"{seen}; logs/rewards.log says why")


def require_a_score(verdicts: Sequence[Verdict]) -> None:
    """
    Raises:
        ValueError: every verdict is an abstention.
    """
    reasons = Counter(verdict.reason for verdict in verdicts if verdict.score is None)
    if sum(reasons.values()) == len(verdicts):
        reason, count = reasons.most_common(1)[0]
        raise ValueError(
            f"every one of {len(verdicts)} answers was left without a score; the most frequent reason ({count} times) "
            f"is: {reason}"
        )


def evaluate_heldout(config: GrpoRunConfig, ports: Ports, prompts: Sequence[Prompt], step: int) -> Metrics:
    """The mean reward and the share of right answers over the held-out prompts, sampled as in training.

    An answer is right if the reward `eval.verifier` gave it 1 or more. Answers on which this reward abstained are not
    counted.
    """
    groups = ports.engine.generate(prompts, config.eval.samples_per_prompt, step, EVALUATION_SEED - 1)
    score(ports, groups)
    samples = [sample for group in groups for sample in group.samples]
    scores = [sample.reward for sample in samples if sample.reward is not None]
    deciding = config.deciding_reward
    judged = [] if deciding is None else [s.reward_parts[deciding] for s in samples]
    right = [part >= 1 for part in judged if part is not None]
    return ({"eval/accuracy": fmean(right)} if right else {}) | {
        "eval/reward_mean": fmean(scores),
        "eval/num_samples": float(len(samples)),
        "eval/abstained": float(len(samples) - len(scores)),
        "eval/response_mean": fmean(sample.length - sample.num_prompt_tokens for sample in samples),
    }


def as_batch(config: GrpoRunConfig, ports: Ports, groups: Sequence[Group], step: int, sink: Sink) -> Batch:
    """The samples as arrays, together with the other inputs of the estimator: the weights of the rewards, or the reward
    of each prompt's greedy answer, for which the engine generates another answer."""
    batch = Batch.from_groups(groups, version=step)
    needs = config.algorithm.adv_estimator.needs
    if "reward_parts" in needs:
        batch.reward_weights = np.array([reward.weight for reward in config.rewards])
    if "greedy_reward" in needs:
        prompts = [group.prompt for group in groups]
        with sink.phase("generate"):
            greedy = ports.engine.generate(prompts, 1, step, config.run.seed * EVALUATION_SEED + step, greedy=True)
        with sink.phase("verify"):
            score(ports, greedy)
        rewards = [group.samples[0].shaped_reward for group in greedy]
        batch.greedy_rewards = np.array([np.nan if r is None else r for r in rewards])[batch.group_of]
    return batch


def describe(groups: Sequence[Group]) -> Metrics:
    """The lengths of the answers in tokens, and the shares of answers that a budget cut."""
    samples = [sample for group in groups for sample in group.samples]
    responses = np.array([sample.length - sample.num_prompt_tokens for sample in samples])
    return {
        "length/response_mean": float(responses.mean()),
        "length/response_max": float(responses.max()),
        "length/thought_mean": float(np.mean([sample.num_thought_tokens for sample in samples])),
        "length/thought_cut": float(np.mean([sample.thought_cut for sample in samples])),
        "length/response_cut": float(np.mean([sample.finish == "length" for sample in samples])),
        "rollout/num_samples": float(len(samples)),
        "rollout/num_tokens": float(responses.sum()),
    }
