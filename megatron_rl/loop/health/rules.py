"""Rules about a run's metrics that a person would want to be told of, each as a sentence with what to try.

A rule that stays broken is told once. When it has held for REARMED steps, it may be told again. The rules about single
answers and ranks are in answers.py and stragglers.py; their names are in config/health.py with the others.

Invariant (tests/unit/loop/test_loop_health.py): each rule speaks for a run that it is meant for, and keeps silent for a
healthy one.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from statistics import fmean, median

from megatron_rl.config.health import HealthRule
from megatron_rl.config.schema import BaseConfig, CheckpointConfig, GrpoRunConfig
from megatron_rl.ports import Sink
from megatron_rl.types import Metrics

WINDOW = 50
"""The number of steps that the rules look back on."""
REARMED = 10
"""A rule that was told may be told again after this number of steps without a reason."""
JUMP = 20.0
"""A metric jumps if it is this many times its median."""
SETTLED = 5
"""The number of steps before a median means something."""

History = Sequence[Mapping[str, float]]
"""The metrics of the last steps, the newest last."""


class Health:
    """Looks at the metrics of each step."""

    def __init__(self, sink: Sink, config: BaseConfig) -> None:
        self._sink = sink
        self._rules, self._max_lag = dict(RULES), 0
        self._kept = config.checkpoint
        if isinstance(config, GrpoRunConfig):
            self._max_lag = config.rollout.max_lag
            if not self._max_lag:  # engines must wait for the trainer, also with active sampling
                del self._rules["idle_engines"]
            if config.rollout.environment is None or config.rollout.environment.kind != "tools":
                del self._rules["no_calls"]
            if config.policy.optimizer.rounding == "dithered":  # even the smallest update moves the mean of the weights
                del self._rules["still_weights"]
        longest = max(WINDOW, (self._kept.keep + 3) * self._kept.every)
        self._history: deque[Metrics] = deque(sink.recorded(longest), maxlen=longest)
        self._told: dict[HealthRule, int] = {}
        """The number of steps since each rule that was told was broken last."""

    def look(self, step: int, metrics: Metrics, tell: Callable[[HealthRule, str], str] | None = None) -> None:
        """Look at the metrics of the newest step, and warn.

        Args:
            tell: is called with a rule and its message, and returns the message to print.

        Raises:
            ValueError: a rule of `run.stop_on` is broken.
        """
        while self._history and self._history[-1].get("step", -1) >= step:  # steps that are done again after a loss
            self._history.pop()
        self._history.append(metrics)
        self._told = {rule: age + 1 for rule, age in self._told.items() if age < REARMED}
        broken = dict(self._broken())
        silent = broken.keys() & self._told.keys()
        self._told |= dict.fromkeys(broken, 0)
        for rule, message in broken.items():
            if rule not in silent:
                self._sink.warn(tell(rule, message) if tell else message, rule, step)

    def _broken(self) -> Iterator[tuple[HealthRule, str]]:
        for rule, find in self._rules.items():
            if message := find(self._history):
                yield rule, message
        if message := lag_at_bound(self._history, self._max_lag):
            yield "lag", message
        if message := disk(self._history, self._kept):
            yield "disk", message


def series(history: History, name: str) -> list[float]:
    """The values of a metric in the steps that have it, the newest last."""
    return [metrics[name] for metrics in history if isfinite(metrics.get(name, float("nan")))]


def lasting(history: History, name: str, bound: float, steps: int) -> float:
    """The newest value of a metric if it has been above a bound in this number of steps in a row, else 0."""
    values = [metrics.get(name, 0.0) for metrics in list(history)[-steps:]]
    return values[-1] if len(values) == steps and min(values) > bound else 0.0


def jump(history: History) -> str:
    values = series(history, "grad_norm")
    if "grad_norm" not in history[-1] or len(values) <= SETTLED:
        return ""
    usual, now = median(values[:-1]), values[-1]
    if not usual or now <= JUMP * usual:
        return ""
    return f"the gradient norm is {now:,.4g}, {now / usual:,.0f} times its median over the last {len(values) - 1} steps"


def entropy(history: History) -> str:
    """The entropy, or its estimate from the log-probs of the sampled tokens: the mean of -log p is the entropy on
    average if the tokens were sampled from p."""
    values, rewards = series(history, "entropy"), series(history, "reward/mean")
    if not values:
        values = [-value for value in series(history, "logp/mean")]
    if len(values) < 3 * SETTLED or len(rewards) < 3 * SETTLED:
        return ""
    before, now = median(values[:SETTLED]), median(values[-SETTLED:])
    gained = fmean(rewards[-SETTLED:]) > fmean(rewards[:SETTLED])
    if gained or before < 0.01 or now > 0.1 * before:
        return ""
    fallen = f"the entropy of a token has fallen from {before:.3g} to {now:.3g} nats"
    if max(rewards) == min(rewards):
        return (
            f"{fallen}, and the mean reward was {rewards[-1]:g} in every step, so it is no reward that sharpens the "
            "policy: look at algorithm.shaping and the other terms of the loss. If that is the largest reward, the "
            "task is solved, and the run can end"
        )
    return (
        f"{fallen}, and the mean reward has not risen meanwhile: the policy has stopped to explore. Lower "
        "policy.optimizer.lr, raise the upper clip (algorithm.loss.clip_ratio_high), or set algorithm.entropy"
    )


def evaluation(history: History) -> str:
    """The intervals of the newest accuracy and of the best one do not meet."""
    name = "eval/accuracy"
    if name not in history[-1]:
        return ""
    best = max((metrics for metrics in history if name in metrics), key=lambda metrics: metrics[f"{name}_low"])
    if history[-1][f"{name}_high"] >= best[f"{name}_low"]:
        return ""
    since = f"{best[name]:.3f} at step {best['step']:.0f}" if "step" in best else f"{best[name]:.3f}"
    return (
        f"the held-out accuracy is {history[-1][name]:.3f}, and it was {since}: the policy gets worse, whatever the "
        "training rewards say. Lower policy.optimizer.lr; with rollout.max_lag above 1, set algorithm.anchor to "
        "engine. checkpoint.keep_best keeps the best checkpoint, and --resume STEP continues from an earlier one"
    )


def length(history: History) -> str:
    if not (share := lasting(history, "length/response_cut", 0.5, 3)):
        return ""
    return (
        f"{share:.0%} of the answers end at rollout.max_response_tokens, and not by themselves: raise it, or reward "
        "shorter answers (algorithm.shaping, or the reward `length`). Look at some in samples.jsonl: do they repeat "
        "themselves, or does the model not know its end-of-sequence token?"
    )


def thoughts(history: History) -> str:
    if not (share := lasting(history, "length/thought_cut", 0.5, 3)):
        return ""
    return (
        f"the thinking budget ends {share:.0%} of the reasoning: raise rollout.thinking.thought_tokens, or reward "
        "shorter reasoning; thought/cut_reward_mean and thought/whole_reward_mean tell what the cut costs"
    )


def one_reward(history: History) -> str:
    """The metric `reward/{reward}/signal` is the share of the differences between answers that a reward makes."""
    names = [name for name in history[-1] if name.startswith("reward/") and name.endswith("/signal")]
    if len(names) < 2:
        return ""
    for name in names:
        if share := lasting(history, name, 0.95, 5):
            label = name.split("/")[1]
            return (
                f"the reward {label} makes {share:.0%} of the differences between the answers to a prompt, so that the "
                "other rewards teach nothing: change the weights (rewards.*.weight), or their scales"
            )
    return ""


def duplicates(history: History) -> str:
    if not (share := lasting(history, "length/duplicates", 0.25, 1)):
        return ""
    return (
        f"{share:.0%} of the answers of 64 tokens or more equal another answer to their prompt: the policy has "
        "collapsed, the temperature is very low, or the answers' seeds are equal (a rollout.backend of your own)"
    )


def no_calls(history: History) -> str:
    calls = [metrics.get("environment/tool_calls", 1.0) for metrics in list(history)[-SETTLED:]]
    if len(calls) < SETTLED or any(calls):
        return ""
    return (
        f"no answer of the last {SETTLED} steps has called a tool: is the model trained to call tools, and does its "
        "chat template ask for the form <tool_call>{...}</tool_call>? Look at some answers in samples.jsonl, and at "
        "length/response_cut: reasoning that is cut never comes to a call"
    )


def mismatch(history: History) -> str:
    values = series(history, "mismatch/mean_abs")
    if "mismatch/mean_abs" not in history[-1] or len(values) <= SETTLED:
        return ""
    before, now = median(values[:SETTLED]), values[-1]
    if now <= 5 * before or now < 1e-4:
        return ""
    times = f", {now / before:.0f} times as much as {len(values) - 1} steps ago" if before else ""
    return (
        f"trainer and engine differ by {now:.1e} nats for a token{times}: log-probs of rare tokens may round more as "
        "the policy sharpens, or an engine has other weights (bridge.verify: true compares all of them after each sync)"
    )


def ratio(history: History) -> str:
    """Only the first update of a step counts, whose weights gave logp_old."""
    error = history[-1].get("on_policy/ratio_error", 0.0)
    if error <= 0.01:
        return ""
    return (
        f"the ratio of the policy to itself differs from 1 by {error:.2g} before the first update: the two passes of "
        "the trainer do not compute the same (dropout, kernels that are not deterministic, or a change of the weights "
        "between them)"
    )


def still_weights(history: History) -> str:
    changed, rewards = series(history, "update_changed"), series(history, "reward/mean")
    if min(len(changed), len(rewards)) < 3 * SETTLED or (share := fmean(changed[-SETTLED:])) > 0.02:
        return ""
    if fmean(rewards[-SETTLED:]) > fmean(rewards[:SETTLED]):
        return ""
    return (
        f"an update gives {share:.2%} of the weights other bits, and the mean reward has not risen in the "
        f"last {len(rewards)} steps: the policy that answers hardly moves. Set policy.optimizer.rounding to "
        "dithered, or raise policy.optimizer.lr"
    )


def untrained_tokens(history: History) -> str:
    share = history[-1].get("tokens/untrained", 0.0)
    if not share:
        return ""
    return (
        f"{share:.2g} of the sampled tokens have embeddings that no training has moved, so that one of them may make a "
        "gradient of any size"
    )


def lag_at_bound(history: History, max_lag: int) -> str:
    if not lasting(history, "lag/mean", 0.95 * max_lag, 5):
        return ""
    return (
        f"the answers are as old as rollout.max_lag = {max_lag} allows, so the trainer is the slower side: engines can "
        "be given to the trainer, or rollout.max_lag lowered, without loss of time"
    )


def idle_engines(history: History) -> str:
    if "stream/running" not in history[-1] or not (share := lasting(history, "rollout/idle", 0.8, 5)):
        return ""
    return (
        f"the engines have nothing to do for {share:.0%} of the time, although they need not wait for the trainer: "
        "fewer engines would be enough, or a larger rollout.max_lag gives them work"
    )


def memory(history: History) -> str:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in sorted(history[-1]):
        if name.endswith("_resident_bytes"):
            bound, what = 0.1 * machine, f"the largest process of the role {name[7:-15]}"
            advice = "look at what your reward functions and environments keep; a resumed run begins with new processes"
        elif name.endswith("_gpu_bytes_before/training"):
            bound, what = 4e9, "what the engines keep on a GPU while they sleep"
            advice = "the trainer needs this memory; lower rollout.max_sequences, or stop and resume the run"
        else:
            continue
        values = series(history, name)
        if len(values) > 2 * SETTLED and (grown := values[-1] - median(values[:SETTLED])) > bound:
            now, num = values[-1] / 1e9, len(values)
            return f"{what} has grown by {grown / 1e9:.1f} GB to {now:.1f} GB over the last {num} steps: {advice}"
    return ""


def disk(history: History, kept: CheckpointConfig) -> str:
    """Checkpoints fill the disk until the oldest ones are deleted. After that the same moments of two periods are
    compared."""
    period = kept.every * -(-2 * SETTLED // kept.every) if kept.every else 2 * SETTLED
    values = series(history, "machine/disk_free_bytes")
    if len(values) <= (kept.keep + 1) * kept.every + period or values[-1] >= values[-1 - period]:
        return ""
    left = values[-1] / ((values[-1 - period] - values[-1]) / period)
    if left >= 50:
        return ""
    return (
        f"the disk of the run's folder has {values[-1] / 1e9:.1f} GB left, and is full in about {left:.0f} steps at "
        "the pace of the last ones: delete old exports and checkpoints, lower checkpoint.keep, or set rollout.dump to "
        "{last: n}"
    )


RULES: Mapping[HealthRule, Callable[[History], str]] = {
    "entropy": entropy,
    "evaluation": evaluation,
    "length": length,
    "thoughts": thoughts,
    "one_reward": one_reward,
    "duplicates": duplicates,
    "no_calls": no_calls,
    "mismatch": mismatch,
    "ratio": ratio,
    "still_weights": still_weights,
    "untrained_tokens": untrained_tokens,
    "idle_engines": idle_engines,
    "memory": memory,
    "jump": jump,
}
"""One check per rule: it returns a message, or "" if the rule holds."""
