"""The steps of a run as the state and the log of transformers' Trainer, while the run goes on.

Invariant (tests/unit/trl, tests/e2e): each step is told once, also by a run that goes on after a stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import TrainerState

from megatron_rl.api import OF_STEPS, Run
from megatron_rl.loop.checkpoints import find_checkpoints
from megatron_rl.observe.records import read_metrics
from megatron_rl.trl.callbacks import Callbacks
from megatron_rl.trl.metrics import named


class RunProgress:
    def __init__(self, callbacks: Callbacks, state: TrainerState) -> None:
        self.callbacks, self.state = callbacks, state
        self._updates, self._updates_per_epoch, self._rows_per_step = 1, 1, 0
        self._seen, self._saved = 0, 0
        self._lost: list[dict[str, float]] = []
        """The steps after the newest checkpoint, as long as the continued run has not removed them."""

    def begin(self, steps: int, given: Any, folder: Path | None) -> None:
        """
        Args:
            steps: of the run.
            given: a GivenGrpo or a GivenOffline.
            folder: of the run that goes on, whose newest checkpoint's steps the callbacks have seen; None if it begins.
        """
        self._updates, self._updates_per_epoch = given.updates, given.updates_per_epoch
        self._rows_per_step = getattr(given, "rows_per_step", 0)
        self.state.max_steps = steps * given.updates
        self.state.num_train_epochs = -(-self.state.max_steps // given.updates_per_epoch)
        self._recall(folder)
        for event in ("on_train_begin", "on_epoch_begin", "on_step_begin"):
            self.callbacks.tell(event)

    def _recall(self, folder: Path | None) -> None:
        """Take the state of the newest checkpoint of a run, which the callbacks have seen; None if there is no run."""
        checkpoints = [] if folder is None else list(find_checkpoints(folder / "checkpoints"))
        records = [] if folder is None else read_metrics(folder)
        self._saved = max(checkpoints, default=0)
        self.state.global_step = self._saved * self._updates
        self._seen = sum(record["step"] < self._saved for record in records)
        self._lost = records[self._seen :]
        self.state.log_history = [self._logs(one) for one in records[: self._seen]]

    def watch(self, run: Run) -> bool:
        """Tell the callbacks about new steps and checkpoints; True if one of them wants to stop."""
        records = read_metrics(run.folder)[self._seen :]
        if records != self._lost:
            self._lost = []
        for record in () if self._lost else records:
            self._seen += 1  # first: Ctrl-C may come while a callback runs
            logs = self._logs(record)
            self.state.global_step, self.state.epoch = logs["step"], logs["epoch"]
            self.state.log_history.append(logs)
            self.callbacks.tell("on_log", logs=logs)
            if logs.keys() & {"eval_reward", "eval_loss"}:
                self.callbacks.tell("on_evaluate", metrics={k: v for k, v in logs.items() if k.startswith("eval")})
            if record.keys() & OF_STEPS:
                self.callbacks.tell("on_step_end")
                if self.state.global_step % self._updates_per_epoch == 0:
                    self.callbacks.tell("on_epoch_end")
                if self.state.global_step < self.state.max_steps:
                    if self.state.global_step % self._updates_per_epoch == 0:
                        self.callbacks.tell("on_epoch_begin")
                    self.callbacks.tell("on_step_begin")
        steps = list(find_checkpoints(run.folder / "checkpoints"))
        if steps and max(steps) > self._saved:
            self._saved = max(steps)
            self.callbacks.tell("on_save")
        return bool(self.callbacks.control.should_training_stop)

    def close(self, run: Run, seconds: float) -> dict[str, float]:
        """Add the closing record of transformers to the log, and return it."""
        records = run.metrics
        mean = fmean(record.get("loss", 0.0) for record in records) if records else 0.0
        samples = sum(record.get("rollout/num_samples", self._rows_per_step) for record in records)
        found = {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(samples / seconds, 3) if seconds else 0.0,
            "train_steps_per_second": round(len(records) * self._updates / seconds, 3) if seconds else 0.0,
            "train_loss": mean,
        }
        self.state.log_history.append({**found, "epoch": self.state.epoch, "step": self.state.global_step})
        self.callbacks.tell("on_log", logs=found)
        return found

    def _logs(self, record: Mapping[str, float]) -> dict[str, Any]:
        """A record with TRL's names; it may have an evaluation alone."""
        step = (int(record["step"]) + bool(record.keys() & OF_STEPS)) * self._updates
        return {**named(record), "epoch": step / self._updates_per_epoch, "step": step}
