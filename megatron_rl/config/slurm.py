"""The section `slurm`: the nodes that a job requests from Slurm. It has an effect only with `--slurm`."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.section import Section


class SlurmConfig(Section):
    nodes: PositiveInt = 1
    """The number of nodes that train. If `rollout_nodes` is 0, the engines run on these nodes too."""
    rollout_nodes: Annotated[int, Field(ge=0)] = 0
    """The number of additional nodes, used only for rollouts."""
    rollout_options: tuple[str, ...] = ()
    """Options of sbatch for the rollout nodes, such as `--partition=l40s`. With any of them the job is heterogeneous:
    the rollout nodes are its second component. Without them all nodes are of one kind."""
    gpus_per_node: Annotated[int, Field(ge=0)] | None = None
    """The number of GPUs to request on each node; null requests none, which is right where Slurm allocates whole nodes
    with their GPUs."""
    partition: str | None = None
    """The partition; null means the cluster's default."""
    account: str | None = None
    """The account that is charged; null means the user's default."""
    time_limit_h: PositiveFloat | None = None
    """The time limit of the job in hours; null means the partition's limit. A run that needs longer continues in the
    next job: see `requeue`."""
    notice_s: PositiveInt = 300
    """The number of seconds before the time limit at which the run is asked to stop with a checkpoint. A step and a
    checkpoint must fit into this time."""
    requeue: bool = True
    """Whether a job that was stopped by its time limit, by preemption or by a failed node goes back into the queue and
    continues."""
    container: str | None = None
    """The container image that runs all processes; null means none. Apptainer runs `*.sif` and `docker://...`, Enroot
    with Pyxis all others (srun --container-image). A file on the shared file system starts at once; an image of a
    registry is imported in each start of the job."""
    mounts: tuple[str, ...] = ()
    """Folders that the container sees besides the working folder, the run's folder and the node's /tmp, each as
    `outside:inside`."""
    environment: str | None = None
    """A line of bash that prepares each node, such as `source /shared/venv/bin/activate`. null: if there is no
    container, the submitting Python is put first on PATH."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """The seeds of a job array, with one run for each seed; run.name is extended by `/seed_N`."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, such as `--qos=high` or `--dependency=singleton`. A job takes all memory of its nodes
    (`--mem=0`) unless one of them says how much."""

    @model_validator(mode="after")
    def _options_have_a_meaning(self) -> Self:
        if self.rollout_options and not self.rollout_nodes:
            raise ValueError("rollout_options are given, but rollout_nodes is 0; set rollout_nodes, or remove them")
        if self.mounts and not self.container:
            raise ValueError("mounts are given without a container; set slurm.container, or remove them")
        if self.seeds and self.rollout_options:
            raise ValueError("Slurm has no arrays of heterogeneous jobs; submit one job for each seed (run.seed=N)")
        if self.time_limit_h is not None and self.time_limit_h * 3600 <= self.notice_s:
            raise ValueError(
                f"time_limit_h is {self.time_limit_h * 3600:g} s, and the run would be asked to stop notice_s = "
                f"{self.notice_s} s before: when it begins; raise time_limit_h, or lower notice_s"
            )
        for option in (*self.options, *self.rollout_options):
            if not re.fullmatch(r"--?[A-Za-z][\w-]*(=.*)?", option):
                raise ValueError(f"{option!r} is not an option of sbatch; write it as `--name=value`")
        return self
