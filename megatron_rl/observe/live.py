"""The run on the screen: a live table in a terminal, and elsewhere plain lines, at most one in a second.

Invariant: everything shown is derived from the logged records alone, and a metric that was not logged is left out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from math import inf, isfinite, nan

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_rl.observe.records import heldout, reward_names, time_split

SPARKS = "▁▂▃▄▅▆▇█"
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
BAR_WIDTH = 48
OF_LAG = ("lag/mean", "stream/running", "stream/ready")
"""The metrics of answers to later steps."""
SPARK_METRICS = {
    "reward": "reward/mean",
    "held-out accuracy": "eval/accuracy",
    "held-out reward": "eval/reward_mean",
}
"""The figures that are shown together with their history."""


def figures(record: Mapping[str, float]) -> dict[str, str]:
    """The most important figures of a record, as text. Each reward has a figure of its own if there are several, or if
    it abstained."""
    label, heldout_name = heldout([record])
    formats = {
        "loss": ("loss", "{:.4f}"),
        "critic loss": ("critic/loss", "{:.4f}"),
        "pairs right": ("preference/accuracy", "{:.2f}"),
        "held-out loss": ("eval/loss", "{:.4f}"),
        "reward": ("reward/mean", "{:.3f}"),
        label: (heldout_name, "{:.3f}"),
        "reasoning": ("length/thought_mean", "{:,.1f} tokens"),
        "answer": ("length/answer_mean", "{:,.1f} tokens"),
        "speed": ("rollout/tokens_per_s", "{:,.0f} tokens/s"),
        "engines idle": ("rollout/idle", "{:.0%}"),
        "lag": ("lag/mean", "{:.2f} steps"),
        "groups under way": ("stream/running", "{:.0f}"),
        "ready": ("stream/ready", "{:.0f}"),
        "grad norm": ("grad_norm", "{:.3g}"),
        "mismatch": ("mismatch/mean_abs", "{:.1e}"),
    }
    if not any(record.get(name) for name in OF_LAG):  # with active sampling alone they are always 0
        formats = {label: one for label, one in formats.items() if one[0] not in OF_LAG}
    told = {label: form.format(record[name]) for label, (name, form) in formats.items() if name in record}
    names = reward_names([record])
    for name in names:
        abstained = record.get(f"reward/{name}/abstained", 0.0)
        if len(names) > 1 or abstained:
            mean = f"{record[f'reward/{name}/mean']:.3f}" if f"reward/{name}/mean" in record else "no score"
            told[name] = f"{mean}, {abstained:.1%} no reward" if abstained else mean
    return told


def split_text(seconds: Mapping[str, float]) -> Text:
    """Show where the time went as a coloured bar and its legend."""
    total = sum(seconds.values()) or 1.0
    bar, legend = Text(), Text()
    filled, passed = 0, 0.0
    for index, (phase, value) in enumerate(seconds.items()):
        colour = "bright_black" if phase == "other" else COLOURS[index % len(COLOURS)]
        passed += value
        width = round(passed / total * BAR_WIDTH) - filled
        filled += width
        bar.append("█" * width, colour)
        legend.append(" ■ ", colour).append(f"{phase} {value / total:.0%} ")
    return Text.assemble(bar, "\n", legend)


def sparkline(values: list[float]) -> str:
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in values)


class LiveView:
    """The live table. It appears with the first phase or record, so that it does not overwrite what is printed during
    the start."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._start = time.monotonic()
        self._first_step: int | None = None
        self._printed = -inf
        self._phase = ""
        self._record: dict[str, float] = {}
        self._history: dict[str, deque[float]] = {}
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)

    def enter(self, phase: str) -> None:
        self._phase = phase
        self._begin()

    def update(self, record: Mapping[str, float]) -> None:
        step = int(record["step"])
        self._first_step = step if self._first_step is None else self._first_step
        if not self._console.is_interactive:
            now = time.monotonic()
            # After the last step there is a record of the export's time; an evaluation may be in it.
            if figures(record) and (now - self._printed >= 1 or step + 1 >= self._steps):
                self._printed = now
                self._console.print(self._line(record), highlight=False, markup=False, soft_wrap=True)
            return
        self._begin()
        # An evaluation is not made in every step, so the last one stays. Times are summed over the run.
        for name, value in record.items():
            before = self._record.get(name, 0.0) if name.startswith("time/") else 0.0
            self._record[name] = before + value
        for name in SPARK_METRICS.values():
            if isfinite(record.get(name, nan)):
                self._history.setdefault(name, deque(maxlen=40)).append(record[name])
        self._live.refresh()

    def tell(self, message: str) -> None:
        """Print one line above the table."""
        self._console.print(Text(message, "bright_black"), soft_wrap=True)

    def warn(self, message: str) -> None:
        """Print one yellow line above the table, where it stays."""
        self._console.print(Text(f"warning: {message}", "yellow"), soft_wrap=True)

    def stop(self) -> None:
        if self._live.is_started:
            self._phase = ""
            self._live.stop()

    def _begin(self) -> None:
        if self._console.is_interactive and not self._live.is_started:
            self._start = time.monotonic()
            self._live.start()

    def _line(self, record: Mapping[str, float]) -> str:
        """step 11 (12/60 done)  reward 0.720  held-out 0.870  ...  1.21 s: generate 45%, update 40%, other 15%"""
        done, total = min(int(record["step"]) + 1, self._steps), record["time/total_s"]
        split = ", ".join(f"{phase} {s / (total or 1):.0%}" for phase, s in time_split([record]).items())
        shown = [f"{label} {text}" for label, text in figures(record).items()]
        return "  ".join([f"step {int(record['step'])} ({done}/{self._steps} done)", *shown, f"{total:.2f} s: {split}"])

    def _render(self) -> Panel:
        done = min(int(self._record["step"]) + 1, self._steps) if self._record else 0
        elapsed = time.monotonic() - self._start
        here, remaining = done - (self._first_step or 0), self._steps - done
        left = f", {_clock(elapsed / here * remaining)} left" if here > 0 and remaining else ""
        head = Table.grid(padding=(0, 1))
        head.add_row(
            f"[bold]{done}/{self._steps} steps[/]",
            ProgressBar(total=self._steps, completed=done, width=BAR_WIDTH),
            f"[bright_black]{_clock(elapsed)}{left}[/]",
            f"[italic cyan]{self._phase}[/]",
        )
        table = Table.grid(padding=(0, 2))
        for label, text in figures(self._record).items():
            history = list(self._history.get(SPARK_METRICS.get(label, ""), ()))
            table.add_row(f"[bright_black]{label}[/]", f"[bold]{text}[/]", sparkline(history))
        split = time_split([self._record])
        return Panel(Group(head, "", table, "", split_text(split)) if split else head, expand=False)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
