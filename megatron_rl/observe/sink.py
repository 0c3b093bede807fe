"""The output of a run: the screen, metrics.jsonl, samples.jsonl, warnings.log and the experiment trackers.

Invariants: every logged step is one flushed line. Phases never overlap, so the times of the phases and of `other` add
up to the total time of a step. The files of a resumed run are the same as if it had never stopped. The failure of a
tracker is shown once, and the records that it lost are counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Console

from megatron_rl.observe.live import LiveView
from megatron_rl.observe.records import METRICS, SAMPLES, cut, write_line
from megatron_rl.observe.trackers import TrackerFeed
from megatron_rl.processes import open_text
from megatron_rl.types import Group, Metrics, Tokenizer, Tokens

NUM_ANSWERS = 3
"""The largest number of answers that one call of `samples` records."""
WARNINGS = Path("logs", "warnings.log")
"""The file of warnings in the run folder, with lines like `step 12: what is wrong`."""


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
        steps: the number of steps of the whole run, for the progress bar.
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
        steps: int,
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
        self._step = self._num_fed = resume_at or 0
        self._warned = ""
        self._told: set[str] = set()
        self._tokenizer, self._delimiter = tokenizer, delimiter
        self._view = LiveView(console, steps)
        self._seconds: dict[str, float] = {}
        self._phase: str | None = None
        self._started: float | None = None

    def feed(self, feeds: Sequence[TrackerFeed]) -> None:
        """Send every record from now on to these trackers too, and print where people find the run there."""
        self._feeds |= {feed.kind: feed for feed in feeds}
        for feed in feeds:
            self._view.tell(f"{feed.kind}: {feed.where}")

    def __enter__(self) -> RunSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def log(self, step: int, metrics: Metrics) -> None:
        now = time.perf_counter()
        total = now - (self._started or now)
        times = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        times |= {"time/other_s": total - sum(self._seconds.values()), "time/total_s": total}
        self._seconds, self._started = {}, now
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

    def rewind(self, step: int) -> None:
        """Remove the lines of `step` and of later steps, which will be done again. The trackers keep their records of
        these steps and get no others, because they accept no step twice."""
        for path in (self.run_folder / METRICS, self.run_folder / SAMPLES):
            if path.exists():
                cut(path, step)
        self._step = step

    def warn(self, message: str) -> None:
        """Show a warning, and write it with its step to logs/warnings.log. A repetition of the last warning is
        ignored."""
        if message == self._warned:
            return
        self._warned = message
        self._view.warn(message)
        path = self.run_folder / WARNINGS
        path.parent.mkdir(exist_ok=True)
        with open_text(path, "a") as file:
            file.write(f"step {self._step}: {' '.join(message.splitlines())}\n")

    def _tell_failures(self) -> None:
        for feed in self._feeds.values():
            if feed.failure and feed.kind not in self._told:
                self._told.add(feed.kind)
                self.warn(
                    f"{feed.kind} does not accept the run's numbers ({feed.failure}); the run continues, and all "
                    f"numbers are in {self.run_folder / METRICS}"
                )

    def samples(self, step: int, groups: Sequence[Group], payloads: Sequence[Sequence[Tokens]]) -> None:
        """Write the first answer of each of the first groups, including special tokens."""
        for group, payload in zip(groups[:NUM_ANSWERS], payloads[:NUM_ANSWERS], strict=True):
            sample, prompt = group.rollouts[0], group.prompt
            response = payload[0].ids[sample.num_prompt_tokens :].tolist()
            thought, answer = self._split(self._tokenizer.decode(response, skip_special_tokens=False))
            question = prompt.messages
            if not isinstance(question, str):
                question = "\n".join(f"{turn['role']}: {turn['content']}" for turn in question)
            self._append(
                SAMPLES,
                {
                    "step": step,
                    "uid": prompt.uid,
                    "prompt": question,
                    "thought": thought,
                    "answer": answer,
                    "ground_truth": prompt.columns.get("ground_truth"),
                    "reward": sample.verdict.score if sample.verdict else None,
                    "reason": sample.verdict.reason if sample.verdict else "",
                    "details": dict(sample.verdict.details) if sample.verdict else {},
                    "finish": sample.finish,
                    "num_tokens": len(response),
                },
            )

    def _split(self, text: str) -> tuple[str, str]:
        """The thought with its delimiter, and the answer."""
        if not self._delimiter or self._delimiter not in text:
            return "", text
        thought, delimiter, answer = text.partition(self._delimiter)
        return thought + delimiter, answer

    def _append(self, name: str, record: Mapping[str, object]) -> None:
        with open_text(self.run_folder / name, "a") as file:
            write_line(file, record)
