"""Where a run's numbers go beside its own files: experiment trackers, a union by `kind`.

A kind is named as the Python package that it needs; `observe.check_packages` refuses one that is not installed.
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
    entity: str | None = None
    """User or team; null is the one that is logged in."""
    mode: Literal["online", "offline"] = "online"
    """offline: everything stays in RUN/wandb until `wandb sync` sends it."""


class TensorboardTracker(Section):
    """TensorBoard's event files."""

    kind: Literal["tensorboard"] = "tensorboard"
    folder: Path | None = None
    """null: RUN/tensorboard."""


class MlflowTracker(Section):
    """MLflow Tracking."""

    kind: Literal["mlflow"] = "mlflow"
    tracking_uri: str | None = None
    """A server (`http://host:5000`) or a database (`sqlite:///mlflow.db`); null: MLFLOW_TRACKING_URI, or else
    MLflow's own default."""
    experiment: str = "megatron_rl"


TrackerConfig = Annotated[WandbTracker | TensorboardTracker | MlflowTracker, Field(discriminator="kind")]


def _one_of_a_kind(trackers: tuple[TrackerConfig, ...]) -> tuple[TrackerConfig, ...]:
    counts = Counter(tracker.kind for tracker in trackers)
    for kind, count in counts.items():
        if count > 1:
            raise ValueError(f"{kind} stands there {count} times; a run is told to each kind of tracker once")
    return trackers


TrackerConfigs = Annotated[tuple[TrackerConfig, ...], AfterValidator(_one_of_a_kind)]
