"""The output of a run: the screen, metrics.jsonl, samples.jsonl, warnings.log and the experiment trackers.

Invariants: every logged step is one flushed line. Phases never overlap, so the times of the phases and of `other` add
up to the total time of a step. The files of a resumed run are the same as if it had never stopped. The failure of a
tracker is shown once, and the records that it lost are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import ENOENT
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Protocol

from rich.console import Console

from megatron_rl import spans
from megatron_rl.config.health import HealthRule
from megatron_rl.config.schema import RunConfig
from megatron_rl.observe.live import LiveView
from megatron_rl.observe.records import METRICS, SAMPLES, WARNINGS, cut, read_lines, write_line
from megatron_rl.observe.samples import Pieces, advantage_of, answer_record
from megatron_rl.observe.trackers import TrackerFeed
from megatron_rl.processes import open_text
from megatron_rl.types import Group, Metrics, Share, Tokenizer, Tokens


class Watcher(Protocol):
    """What looks at each step from outside the loop."""

    def begin(self, step: int) -> None:
        """A step begins, perhaps again."""

    def end(self, step: int) -> Metrics:
        """A step has ended. Returns what it adds to the step's record. Its time belongs to the next step."""
        ...

    def close(self) -> None:
        """The run ends."""


def check_unused(run_folder: Path) -> None:
    """
    Raises:
        ValueError: the folder has the files of an earlier run, which would be mixed with the new run's.
    """
    if any((run_folder / name).exists() for name in (METRICS, SAMPLES)):
        raise ValueError(
            f"{run_folder} has the files of an earlier run; continue it with --resume auto, delete the folder, or "
            "choose another run.name"
        )


class RunSink:
    """The implementation of `ports.Sink`. As a context manager it closes the trackers and the live view.

    Steps are counted from 0, and the record of step s was measured with the weights of version s. The total time of a
    step runs from the `log` of the step before to its own `log`; the time of the first step runs from the first phase.

    Args:
        run_folder: the folder of the files; it is created if it does not exist.
        run: the number of steps of the whole run, for the progress bar, and the health rules that end it.
        console: an interactive terminal shows a live table, and any other output a plain line for each step.
        tokenizer: decodes the answers.
        delimiter: the text that ends the thought; empty if the model does not think.
        resume_at: the next step of a resumed run; the lines of this step and of later ones are removed. None means a
            new run.

    Raises:
        ValueError: the run is new, but the folder has the files of an earlier one.
    """

    def __init__(
        self,
        run_folder: Path,
        run: RunConfig,
        console: Console,
        tokenizer: Tokenizer,
        delimiter: str = "",
        resume_at: int | None = None,
    ) -> None:
        run_folder.mkdir(parents=True, exist_ok=True)
        if resume_at is None:
            check_unused(run_folder)
        for path in (run_folder / METRICS, run_folder / SAMPLES):
            if path.exists():
                cut(path, resume_at or 0)
        self.run_folder = run_folder
        self._feeds: dict[str, TrackerFeed] = {}
        self._watchers: list[Watcher] = []
        self._step = self._num_fed = resume_at or 0
        self._warned = ""
        self._told: set[str] = set()
        self._begun: set[str] = set()
        self._pieces, self._delimiter, self._stop_on = Pieces(tokenizer), delimiter, run.stop_on
        self._view = LiveView(console, run.steps)
        self._seconds: dict[str, float] = {}
        self._phase: str | None = None
        self._started: float | None = None

    def feed(self, feeds: Sequence[TrackerFeed]) -> None:
        """Send every record from now on to these trackers too, and print where people find the run there."""
        self._feeds |= {feed.kind: feed for feed in feeds}
        for feed in feeds:
            self._view.tell(f"{feed.kind}: {feed.where}")

    def watch(self, watchers: Sequence[Watcher]) -> None:
        """Let these look at every step from now on. Steps begin now, or when the step before has been logged."""
        self._watchers += watchers
        for watcher in watchers:
            watcher.begin(self._step)

    def tell(self, message: str) -> None:
        """Show one line."""
        self._view.tell(message)

    def __enter__(self) -> RunSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for watcher in self._watchers:
            watcher.close()
        for feed in self._feeds.values():
            feed.close(finished=kind is None)
        self._tell_failures()
        for feed in self._feeds.values():
            if feed.num_lost:
                self.warn(f"{feed.kind} lost {feed.num_lost} records; they are in {self.run_folder / METRICS}")
        self._view.stop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of the body of the `with` statement as `time/<name>_s`. The times of phases with the same
        name are added. A phase must not be inside another one."""
        assert self._phase is None, f"phase {name!r} inside phase {self._phase!r}: its time would count twice"
        start = time.perf_counter()
        self._started = self._started or start
        self._phase = name
        self._view.enter(name)
        try:
            yield
        finally:
            self._phase = None
            end = time.perf_counter()
            self._seconds[name] = self._seconds.get(name, 0.0) + end - start
            spans.record(name, round(start * 1e9), round(end * 1e9), spans.PHASES)

    def log(self, step: int, metrics: Metrics) -> Metrics:
        now = time.perf_counter()
        total = now - (self._started or now)
        times = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        times |= {"time/other_s": total - sum(self._seconds.values()), "time/total_s": total}
        spans.record(f"step {step}", round((self._started or now) * 1e9), round(now * 1e9), spans.PHASES)
        self._seconds, self._started = {}, now
        for watcher in self._watchers:
            times |= watcher.end(step)
        lost = {f"observe/{kind}_lost": feed.num_lost for kind, feed in self._feeds.items() if feed.num_lost}
        record = {"step": step, **metrics, **times, **lost}
        self._append(METRICS, record)
        self._view.update(record)
        if step >= self._num_fed:
            for feed in self._feeds.values():
                feed.log(record)
        self._step = step + 1
        self._num_fed = max(self._num_fed, self._step)
        self._tell_failures()
        for watcher in self._watchers:
            watcher.begin(self._step)
        return record

    def recorded(self, last: int) -> list[Metrics]:
        """See `ports.Sink`."""
        records = read_lines(self.run_folder / METRICS, last)
        return [{name: value for name, value in record.items() if value is not None} for record in records]

    def rewind(self, step: int) -> None:
        """Remove the lines of `step` and of later steps, which will be done again. The trackers keep their records of
        these steps and get no others, because they accept no step twice."""
        for path in (self.run_folder / METRICS, self.run_folder / SAMPLES):
            if path.exists():
                cut(path, step)
        self._step = step
        for watcher in self._watchers:
            watcher.begin(step)

    def warn(self, message: str, rule: HealthRule | None = None, step: int | None = None) -> None:
        """Show a warning, and write it with its step to logs/warnings.log. A repetition of the last warning is
        ignored.

        Raises:
            ValueError: `run.stop_on` has the rule.
        """
        if message != self._warned:
            self._warned = message
            self._write(message, self._step if step is None else step)
            if rule not in self._stop_on:  # the screen shows the error
                self._view.warn(message)
        if rule in self._stop_on:
            raise ValueError(f"{message}. The run stops here, because run.stop_on has {rule}")

    def _write(self, message: str, step: int) -> None:
        path = self.run_folder / WARNINGS
        path.parent.mkdir(exist_ok=True)
        with open_text(path, "a") as file:
            file.write(f"step {step}: {' '.join(message.splitlines())}\n")

    def _tell_failures(self) -> None:
        for feed in self._feeds.values():
            if feed.failure and feed.kind not in self._told:
                self._told.add(feed.kind)
                self.warn(
                    f"{feed.kind} does not accept the run's numbers ({feed.failure}); the run continues, and all "
                    f"numbers are in {self.run_folder / METRICS}"
                )

    def samples(
        self,
        step: int,
        groups: Sequence[Group],
        fetch: Callable[[Group], Sequence[Tokens]],
        most: int,
        shares: Sequence[Share] = (),
    ) -> None:
        """Write the first answers of the step, including special tokens; see `answer_record`."""
        answers = ((group, index) for group in groups for index in range(len(group.rollouts)))
        payload: tuple[Group | None, Sequence[Tokens]] = None, ()
        for place, (group, index) in enumerate(islice(answers, most)):
            if payload[0] is not group:
                payload = group, fetch(group)
            record = answer_record(group, index, payload[1][index], self._pieces, self._delimiter)
            self._append(SAMPLES, {"step": step} | record | advantage_of(place, shares))

    def _append(self, name: str, record: Mapping[str, object]) -> None:
        path = self.run_folder / name
        if name in self._begun and not path.exists():
            if not (self.run_folder / WARNINGS).parent.exists():
                what = "the run's folder was moved or removed while the run goes on; put it back, and continue the run"
                raise FileNotFoundError(ENOENT, what, str(self.run_folder))
            self.warn(f"{path} was removed while the run writes it: what it had is lost, and it begins again here")
        self._begun.add(name)
        with open_text(path, "a") as file:
            write_line(file, record)
