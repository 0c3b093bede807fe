"""Experiment trackers in addition to metrics.jsonl: Weights & Biases, TensorBoard, MLflow, and the endpoint for
Prometheus.

Invariants: the steps of a run never wait for a tracker. The failure of a tracker does not end the run: it is shown
once, lost records are counted, and all numbers are in metrics.jsonl. A resumed run continues the tracker's run, whose
id is in the run folder.
"""

from __future__ import annotations

import json
import queue
import re
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any, Protocol

from megatron_rl.config.exception_text import said
from megatron_rl.config.observe import (
    MlflowTracker,
    PrometheusEndpoint,
    TensorboardTracker,
    TrackerConfig,
    WandbTracker,
)
from megatron_rl.config.schema import BaseConfig
from megatron_rl.observe.prometheus import PrometheusTracker
from megatron_rl.observe.provenance import flat, provenance
from megatron_rl.ports import StopRequested

IDENTITIES = "trackers.json"
"""The file in the run folder that has the id of the run at each kind of tracker."""
CLOSE_S = 30.0
"""The longest time, in seconds, that the end of a run waits for a tracker that has not accepted all records yet."""

PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "mlflow": "mlflow", "prometheus": "prometheus_client"}
"""The Python package of each kind; `pip install` takes the same name."""

MLFLOW_LENGTH = 250
"""The longest name of a metric, in characters."""

Record = Mapping[str, float]


class Tracker(Protocol):
    where: str
    """The place where people find the run: a URL, or a command."""

    def log(self, record: Record) -> None:
        """Send one record, which contains its `step`. It may raise any exception of the tracker's package."""

    def close(self, finished: bool) -> None: ...


def missing_packages(config: BaseConfig) -> list[str]:
    """One sentence for each configured tracker whose package is not installed."""
    # A folder with this name in the working folder, like the one that wandb creates, is no package; it has no origin.
    specs = {section.kind: find_spec(PACKAGES[section.kind]) for section in tracker_sections(config)}
    return [
        f"observe: the kind {kind} needs a package that is not installed; install it with "
        f"`pip install {PACKAGES[kind]}`, or remove the kind from `observe`"
        for kind, spec in specs.items()
        if spec is None or spec.origin is None
    ]


def tracker_sections(config: BaseConfig) -> list[TrackerConfig]:
    """The sections of `observe` that receive the numbers of each step."""
    return [section for section in config.observe if isinstance(section, TrackerConfig)]


def open_trackers(config: BaseConfig, resume_at: int | None) -> list[TrackerFeed]:
    """Open every configured tracker, and send it the resolved configuration.

    Args:
        resume_at: the next step of a resumed run, which continues the tracker's run. None means a new run.

    Raises:
        ValueError: a package is not installed, a tracker does not start (no login, no server), or the file with the
            runs' ids is damaged.
    """
    if missing := missing_packages(config):
        raise ValueError("\n".join(missing))
    path = config.run_folder / IDENTITIES
    identities = _read_identities(path) if resume_at is not None and path.exists() else {}
    feeds: list[TrackerFeed] = []
    for section in tracker_sections(config):
        try:
            tracker = _OPEN[type(section)](section, config, identities, resume_at)
        except StopRequested:
            raise
        except BaseException as error:  # each package has its own exceptions
            for feed in feeds:
                feed.close(finished=False)
            raise ValueError(
                f"observe: {section.kind} does not start: {said(error)}; correct its section, or "
                f"remove it from `observe`"
            ) from error
        feeds.append(TrackerFeed(section.kind, tracker))
        partial = path.with_suffix(".tmp")
        partial.write_text(json.dumps(identities, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    return feeds


def _read_identities(path: Path) -> dict[str, str]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(read, dict) and all(isinstance(value, str) for value in read.values()):
            return read
        reason = "it is no mapping of texts"
    except ValueError as error:  # no JSON, or no UTF-8
        reason = str(error)
    raise ValueError(
        f"{path} is damaged ({reason}): it has the ids of this run at the trackers; write them again, such as "
        f'{{"wandb": "ID"}}, or remove the file, and the trackers begin new runs'
    )


class TrackerFeed:
    """Sends records to a tracker in order, from a thread of its own.

    Records are lost if the tracker refused them, or had not accepted them when the run ended.
    """

    def __init__(self, kind: str, tracker: Tracker, close_s: float = CLOSE_S) -> None:
        self.kind, self.where = kind, tracker.where
        self.num_lost = 0
        """The number of lost records."""
        self.failure = ""
        """The message of the first failure; empty if there was none."""
        self._tracker, self._close_s = tracker, close_s
        self._work: queue.Queue[Record | bool] = queue.Queue()
        # The thread is a daemon, so that a server that does not answer cannot keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"tracker {kind}", daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        self._work.put(dict(record))

    def close(self, finished: bool) -> None:
        """Wait until the tracker has accepted all records, but at most `close_s` seconds. Records that it has not
        accepted by then are counted as lost."""
        self._work.put(finished)
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            self.num_lost += self._work.unfinished_tasks - 1  # the last task is the request to close
            self.failure = self.failure or f"no answer within {self._close_s:g} s at the end of the run"

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                if isinstance(work, bool):
                    self._tracker.close(work)
                    return
                self._tracker.log(work)
            except BaseException as error:  # each package has its own exceptions; the sink shows the failure
                self.failure = self.failure or said(error)
                if isinstance(work, bool):
                    return
                self.num_lost += 1
            self._work.task_done()


class _Wandb:
    def __init__(
        self, section: WandbTracker, config: BaseConfig, identities: dict[str, str], resume_at: int | None
    ) -> None:
        import wandb

        # Without `silent` and with the console on, wandb would write into the live view and copy the terminal.
        settings = wandb.Settings(silent=True, console="off", finish_timeout=CLOSE_S, finish_timeout_raises=True)
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            mode=section.mode,
            dir=config.run_folder,
            id=identities.setdefault("wandb", uuid.uuid4().hex),
            resume="allow" if section.mode == "online" else None,
            name=config.run.name,
            config=provenance(config),
            allow_val_change=True,  # a resumed run may have more steps
            settings=settings,
        )
        # wandb drops records whose step goes back, as after a resume. With `step` as the axis it keeps all of them.
        self._run.define_metric("*", step_metric="step")
        offline = f"offline; send it with: wandb sync {quote(str(config.run_folder))}/wandb/offline-run-*"
        self.where = offline if section.mode == "offline" else str(self._run.url)

    def log(self, record: Record) -> None:
        self._run.log(dict(record))

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class _Tensorboard:
    def __init__(
        self, section: TensorboardTracker, config: BaseConfig, identities: dict[str, str], resume_at: int | None
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = section.folder or config.run_folder / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=resume_at)
        if not resume_at:
            text = json.dumps(provenance(config), indent=2).replace("\n", "\n    ")  # Markdown shows it as code
            self._writer.add_text("config", f"    {text}", 0)
        self.where = f"tensorboard --logdir {quote(str(folder))}"

    def log(self, record: Record) -> None:
        step = int(record["step"])
        for name, value in record.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()


def mlflow_name(name: str) -> str:
    """A metric's name as MLflow takes it: `eval/pass_at_2` for `eval/pass@2`. It refuses all metrics of a call if one
    name has other characters than letters, digits and `_-. /`, is no plain path, or is longer than 250 characters. A
    name that is changed otherwise ends with its checksum, because two names must not become one."""
    plain = name.replace("@", "_at_")
    parts = [part if part.strip(".") else "_" for part in re.sub(r"[^\w\-. /]", "_", plain).split("/")]
    known = "/".join(parts)[:MLFLOW_LENGTH]
    if known == plain:
        return known
    return f"{known[: MLFLOW_LENGTH - 9]}_{zlib.crc32(name.encode()):08x}"


class _Mlflow:
    def __init__(
        self, section: MlflowTracker, config: BaseConfig, identities: dict[str, str], resume_at: int | None
    ) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=section.tracking_uri)
        if "mlflow" in identities:
            self._id = identities["mlflow"]
            self._client.update_run(self._id, status="RUNNING")
        else:
            known = self._client.get_experiment_by_name(section.experiment)
            experiment = known.experiment_id if known else self._client.create_experiment(section.experiment)
            self._id = self._client.create_run(experiment, run_name=config.run.name).info.run_id
            identities["mlflow"] = self._id
            params = [Param(name, str(value)) for name, value in flat(provenance(config)).items()]
            for start in range(0, len(params), 100):  # MLflow accepts 100 parameters in a call
                self._client.log_batch(self._id, params=params[start : start + 100])
        self.where = f"run {self._id} of the experiment {section.experiment} at {section.tracking_uri or 'the default'}"

    def log(self, record: Record) -> None:
        step, now = int(record["step"]), time.time_ns() // 10**6
        named = {mlflow_name(name): value for name, value in record.items() if name != "step"}
        metrics = [self._metric(name, float(value), now, step) for name, value in named.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "FAILED")


_OPEN: dict[type, Callable[[Any, BaseConfig, dict[str, str], int | None], Tracker]] = {
    WandbTracker: _Wandb,
    TensorboardTracker: _Tensorboard,
    MlflowTracker: _Mlflow,
    PrometheusEndpoint: PrometheusTracker,
}
