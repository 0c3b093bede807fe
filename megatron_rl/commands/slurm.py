"""A run as a Slurm job: the script is a pure function of the configuration, and sbatch takes it.

The script holds options and variables, and calls slurm/train.sbatch, which does the work; slurm/README.md describes it.

Invariants (tests/unit/slurm): golden scripts for 1, 2 and 28 nodes; every script passes `bash -n` and shellcheck; a
path, name or argument with spaces and quotes arrives unchanged.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from rich.console import Console

from megatron_rl.config.schema import BaseConfig
from megatron_rl.config.slurm import SlurmConfig

TRAIN = (Path(__file__).parents[1] / "slurm" / "train.sbatch").resolve()


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that the script depends on."""

    slurm: SlurmConfig
    name: str
    """The run's name."""
    recipe: str
    """`grpo`, `ppo` or `sft`."""
    arguments: Sequence[str]
    """The configuration as it was given: YAML files and overrides."""
    working_folder: Path
    folder: Path
    """The absolute path of the job's files: the script and the logs of Slurm and Ray."""
    python: Path
    """The folder of the Python that submits."""
    train: Path = TRAIN

    @property
    def script(self) -> Path:
        return self.folder / "train.sbatch"


def read_job(config: BaseConfig, recipe: str, arguments: Sequence[str]) -> Job:
    """The job of a run that is submitted from this process."""
    return Job(
        slurm=config.slurm or SlurmConfig(),
        name=config.run.name,
        recipe=recipe,
        arguments=arguments,
        working_folder=Path.cwd(),
        folder=config.run_folder.absolute() / "slurm",
        python=Path(sys.executable).parent,
    )


def render(job: Job) -> str:
    """The text of the job's script."""
    lines = ["#!/usr/bin/env bash"]
    components = options(job)
    for i, component in enumerate(components):
        lines += ["#SBATCH hetjob"] * (i > 0)
        lines += [f"#SBATCH {_quoted(option)}" for option in component]
    lines.append("# Made by --slurm. It calls train.sbatch, whose README describes the variables. To continue the run,")
    lines.append("# submit this file again.")
    if not job.slurm.environment and not job.slurm.container:
        lines.append(f'export PATH={shlex.quote(str(job.python))}:"$PATH"')
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables(job).items()]
    if job.slurm.environment:
        lines.append("# shellcheck disable=SC2016  # every node evaluates this line for itself")
        lines.append(f"export MEGATRON_RL_ENVIRONMENT={shlex.quote(job.slurm.environment)}")
    command = ["exec", "bash", str(job.train), job.recipe, *arguments(job)]
    return "\n".join([*lines, shlex.join(command)]) + "\n"


def options(job: Job) -> list[list[str]]:
    """The options of sbatch, one list for each component of the job."""
    slurm = job.slurm
    is_heterogeneous = bool(slurm.rollout_options)
    common = ["--ntasks-per-node=1", "--exclusive"]
    if slurm.gpus_per_node is not None:
        common.append(f"--gpus-per-node={slurm.gpus_per_node}")
    if slurm.partition:
        common.append(f"--partition={slurm.partition}")
    if slurm.account:
        common.append(f"--account={slurm.account}")
    if slurm.time_limit_h:
        common.append(f"--time={ceil(slurm.time_limit_h * 60)}")
    first = [
        f"--job-name={job.name}",
        f"--chdir={job.working_folder}",
        f"--output={escaped(str(job.folder))}/{'%A_%a' if slurm.seeds else '%j'}.log",
        "--open-mode=append",
        "--requeue" if slurm.requeue else "--no-requeue",
        f"--signal=B:USR1@{slurm.notice_s}",
    ]
    if slurm.seeds:
        first.append(f"--array={','.join(map(str, slurm.seeds))}")
    num_nodes = slurm.nodes if is_heterogeneous else slurm.nodes + slurm.rollout_nodes
    components = [[*first, f"--nodes={num_nodes}", *common, *with_memory(slurm.options)]]
    if is_heterogeneous:
        components.append([f"--nodes={slurm.rollout_nodes}", *common, *with_memory(slurm.rollout_options)])
    return components


def with_memory(given: Sequence[str]) -> list[str]:
    """The user's options for a component, after one for all memory of its nodes unless they say how much. --exclusive
    gives the CPUs alone, and sbatch refuses --mem together with --mem-per-gpu."""
    return [*([] if any(option.startswith(("--mem=", "--mem-per-")) for option in given) else ["--mem=0"]), *given]


def variables(job: Job) -> dict[str, str]:
    """The variables for train.sbatch and ray_up.sh that are words, not code."""
    slurm = job.slurm
    found = {"MEGATRON_RL_LOGS": str(job.folder)}
    if slurm.rollout_nodes and not slurm.rollout_options:
        found["MEGATRON_RL_TRAIN_NODES"] = str(slurm.nodes)
    if slurm.container:
        found["MEGATRON_RL_CONTAINER"] = slurm.container
    if slurm.mounts:
        found["MEGATRON_RL_MOUNTS"] = ",".join(slurm.mounts)
    return found


def escaped(text: str) -> str:
    """Slurm, and train.sbatch in an array, replace nothing in what they make of this."""
    return text.replace("%", "%%")


def arguments(job: Job) -> list[str]:
    """The recipe's arguments. In an array train.sbatch puts the task's number for %a, and % for %%, so that each task
    has a run of its own."""
    if not job.slurm.seeds:
        return [*job.arguments]
    return [*map(escaped, job.arguments), "run.seed=%a", f"run.name={escaped(job.name)}/seed_%a"]


def submit(job: Job, console: Console) -> None:
    """Write the script, hand it to sbatch, and print how to follow the job.

    Raises:
        ValueError: sbatch is not there, or it refuses the job.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    job.script.write_text(render(job))
    if shutil.which("sbatch") is None:
        raise ValueError(
            f"this machine has no sbatch; the script is written, so submit it on a login node: sbatch {job.script}"
        )
    done = subprocess.run(["sbatch", "--parsable", job.script], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"sbatch refuses {job.script}: {done.stderr.strip()}")
    number = done.stdout.strip().partition(";")[0]
    log = f"{number}_{job.slurm.seeds[0]}.log" if job.slurm.seeds else f"{number}.log"
    follow = [
        (f"squeue --jobs {number}", "its state"),
        (f"tail -F {shlex.quote(str(job.folder / log))}", "its output"),
        (f"scancel --batch --signal=TERM {number}", "stop it with a checkpoint"),
        (f"scancel {number}", "end it at once"),
        (f"sbatch {shlex.quote(str(job.script))}", "continue it later"),
    ]
    lines = [f"  {command}\n      {meaning}" for command, meaning in follow]
    console.print(f"Job {number} is submitted.", *lines, sep="\n", markup=False, soft_wrap=True)


def _quoted(option: str) -> str:
    """An option as sbatch reads it in a script: a value with a space or a quote stands in double quotes."""
    name, equals, value = option.partition("=")
    if not set(value) & set(" \t\"'#\\"):
        return option
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'
