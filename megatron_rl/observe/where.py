"""Where the time of a run's steps goes, which resource holds the others up, and what would help first.

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
"""A rank that takes this many times as long as the median rank holds the others up (loop/stragglers.py warns)."""
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
    trained = [record for record in records if "time/update_s" in record]
    if not trained:
        raise ValueError("no step of the run has trained yet, so nothing is known of its time")
    steps = trained[1:] or trained
    split = {name: seconds / len(steps) for name, seconds in time_split(steps).items()}
    mean = {name: fmean(own) for name in _names(steps) if (own := [step[name] for step in steps if name in step])}
    total = sum(split.values())
    shares = {name: seconds / (total or 1.0) for name, seconds in split.items()}
    rewards = _rewards(mean)
    lag = "lag/mean" in mean  # engines answer while the trainer works
    return Where(
        num_steps=len(steps),
        seconds=total,
        resources=[*_phases(split, shares), *_others(mean, rewards, total)],
        path=_path(split, shares, mean, rewards, lag),
        advice=_advice(split, shares, mean, rewards, lag),
    )


def _names(steps: Records) -> list[str]:
    return list(dict.fromkeys(name for step in steps for name in step))


def _rewards(mean: Mapping[str, float]) -> dict[str, float]:
    """The seconds of each reward in a step, the slowest first."""
    found = {
        name.removeprefix("reward/").removesuffix("/seconds"): seconds
        for name, seconds in mean.items()
        if name.startswith("reward/") and name.endswith("/seconds")
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _phases(split: Mapping[str, float], shares: Mapping[str, float]) -> Iterator[Resource]:
    for name, seconds in split.items():
        yield Resource(f"phase {name}", seconds, "s", shares[name])


KNOWN = {
    "rollout/tokens_per_s": ("engines", "tokens/s"),
    "rollout/idle": ("engines idle", "share"),
    "sync/paused_s": ("push: pause of the engines", "s"),
    "sync/transfer_s": ("push: transfer of the weights", "s"),
    "perf/tokens_per_s": ("trainer", "tokens/s"),
    "slowest_rank/ratio": ("slowest trainer rank by the median", "times"),
    "balance/bubble": ("trainer's pipeline idle, as planned", "share"),
    "balance/fill": ("micro-batches filled", "share"),
    "machine/waiting": ("core time that nobody used", "share"),
}
"""What the table says besides the phases, by metric: its name there and its unit."""


def _others(mean: Mapping[str, float], rewards: Mapping[str, float], total: float) -> Iterator[Resource]:
    for metric, (name, unit) in KNOWN.items():
        if metric in mean:
            yield Resource(name, mean[metric], unit, mean[metric] / total if unit == "s" and total else None)
    for reward, seconds in rewards.items():
        yield Resource(f"reward {reward}, all processes", seconds, "s")


def _path(
    split: Mapping[str, float],
    shares: Mapping[str, float],
    mean: Mapping[str, float],
    rewards: Mapping[str, float],
    lag: bool,
) -> str:
    generate, idle = shares.get("generate", 0.0), mean.get("rollout/idle", 0.0)
    if not lag or "generate" not in shares:
        longest = max(split, key=lambda name: split[name])
        order = [name for name in ("sync", "generate", "plan", "logprobs", "update") if name in split]
        return (
            f"in turns: {' -> '.join(order)}, each waits for the one before; the longest is {longest} with "
            f"{split[longest]:.2f} of {sum(split.values()):.2f} s"
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


def _advice(
    split: Mapping[str, float],
    shares: Mapping[str, float],
    mean: Mapping[str, float],
    rewards: Mapping[str, float],
    lag: bool,
) -> str:
    idle = mean.get("rollout/idle", 0.0)
    if lag and idle > IDLE and shares.get("generate", 0.0) < SMALL:
        return f"engines are idle for {_percent(idle)} of their time: fewer engines, or more trainer ranks"
    longest = max(split, key=lambda name: split[name])
    is_part = f"{longest} is {_percent(shares[longest])} of the step"
    if longest in ("update", "logprobs"):
        ratio, fill = mean.get("slowest_rank/ratio", 1.0), mean.get("balance/fill", 1.0)
        if ratio >= SLOW:
            return (
                f"{is_part}, and one rank takes {ratio:.1f} times as long as the median: repair or replace its machine"
            )
        if fill < HALF_FILLED:
            return (
                f"{is_part}, and its micro-batches are filled to {_percent(fill)}: more answers in a step, or fewer "
                "trainer ranks, fill them"
            )
        return f"{is_part}: more trainer ranks, or larger micro-batches (balance.max_tokens_per_microbatch)"
    if longest == "generate":
        slowest = next(iter(rewards), None)
        if slowest is not None and sum(rewards.values()) > split[longest] / 2:
            return (
                f"{is_part}, and rewards take {sum(rewards.values()):.2f} s of processes' time, most of it {slowest}: "
                "more verifiers (cluster.verifiers), or a faster reward"
            )
        if not lag:
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
