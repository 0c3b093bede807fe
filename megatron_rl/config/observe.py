"""Experiment trackers, which receive a run's numbers in addition to its own files; the key `kind` chooses one.

A kind has the name of the Python package that it needs; `missing_packages` in megatron_rl/observe names the missing
ones.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from megatron_rl.config.section import Section


class WandbTracker(Section):
    """Weights & Biases."""

    kind: Literal["wandb"] = "wandb"
    project: str = "megatron_rl"
    """The project that the run is added to."""
    entity: str | None = None
    """The user or the team that owns the run; null means the default entity of the user who is logged in."""
    mode: Literal["online", "offline"] = "online"
    """`offline` keeps everything in the folder `wandb` of the run folder until `wandb sync` sends it."""


class TensorboardTracker(Section):
    """TensorBoard, by its event files."""

    kind: Literal["tensorboard"] = "tensorboard"
    folder: Path | None = None
    """The folder of the event files; null means the folder `tensorboard` of the run folder."""


class MlflowTracker(Section):
    """MLflow Tracking."""

    kind: Literal["mlflow"] = "mlflow"
    tracking_uri: str | None = None
    """A server (`http://host:5000`) or a database (`sqlite:///mlflow.db`); null means the environment variable
    MLFLOW_TRACKING_URI, or MLflow's default if that is not set."""
    experiment: str = "megatron_rl"
    """The experiment that the run is added to; it is created if it does not exist."""


TrackerConfig = Annotated[WandbTracker | TensorboardTracker | MlflowTracker, Field(discriminator="kind")]


def _one_of_a_kind(trackers: tuple[TrackerConfig, ...]) -> tuple[TrackerConfig, ...]:
    counts = Counter(tracker.kind for tracker in trackers)
    for kind, count in counts.items():
        if count > 1:
            raise ValueError(f"the kind {kind} is given {count} times; give each kind of tracker once at most")
    return trackers


TrackerConfigs = Annotated[tuple[TrackerConfig, ...], AfterValidator(_one_of_a_kind)]
