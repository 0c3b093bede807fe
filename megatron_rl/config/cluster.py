"""The configuration of the cluster: the places and resources of processes, and the way of weights to the engines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from megatron_rl.config.section import Section

if TYPE_CHECKING:
    from megatron_rl.config.schema import BaseConfig, GrpoRunConfig


class BridgeConfig(Section):
    bucket_mib: Annotated[float, Field(gt=0)] = 64
    """The largest size of one message, in MiB. Each rank holds two such buffers besides its weights."""
    chains: PositiveInt | None = None
    """The number of chains of engines that receive weights. The trainers send to the first engine of each chain, and
    each engine sends to the next one, so the trainers send this number of copies for any number of engines. null: the
    trainers send to every engine."""
    verify: bool = False
    """true: after each weight sync the engines read back all that they wrote and compare it with the trainers'
    checksums. false: they do so after the first weight sync, and after each later one with 1 of 32 modules in turn."""
    timeout_s: Annotated[float, Field(gt=0)] = 300
    """The longest time, in seconds, that a weight sync may take."""

    def conflicts(self, run: GrpoRunConfig) -> Iterator[str]:
        engines = run.rollout.num_engines
        if self.chains is not None and self.chains > engines:
            yield (
                f"bridge.chains is {self.chains}, but there are {engines} engines (rollout.num_engines); every chain "
                "needs at least one engine, so lower bridge.chains"
            )


SECRET = re.compile("SECRET|PASSWORD|PASSWD|CREDENTIAL|TOKEN(?!IZER)|(?<!P)KEY", re.IGNORECASE)
"""The names of environment variables whose values must not be written to files. InfiniBand's partition keys (PKEY) are
no secrets."""


def _refuse_secret(name: str) -> str:
    if SECRET.search(name):
        raise ValueError(
            f"the name {name} is one of a secret, and the configuration is written into the run's folder; export the "
            "variable on each node before Ray starts there"
        )
    return name


def _number_as_text(value: object) -> object:
    return str(value) if type(value) in (int, float) else value


ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The variables that torch reads for its allocator on GPUs. Megatron-Core and vLLM look at the first."""

Environment = dict[Annotated[str, AfterValidator(_refuse_secret)], Annotated[str, BeforeValidator(_number_as_text)]]
"""Environment variables and their values."""


class ClusterConfig(Section):
    ray_address: str | None = None
    """The address of a running Ray cluster; `auto` finds it. null starts Ray on this machine and stops it at the
    end."""
    environment: Environment = {}
    """Environment variables of all processes of the run, such as `{NCCL_IB_HCA: mlx5}`. They override the driver's
    shell, from which only network variables are passed on (`NCCL_*`, `GLOO_*`, `UCX_*`, `FI_*`, `RES_OPTIONS`). Secrets
    are refused. Without OMP_NUM_THREADS, ranks that compute on CPUs share the cores of the machine, and on GPUs each
    process has one thread."""
    interface: str | None = None
    """The network interface for communication between nodes, such as `ib0`. null means GLOO_SOCKET_IFNAME if that
    variable is set, and otherwise, on each node, the interface with the address that Ray uses for the node."""
    cpus_per_trainer: Annotated[float, Field(gt=0)] = 1
    """The number of CPUs that Ray reserves for each trainer rank."""
    gpus_per_trainer: Annotated[float, Field(ge=0)] = 0
    """The number of GPUs that Ray reserves for each trainer rank; 0 means that trainers run on the CPU. If it is left
    out, `device` decides."""
    gpus_per_engine_rank: Annotated[float, Field(ge=0)] = 0
    """The number of GPUs that Ray reserves for each rank of an engine; 0 means that engines run on the CPU. If it is
    left out, `device` decides."""
    gpus_per_reward_model: Annotated[float, Field(ge=0, le=1)] | None = None
    """The number of GPUs that Ray reserves for each reward model with a `path`, at most one; 0 means that they run on
    the CPU. null: one if engines have GPUs, otherwise none."""
    colocate: bool = False
    """true: trainers, a critic and engines share GPUs. While engines generate, the states of trainers and critic are in
    the node's memory; while these train, the engines have nothing on the GPUs. The numbers of engine, trainer and
    critic ranks must be equal. false: each has its own GPUs."""
    pools: dict[Literal["trainer", "critic", "engine", "teacher", "verifier", "reward_model"], str] = {}
    """The pool of nodes that a role uses, such as {trainer: train, engine: rollout}. A node is in the pool `train` if
    its Ray was started with `ray start --labels pool=train`. A role without an entry may use every node."""
    verifiers: PositiveInt = 1
    """The number of processes that compute rewards. Answers are divided among them."""
    verifier_workers: PositiveInt = 2
    """The number of worker processes of each verifier. They judge texts, mathematics, code and instructions, one answer
    at a time. They are started only if there is such a reward."""
    gpus_per_node: PositiveInt | None = None
    """The number of GPUs per node, used only by the dry run, which prints the processes of each node. A run reads the
    nodes' resources from Ray. null prints no nodes."""
    gpu_memory_gb: PositiveFloat = 80
    """The memory of a GPU in GB, for the estimates of the dry run. The default is for an H100, which reports 5.5 GB
    more for the CUDA context and the allocator's fragmentation. For an H200 the same rule gives 144. Above that the GPU
    counts as a Blackwell, where vLLM repacks experts in each weight sync."""
    calibration: Path | None = None
    """The file with measured rates that replace the planner's own (`planning/rates.py`), such as the calibration.json
    that `megatron-rl gpu-day` writes. null means the planner's."""
    world_size: PositiveInt | None = None
    """The number of trainer ranks that the job has. It must equal what `policy.parallel` needs; null skips this
    check."""
    start_timeout_s: PositiveFloat = 1800
    """The longest time, in seconds, that Ray may take to place a process, and that the process may take to load its
    model."""
    step_timeout_s: PositiveFloat | None = None
    """The longest time, in seconds, of one part of a step: a generation, a forward pass, an update or a checkpoint.
    After that the process that does not answer counts as lost. null: five times the longest so far, at least ten
    minutes, and two hours for a part that has never ended."""
    restarts_per_hour: NonNegativeInt = 5
    """The number of restarts (of the trainer, of an engine or of the verifier) that a run allows within one hour. At
    the next one the run ends and reports their causes. 0 means that the first loss ends the run."""
    mirror: bool = False
    """true: the host memory of the trainer's node and of another node holds a copy of its state of the last two steps,
    copied while the engines generate, so a restart of the trainer loses no finished step. false: a restart continues
    from the newest checkpoint."""
    device: Literal["auto", "gpu", "cpu"] = "auto"
    """The place of trainers and engines if `gpus_per_trainer` and `gpus_per_engine_rank` do not say it. `gpu`: one GPU
    for each rank. `cpu`: none. `auto`: as `gpu` if neither key is given and this machine, or a node of the Ray that the
    run joins, has GPUs."""
    node_memory_gb: PositiveFloat | None = None
    """The memory of a node in GB for mirrors, offloaded and lent states and copies for checkpoints, without what Ray,
    data and the page cache need. A dry run of a run on GPUs refuses a plan that needs more. It needs `gpus_per_node`.
    null: it is not checked."""
    collective_timeout_s: PositiveFloat | None = None
    """The longest time, in seconds, that a trainer rank waits for others in a collective. It may not be below
    `start_timeout_s`: ranks that have loaded the model wait for the slowest one. null means `start_timeout_s`, and at
    least ten minutes."""

    @property
    def reward_model_gpus(self) -> float:
        """The number of GPUs of each reward model."""
        given = self.gpus_per_reward_model
        return float(self.gpus_per_engine_rank > 0) if given is None else given

    @property
    def collective_timeout(self) -> timedelta:
        return timedelta(seconds=self.collective_timeout_s or max(self.start_timeout_s, 600.0))

    def conflicts(self, run: BaseConfig) -> Iterator[str]:
        for key in ("gpus_per_trainer", "gpus_per_engine_rank", "gpus_per_reward_model"):
            if self.device == "cpu" and (number := getattr(self, key)):
                yield f"cluster.device is cpu, but cluster.{key} is {number:g}; remove the key, or set device to auto"
        of_job = run.slurm.gpus_per_node if run.slurm is not None else None
        if of_job and self.gpus_per_node not in (None, of_job):
            yield (
                f"slurm.gpus_per_node is {of_job}, but the run is planned for {self.gpus_per_node} GPUs on a node "
                "(cluster.gpus_per_node); give both the same number"
            )
        if self.collective_timeout_s is not None and self.collective_timeout_s < self.start_timeout_s:
            yield (
                f"cluster.collective_timeout_s is {self.collective_timeout_s:g}, but ranks may load the model for "
                f"cluster.start_timeout_s, {self.start_timeout_s:g} s, while others wait for them; raise the first, or "
                "lower the second"
            )
        for name in ALLOCATOR_VARIABLES:
            if self.colocate and "expandable_segments:true" in self.environment.get(name, "").lower().replace(" ", ""):
                yield (
                    f"cluster.environment.{name} has expandable_segments:True, but with cluster.colocate engines give "
                    "their memory back in vLLM's sleep mode and get weights as CUDA IPC handles, which need ordinary "
                    "segments; remove it"
                )
        if self.node_memory_gb is not None and self.gpus_per_node is None:
            yield (
                f"cluster.node_memory_gb is {self.node_memory_gb:g}, but the ranks of a node are not known; set "
                "cluster.gpus_per_node"
            )
        mesh = run.policy.parallel.mesh
        if self.world_size is not None and self.world_size != mesh.world_size:
            yield (
                f"cluster.world_size is {self.world_size}, but policy.parallel needs {mesh.tensor} x {mesh.pipeline} x "
                f"{mesh.data} x {mesh.context} = {mesh.world_size} ranks (tensor x pipeline x data x context); change "
                "one of them"
            )
