"""Warnings about the answers of each step: rewards that score nothing or give 0 to all, answers without a score,
thoughts without passages, and steps that train nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_rl.algorithms.advantages import why_untrained
from megatron_rl.config.rewards import RewardConfig
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.loop.rollouts import verdicts_of
from megatron_rl.ports import Sink
from megatron_rl.types import Group, Metrics, Verdict

UNSCORED_PROMPTS = 8
"""A run ends after this number of prompts in a row without a scored answer."""
MANY_UNSPLIT = 0.5
"""The share of answers with at most one passage above which a run warns."""


class StepWarnings:
    """Warns about the answers of each step: rewards that score nothing, reasons that all answers share, thoughts that
    are not divided."""

    def __init__(self, config: GrpoRunConfig) -> None:
        environment = config.rollout.environment
        self._silent, self._unscored = SilentRewards(config.rewards), UnscoredPrompts()
        self._unsplit = UnsplitThoughts()
        self._scoreless = ScorelessSteps() if config.algorithm.learns_from_rewards else None
        self._failed = FailedEnvironments(1.0 if environment is None else environment.max_failed)

    def count(self, groups: Sequence[Group], metrics: Metrics, sink: Sink) -> None:
        """Count a step.

        Raises:
            ValueError: see `FailedEnvironments`, `SilentRewards` and `UnscoredPrompts`.
        """
        self._failed.count(groups, sink)
        self._unscored.count(groups, sink)
        self._silent.count(groups, metrics, sink)
        self._unsplit.count(metrics, sink)
        if self._scoreless:
            self._scoreless.count(groups, sink)


class SilentRewards:
    """Counts, for each reward, the consecutive steps when it scored none of the answers that it should, when it failed,
    and when it gave all of them 0. The sum of the rewards would hide it if another reward gives scores."""

    def __init__(self, rewards: Sequence[RewardConfig]) -> None:
        self._rewards = rewards
        self._silent_steps, self._zero_steps = [0] * len(rewards), [0] * len(rewards)
        self._failed_steps = [0] * len(rewards)
        self._told: set[str] = set()

    def count(self, groups: Sequence[Group], metrics: Metrics, sink: Sink) -> None:
        """Count a step, and warn.

        Args:
            metrics: the metrics that the verifier returned.

        Raises:
            ValueError: a reward has been silent for its `max_silent_steps`.
        """
        for i, reward in enumerate(self._rewards):
            failed = metrics.get(f"reward/{reward.label}/failed", 0.0)
            if failed and reward.label not in self._told:
                self._told.add(reward.label)
                sink.warn(
                    f"reward {reward.label} could not score {failed:.0%} of the answers; logs/rewards.log says why",
                    "silent_reward",
                )
            own = verdicts_of([group for group in groups if reward.scores(group.prompt.columns)])
            if not own:
                continue
            scores = {verdict.parts[i] for verdict in own} - {None}
            self._zero_steps[i] = self._zero_steps[i] + 1 if scores == {0.0} else 0
            if self._zero_steps[i] == 2 and len(self._rewards) > 1:
                told = common_reason(own)
                sink.warn(f"reward {reward.label} gave 0 to all answers of two steps in a row{told}", "silent_reward")
            if scores:
                self._silent_steps[i] = self._failed_steps[i] = 0
                continue
            self._silent_steps[i] += 1
            self._failed_steps[i] = self._failed_steps[i] + 1 if failed else 0
            seen = f"reward {reward.label} scored none of {len(own)} answers"
            why = "logs/rewards.log says why" if failed else "it gave no reward to any of them"
            for key, bound, steps in (
                ("max_silent_steps", reward.max_silent_steps, self._silent_steps[i]),
                ("max_failed_steps", reward.max_failed_steps, self._failed_steps[i]),
            ):
                if bound is not None and steps >= bound:
                    raise ValueError(f"{seen} in {steps} steps in a row; {why}. Correct the reward, or raise its {key}")
            if not self._silent_steps[i] & (self._silent_steps[i] - 1):  # after 1, 2, 4, ... steps
                sink.warn(f"{seen}; {why}", "silent_reward")


class FailedEnvironments:
    """Counts the consecutive steps in which environments failed.

    Args:
        most: `rollout.environment.max_failed`.
    """

    def __init__(self, most: float) -> None:
        self._most, self._in_a_row = most, 0

    def count(self, groups: Sequence[Group], sink: Sink) -> None:
        """Count a step, and warn after 1, 2, 4, ... such steps in a row.

        Raises:
            ValueError: more environments than allowed have failed.
        """
        episodes = [answer.episode for group in groups for answer in group.answers if answer.episode is not None]
        failed = [episode for episode in episodes if episode.fault]
        self._in_a_row = self._in_a_row + 1 if failed else 0
        if not failed:
            return
        causes, hosts = (Counter(getattr(one, name) for one in failed).most_common(3) for name in ("fault", "host"))
        where = ", ".join(f"{host or 'an unknown machine'}: {count}" for host, count in hosts)
        told = (
            f"the environments of {len(failed)} of {len(episodes)} answers failed ({where}), also when they began "
            f"again; the most frequent causes are: " + "; ".join(f"{cause} ({count} times)" for cause, count in causes)
        )
        if len(failed) > self._most * len(episodes):
            raise ValueError(
                f"{told}. Correct the environment, or raise rollout.environment.max_failed ({self._most:g})"
            )
        if not self._in_a_row & (self._in_a_row - 1):
            sink.warn(told, "failed_environments")


class ScorelessSteps:
    """Counts the consecutive steps without an answer that scores above 0. Something may keep every answer from a score,
    such as a delimiter that the model never writes, and the mean reward alone would not say so. A user's reward may
    return different penalties without a reason."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def count(self, groups: Sequence[Group], sink: Sink) -> None:
        """Count a step. The warning, with the most frequent reason, comes after the first such step, and then after 2,
        4, 8, ... in a row."""
        verdicts = [verdict for verdict in verdicts_of(groups) if verdict.score is not None]
        scores = {verdict.score for verdict in verdicts if verdict.score is not None}
        if not scores or max(scores) > 0:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        told = common_reason(verdicts)
        if (told or len(scores) == 1) and not self._in_a_row & (self._in_a_row - 1):
            so_far = f", for {self._in_a_row} steps in a row" if self._in_a_row > 1 else ""
            sink.warn(f"none of {len(verdicts)} answers scores above 0{so_far}{told}", "no_score")


class UnscoredPrompts:
    """Counts the consecutive prompts to which no answer has a score. With a few prompts in a step, such a step may be
    chance: each reward may abstain on rows of another kind."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def count(self, groups: Sequence[Group], sink: Sink) -> None:
        """Count a step.

        Raises:
            ValueError: there were UNSCORED_PROMPTS of them.
        """
        unscored = describe_unscored(groups)
        self._in_a_row = self._in_a_row + len(groups) if unscored else 0
        if self._in_a_row >= UNSCORED_PROMPTS:
            raise ValueError(f"{self._in_a_row} prompts in a row have no answer with a score: {unscored}")
        if unscored:
            sink.warn(f"{unscored}; the step trains nothing", "silent_reward")


class UnsplitThoughts:
    """Warns once, in the first step, if many thoughts have no second passage."""

    def __init__(self) -> None:
        self._is_first = True

    def count(self, metrics: Metrics, sink: Sink) -> None:
        """Look at the metrics of a step."""
        single = metrics.get("passages/single", 0.0)
        if self._is_first and single > MANY_UNSPLIT:
            sink.warn(
                f"{single:.0%} of the answers have at most one passage of reasoning, so that rollout.prefix_values "
                "rewards little more than the answer: do its markers occur in it, is min_tokens too large, or do "
                "rows lack its column?"
            )
        self._is_first = False


class UntrainedSteps:
    """Counts the consecutive steps that could not train, because no answer had a gradient."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def count(self, is_trained: bool, planned: Metrics, groups: Sequence[Group], sink: Sink) -> None:
        """Count a step. The warning comes after two such steps, and then after 4, 8, 16, ...

        Args:
            planned: the metrics of the step's plan.
        """
        self._in_a_row = 0 if is_trained else self._in_a_row + 1
        if self._in_a_row < 2 or self._in_a_row & (self._in_a_row - 1):
            return
        rewards = [verdict.reward for verdict in verdicts_of(groups)]
        counted = Counter("none" if reward is None else f"{reward:g}" for reward in rewards).most_common(5)
        seen = ", ".join(f"{reward}: {count / len(rewards):.0%}" for reward, count in counted)
        sink.warn(
            f"nothing was trained in {self._in_a_row} steps in a row. In the last one {why_untrained(planned)}. Its "
            f"rewards are {seen}. Look at some answers (samples.jsonl), {self._advice(planned)}",
            "no_signal",
        )

    @staticmethod
    def _advice(planned: Metrics) -> str:
        if planned.get("samples/overlong"):
            return "raise rollout.max_response_tokens, or train on cut answers too"
        return "choose prompts of another difficulty, or raise rollout.samples_per_prompt"


def common_reason(verdicts: Sequence[Verdict]) -> str:
    """The most frequent reason of some verdicts as the end of a message; empty if most have none."""
    [(reason, count)] = Counter(verdict.reason for verdict in verdicts).most_common(1)
    return f"; the most frequent reason ({count / len(verdicts):.0%}) is: {reason}" if reason else ""


def describe_unscored(groups: Sequence[Group]) -> str:
    """The reasons if every verdict is an abstention; else empty."""
    verdicts = verdicts_of(groups)
    reasons = Counter(verdict.reason for verdict in verdicts if verdict.score is None)
    if sum(reasons.values()) < len(verdicts):
        return ""
    reason, count = reasons.most_common(1)[0]
    return (
        f"every one of {len(verdicts)} answers was left without a score; the most frequent reason ({count} times) "
        f"is: {reason}"
    )
