"""What watches a run in addition to its own files; the key `kind` chooses one.

Trackers receive the numbers of each step. `prometheus` serves them. `trace` and `profile` look closely at chosen steps.
`missing_packages` in megatron_rl/observe names the packages that are missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeInt

from megatron_rl.config.section import Section

if TYPE_CHECKING:
    from megatron_rl.config.schema import BaseConfig


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


class PrometheusEndpoint(Section):
    """An HTTP endpoint of the driver that Prometheus scrapes. Everyone who reaches the port can read the numbers."""

    kind: Literal["prometheus"] = "prometheus"
    port: Annotated[int, Field(ge=1, le=65535)] = 9400
    """The port. It serves all numbers of the newest step as gauges: `reward/mean` is
    `megatron_rl_reward_mean{run="NAME"}`."""
    engines: bool = False
    """Whether each engine serves vLLM's own metrics, too, at `port` + 1 + its index on its node, with the label
    `engine`. vLLM then keeps statistics of every step and request."""

    def conflicts(self, run: Any) -> Iterator[str]:
        if not self.engines:
            return
        rollout = getattr(run, "rollout", None)
        if rollout is None:
            yield "observe: prometheus.engines is true, but supervised training has no engines; remove it"
        elif rollout.backend is not None:
            yield (
                "observe: prometheus.engines serves the metrics of vLLM, and rollout.backend is a class of your own; "
                "remove one of them"
            )
        elif self.port + rollout.num_engines > 65535:
            yield (
                f"observe: prometheus.port is {self.port}, and {rollout.num_engines} engines need the ports after it, "
                "beyond 65535; lower the port"
            )


Steps = Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]


def _steps_beyond(kind: str, steps: tuple[int, ...], run: BaseConfig) -> Iterator[str]:
    beyond = [step for step in steps if step >= run.run.steps]
    if beyond:
        yield (
            f"observe: {kind}.steps has {', '.join(map(str, beyond))}, but the run has the steps 0 to "
            f"{run.run.steps - 1} (run.steps); choose earlier steps"
        )


class StepTrace(Section):
    """A trace of chosen steps over all processes, `traces/step_000003.json` in the run folder, for Perfetto
    (ui.perfetto.dev) or Chrome (chrome://tracing)."""

    kind: Literal["trace"] = "trace"
    steps: Steps
    """The steps, counted from 0."""

    def conflicts(self, run: Any) -> Iterator[str]:
        yield from _steps_beyond("trace", self.steps, run)


class StepProfile(Section):
    """Profiles of chosen steps of chosen trainer ranks, in the folder `profiles` of the run folder."""

    kind: Literal["profile"] = "profile"
    tool: Literal["torch", "nsys"] = "torch"
    """`torch`: torch.profiler writes a trace of each step and rank. `nsys`: the ranks are started under
    `nsys profile`, which must be installed on their nodes, and their work is marked by NVTX ranges."""
    steps: Steps
    """The steps, counted from 0."""
    ranks: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (0,)
    """The trainer ranks. Each profile slows its rank down, and all ranks wait for it."""
    memory: bool = False
    """Whether the ranks write snapshots of CUDA's memory: at the end of each of the steps, and when a rank runs out of
    memory. pytorch.org/memory_viz shows them."""

    def conflicts(self, run: Any) -> Iterator[str]:
        yield from _steps_beyond("profile", self.steps, run)
        num_ranks = run.policy.parallel.mesh.world_size
        alien = [rank for rank in self.ranks if rank >= num_ranks]
        if alien:
            yield (
                f"observe: profile.ranks has {', '.join(map(str, alien))}, but the trainer has the ranks 0 to "
                f"{num_ranks - 1} (policy.parallel); choose other ranks"
            )
        if not run.cluster.gpus_per_trainer:
            why = "but trainers run on CPUs (cluster.gpus_per_trainer is 0)"
            if self.tool == "nsys":
                yield f"observe: profile.tool is nsys, which profiles GPUs, {why}; use torch"
            if self.memory:
                yield f"observe: profile.memory writes snapshots of CUDA's memory, {why}; remove it"


TrackerConfig = WandbTracker | TensorboardTracker | MlflowTracker | PrometheusEndpoint
"""What receives the numbers of each step."""
ObserverConfig = Annotated[
    WandbTracker | TensorboardTracker | MlflowTracker | PrometheusEndpoint | StepTrace | StepProfile,
    Field(discriminator="kind"),
]


def _one_of_a_kind(observers: tuple[ObserverConfig, ...]) -> tuple[ObserverConfig, ...]:
    counts = Counter(observer.kind for observer in observers)
    for kind, count in counts.items():
        if count > 1:
            raise ValueError(f"the kind {kind} is given {count} times; give each kind once at most")
    return observers


ObserverConfigs = Annotated[tuple[ObserverConfig, ...], AfterValidator(_one_of_a_kind)]
