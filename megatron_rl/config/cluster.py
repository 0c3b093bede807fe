"""The configuration of the cluster: the places and resources of processes, and the way of weights to the engines."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    """The number of chains in which the engines receive weights. The trainers send to the first engine of each chain,
    and each engine sends to the next one, so the trainers send this number of copies, however many engines there are.
    null means that the trainers send to every engine."""
    verify: bool = False
    """true: after each push the engines read back what they wrote and compare it with the trainers' checksums. false:
    they do so after the first push only."""
    timeout_s: Annotated[float, Field(gt=0)] = 300
    """The longest time, in seconds, that a push may take."""

    def conflicts(self, run: GrpoRunConfig) -> Iterator[str]:
        engines = run.rollout.num_engines
        if self.chains is not None and self.chains > engines:
            yield (
                f"bridge.chains is {self.chains}, but there are {engines} engines (rollout.num_engines); every chain "
                "needs at least one engine, so lower bridge.chains"
            )


SECRET = re.compile("SECRET|PASSWORD|PASSWD|CREDENTIAL|TOKEN(?!IZER)|(?<!P)KEY", re.IGNORECASE)
"""The names of variables whose values must not be written down. InfiniBand's partition keys (PKEY) are no secrets."""


def _refuse_secret(name: str) -> str:
    if SECRET.search(name):
        raise ValueError(
            f"the name {name} is one of a secret, and the configuration is written into the run's folder; export the "
            "variable on each node before Ray starts there"
        )
    return name


def _number_as_text(value: object) -> object:
    return str(value) if type(value) in (int, float) else value


Environment = dict[Annotated[str, AfterValidator(_refuse_secret)], Annotated[str, BeforeValidator(_number_as_text)]]
"""Environment variables and their values."""


class ClusterConfig(Section):
    ray_address: str | None = None
    """The address of a running Ray cluster; `auto` finds it. null starts Ray on this machine and stops it at the
    end."""
    environment: Environment = {}
    """Environment variables of all processes of the run, such as `{NCCL_IB_HCA: mlx5}`. They override those of the
    driver's shell, of which only the variables of the network are handed on (`NCCL_*`, `GLOO_*`, `UCX_*`, `FI_*`,
    `RES_OPTIONS`). Secrets are refused. Without OMP_NUM_THREADS here or in the shell, the ranks that compute on CPUs at
    the same time share out the cores of the machine; on GPUs each process computes on the CPU with one thread."""
    interface: str | None = None
    """The network interface through which processes of different nodes talk to each other, such as `ib0`. null means
    GLOO_SOCKET_IFNAME if that variable is set, and otherwise, on each node, the interface that has the address with
    which Ray knows the node."""
    cpus_per_trainer: Annotated[float, Field(gt=0)] = 1
    """The number of CPUs that Ray reserves for each trainer rank."""
    gpus_per_trainer: Annotated[float, Field(ge=0)] = 0
    """The number of GPUs that Ray reserves for each trainer rank; 0 means that trainers run on the CPU."""
    gpus_per_engine_rank: Annotated[float, Field(ge=0)] = 0
    """The number of GPUs that Ray reserves for each rank of an engine; 0 means that engines run on the CPU."""
    colocate: bool = False
    """true: trainers, a critic and engines share GPUs. While engines generate, the weights, gradients and optimizer
    states of trainers and critic are in the node's memory; while these train, the engines have nothing on the GPUs.
    There must be as many ranks of engines as trainer ranks, and as many of a critic. false: each has GPUs of its
    own."""
    pools: dict[Literal["trainer", "critic", "engine", "verifier"], str] = {}
    """The pool of nodes that a role uses, such as {trainer: train, engine: rollout}. A node is in the pool `train` if
    its Ray was started with `ray start --labels pool=train`. A role without an entry may use every node."""
    verifiers: PositiveInt = 1
    """The number of processes that compute rewards. Answers are divided among them."""
    verifier_workers: PositiveInt = 2
    """The number of further processes of each verifier. They judge texts, mathematics, code and instructions, one
    answer at a time, and are started when there is such a reward."""
    gpus_per_node: PositiveInt | None = None
    """The number of GPUs of a node, for the dry run alone, which prints what runs on which node. A run reads from Ray
    what the nodes have. null prints no nodes."""
    gpu_memory_gb: PositiveFloat = 80
    """The memory of a GPU in GB, for the estimates of the dry run. The default is an H100's, which reports 5 GB more:
    CUDA's context and the gaps of the allocator take these. An H200 has 136 by the same count."""
    world_size: PositiveInt | None = None
    """The number of trainer ranks that the job has. It must equal what `policy.parallel` needs; null skips this
    check."""
    start_timeout_s: PositiveFloat = 1800
    """The longest time, in seconds, that Ray may take to place a process, and that the process may take to load its
    model."""
    step_timeout_s: PositiveFloat = 7200
    """The longest time, in seconds, that one part of a step may take: a generation, a forward pass, an update or a
    checkpoint. After that the process that does not answer counts as lost."""
    restarts_per_hour: NonNegativeInt = 5
    """The number of restarts in the last hour (of the trainer, of an engine or of the verifier) that a run survives. At
    the next one it ends and tells their causes. 0 means that the first loss ends the run."""
    mirror: bool = False
    """true: the trainer's state of the last two steps also lies in the host memory of its own node and of another one,
    so that a restart of the trainer loses no finished step. It is copied while the engines generate. false: a restart
    of the trainer continues from the newest checkpoint."""

    def conflicts(self, run: BaseConfig) -> Iterator[str]:
        mesh = run.policy.parallel.mesh
        if self.world_size is not None and self.world_size != mesh.world_size:
            yield (
                f"cluster.world_size is {self.world_size}, but policy.parallel needs {mesh.tensor} x {mesh.pipeline} x "
                f"{mesh.data} x {mesh.context} = {mesh.world_size} ranks (tensor x pipeline x data x context); change "
                "one of them"
            )
