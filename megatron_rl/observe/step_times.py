"""Tells where the time of a run's steps goes, which resource holds the others up, and what would help first.

Everything is computed from the records of metrics.jsonl. The first step is left out if there are others, because
processes warm up in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_rl.observe.records import time_split

Records = Sequence[Mapping[str, float]]

IDLE = 0.3
"""Engines that are idle for more than this share of their time wait for the trainer."""
SMALL = 0.1
"""A phase below this share of the step holds nobody up."""
SLOW = 1.5
"""A rank that takes this many times as long as the median rank holds the others up."""
HALF_FILLED = 0.5
"""Micro-batches with less of the cap than this are too small."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A row of the table."""

    name: str
    value: float
    unit: str
    """`s` for seconds in a step, `share` for a share of 1, or the name of the unit."""
    share: float | None = None
    """The share of the step's time, if it is a part of it."""


@dataclass(frozen=True, slots=True)
class Where:
    num_steps: int
    seconds: float
    """The mean seconds of a step."""
    resources: Sequence[Resource]
    path: str
    """The critical path: who waits for whom."""
    advice: str
    """What would help first, in one sentence."""


def where(records: Records) -> Where:
    """
    Args:
        records: the records of a run, in order.

    Raises:
        ValueError: no step has trained.
    """
    step = _mean_step(records)
    return Where(
        num_steps=step.num_steps,
        seconds=step.seconds,
        resources=[*_phases(step), *_others(step)],
        path=_path(step),
        advice=_advice(step),
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """The mean of the steps that are looked at."""

    num_steps: int
    split: Mapping[str, float]
    """The seconds of each phase."""
    mean: Mapping[str, float]
    """Each metric, over the steps that have it."""

    @property
    def seconds(self) -> float:
        return sum(self.split.values())

    @property
    def longest(self) -> str:
        """The longest phase."""
        return max(self.split, key=lambda name: self.split[name])

    def share(self, phase: str) -> float:
        """The share of a phase in the step; 0 if there is no such phase."""
        return self.split.get(phase, 0.0) / (self.seconds or 1.0)

    @property
    def has_lag(self) -> bool:
        """Whether engines answer while the trainer works."""
        return self.mean.get("lag/mean", 0.0) > 0  # it is 0 with active sampling alone

    @property
    def idle(self) -> float:
        """The share of the engines' time without a request."""
        return self.mean.get("rollout/idle", 0.0)

    @property
    def rewards(self) -> dict[str, float]:
        """The seconds of each reward, the slowest first."""
        found = {
            name.removeprefix("reward/").removesuffix("/seconds"): seconds
            for name, seconds in self.mean.items()
            if name.startswith("reward/") and name.endswith("/seconds")
        }
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def _mean_step(records: Records) -> _Step:
    trained = [record for record in records if "time/update_s" in record]
    if not trained:
        raise ValueError("no step of the run has trained yet, so nothing is known of its time")
    steps = trained[1:] or trained
    split = {name: seconds / len(steps) for name, seconds in time_split(steps).items()}
    names = dict.fromkeys(name for step in steps for name in step)
    mean = {name: fmean(own) for name in names if (own := [step[name] for step in steps if name in step])}
    return _Step(len(steps), split, mean)


def _phases(step: _Step) -> Iterator[Resource]:
    for name, seconds in step.split.items():
        yield Resource(f"phase {name}", seconds, "s", step.share(name))


KNOWN = {
    "rollout/tokens_per_s": ("engines", "tokens/s"),
    "rollout/accepted/share": ("tokens of answers from drafts", "share"),
    "rollout/idle": ("engines idle", "share"),
    "sync/paused_s": ("weight sync: pause of the engines", "s"),
    "sync/transfer_s": ("weight sync: transfer", "s"),
    "perf/tokens_per_s": ("trainer", "tokens/s"),
    "slowest_rank/ratio": ("slowest trainer rank by the median", "times"),
    "balance/bubble": ("trainer's pipeline idle, as planned", "share"),
    "balance/fill": ("micro-batches filled", "share"),
    "machine/waiting": ("CPU cores idle", "share"),
}
"""What the table says besides the phases, by metric: its name there and its unit."""


def _others(step: _Step) -> Iterator[Resource]:
    for metric, (name, unit) in KNOWN.items():
        if metric in step.mean:
            value = step.mean[metric]
            yield Resource(name, value, unit, value / step.seconds if unit == "s" and step.seconds else None)
    for reward, seconds in step.rewards.items():
        yield Resource(f"reward {reward}, all processes", seconds, "s")


def _path(step: _Step) -> str:
    generate, idle, split = step.share("generate"), step.idle, step.split
    if not step.has_lag or "generate" not in split:
        order = [name for name in ("sync", "generate", "plan", "logprobs", "update") if name in split]
        return (
            f"in turns: {' -> '.join(order)}, each waits for the one before; the longest is {step.longest} with "
            f"{split[step.longest]:.2f} of {step.seconds:.2f} s"
        )
    if generate >= SMALL and generate >= idle:
        return (
            f"the trainer waits for answers for {_percent(generate)} of the step; engines are idle for {_percent(idle)}"
        )
    if idle > SMALL:
        return (
            f"engines wait for the trainer: they are idle for {_percent(idle)} of their time; the trainer waits for "
            f"answers for {_percent(generate)} of the step"
        )
    return f"engines and trainer keep each other busy: idle {_percent(idle)}, waiting {_percent(generate)} of the step"


def _advice(step: _Step) -> str:
    if step.has_lag and step.idle > IDLE and step.share("generate") < SMALL:
        return f"engines are idle for {_percent(step.idle)} of their time: fewer engines, or more trainer ranks"
    longest, split, mean, rewards = step.longest, step.split, step.mean, step.rewards
    is_part = f"{longest} is {_percent(step.share(longest))} of the step"
    if longest in ("update", "logprobs"):
        ratio, fill = mean.get("slowest_rank/ratio", 1.0), mean.get("balance/fill", 1.0)
        if ratio >= SLOW:
            return (
                f"{is_part}, and one rank takes {ratio:.1f} times as long as the median: repair or replace its machine"
            )
        if fill < HALF_FILLED:
            return (
                f"{is_part}, and its micro-batches are filled to {_percent(fill)}: more answers in a step fill "
                "them, or fewer trainer ranks, if there are several"
            )
        return f"{is_part}: more trainer ranks, or larger micro-batches (balance.max_tokens_per_microbatch)"
    if longest == "generate":
        slowest = next(iter(rewards), None)
        if slowest is not None and sum(rewards.values()) > split[longest] / 2:
            return (
                f"{is_part}, and rewards take {sum(rewards.values()):.2f} s of processes' time, most of it {slowest}: "
                "more verifiers (cluster.verifiers), or a faster reward"
            )
        if not step.has_lag:
            return f"{is_part}: more engines, or rollout.max_lag: 1, so that engines and trainer work at the same time"
        return f"{is_part}, although engines answer while the trainer works: more engines"
    advice = {
        "sync": _of_push(split["sync"], mean) if "sync" in split else "",
        "evaluate": "a larger eval.every, or fewer held-out prompts (eval.num_prompts)",
        "checkpoint": "a larger checkpoint.every",
        "plan": "fewer and longer samples in a step; planning runs in the driver alone",
        "prefix_values": "fewer passages (rollout.prefix_values)",
        "dump": "rollout.dump off, or a faster disk",
        "recover": "look into logs/warnings.log for what was lost",
        "other": "the driver works outside all phases; a trace (observe: kind trace) shows when",
    }
    return f"{is_part}: {advice.get(longest, 'a trace (observe: kind trace) shows what it does')}"


def _of_push(seconds: float, mean: Mapping[str, float]) -> str:
    transfer = mean.get("sync/transfer_s")
    if transfer is not None and transfer > seconds / 2:
        return (
            f"the transfer takes {transfer:.2f} s of {seconds:.2f} s; a faster network, or chains of engines "
            "(bridge.chains)"
        )
    return "most of it is no transfer: the engines are late to pause, or the trainer's memory must be brought back"


def _percent(share: float) -> str:
    return f"{share:.0%}"
