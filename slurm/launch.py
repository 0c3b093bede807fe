"""Runs recipes as NeMo-Run experiments, on this machine or under Slurm, also through a tunnel.

python slurm/launch.py {local | slurm} {grpo | ppo | sft} FILE.yaml ... section.key=value
    [--dryrun] [--tunnel USER@HOST:FOLDER]

The section `slurm` says which nodes the job gets, as for `--slurm`; each of its seeds is a task of the experiment. The
job runs slurm/train.sbatch, so that everything else is as in slurm/README.md. NeMo-Run needs an environment of its own
(requirements/nemo.txt), and nothing else needs NeMo-Run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TypeAlias

import nemo_run

from megatron_rl.commands.slurm import Job, read_job, variables, with_memory
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import BaseConfig, GrpoRunConfig, PpoRunConfig, SftRunConfig
from megatron_rl.config.slurm import SlurmConfig

KINDS: dict[str, type[BaseConfig]] = {"grpo": GrpoRunConfig, "ppo": PpoRunConfig, "sft": SftRunConfig}


Tunnel: TypeAlias = nemo_run.SSHTunnel | nemo_run.LocalTunnel


def tasks(job: Job, place: str) -> dict[str, nemo_run.Script]:
    """The scripts of the experiment by name: one for each seed."""
    found = {}
    for seed in job.slurm.seeds or (None,):
        own = [] if seed is None else [f"run.seed={seed}", f"run.name={job.name}/seed_{seed}"]
        arguments = shlex.join([job.recipe, *job.arguments, *own])
        if place == "local":
            # The Python that submits is NeMo-Run's, which cannot train.
            line = job.slurm.environment or ":"
            command = f"{line}\nexec python -m megatron_rl {arguments} --resume auto"
        else:
            command = f"exec bash {shlex.quote(str(job.train))} {arguments}"
        name = "".join(c if c.isalnum() else "_" for c in job.name) + ("" if seed is None else f"_seed_{seed}")
        found[name] = nemo_run.Script(inline=f"cd {shlex.quote(str(job.working_folder))}\n{command}")
    return found


def slurm_executor(job: Job, tunnel: Tunnel) -> nemo_run.SlurmExecutor:
    """The job of one task. Its only step is train.sbatch on the first node, which starts all others."""
    slurm: SlurmConfig = job.slurm
    environment = variables(job)
    if slurm.environment:
        environment["MEGATRON_RL_ENVIRONMENT"] = slurm.environment
    given = [option.lstrip("-").partition("=") for option in with_memory(slurm.options)]
    return nemo_run.SlurmExecutor(
        account=slurm.account,
        partition=slurm.partition,
        job_name_prefix="megatron_rl.",
        time=str(ceil(slurm.time_limit_h * 60)) if slurm.time_limit_h else None,
        nodes=slurm.nodes + slurm.rollout_nodes,
        ntasks_per_node=1,
        gpus_per_node=slurm.gpus_per_node,
        exclusive=True,
        signal=f"USR1@{slurm.notice_s}",  # to all steps; only the driver's answers
        srun_args=["--nodes=1", "--ntasks=1", "--overlap"],
        additional_parameters={name: value or True for name, _, value in given},
        env_vars={name: shlex.quote(value) for name, value in environment.items()},
        tunnel=tunnel,
        packager=nemo_run.Packager(),
    )


def through(text: str | None, job: Job) -> tuple[Job, Tunnel]:
    """The job where it runs, and the way to Slurm's commands.

    Raises:
        ValueError: the text is not `user@host:/folder`.
    """
    if text is None:
        # A local tunnel copies nothing, so the job's files must be where NeMo-Run writes them.
        home = nemo_run.config.get_nemorun_home()
        return job, nemo_run.LocalTunnel(job_dir=os.path.join(home, "experiments"))
    account, _, folder = text.partition(":")
    user, _, host = account.partition("@")
    if not (user and host and folder.startswith("/")):
        raise ValueError(f"--tunnel {text}: write it as USER@HOST:/FOLDER, the project's folder on the cluster")
    root = Path(folder)
    there = replace(job, working_folder=root, train=root / "slurm" / "train.sbatch", folder=root / "slurm_logs")
    return there, nemo_run.SSHTunnel(host=host, user=user, job_dir=f"{folder}/experiments")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python slurm/launch.py", description="Run a recipe as a NeMo-Run experiment.")
    parser.add_argument("place", choices=["local", "slurm"])
    parser.add_argument("recipe", choices=KINDS)
    parser.add_argument("configuration", nargs="+", metavar="FILE.yaml | section.key=value")
    parser.add_argument("--dryrun", action="store_true", help="print what will run, and start nothing")
    parser.add_argument("--tunnel", metavar="USER@HOST:FOLDER", help="the login node and the project's folder there")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(KINDS[options.recipe], options.configuration)
        job = read_job(config, options.recipe, options.configuration)
        if job.slurm.rollout_options:
            raise ValueError("slurm.rollout_options: this launcher has no heterogeneous jobs; submit with --slurm")
        if not job.slurm.requeue:
            raise ValueError("slurm.requeue: NeMo-Run submits every job with --requeue; submit with --slurm instead")
        job, tunnel = through(options.tunnel, job)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    is_local = options.place == "local"
    executor = nemo_run.LocalExecutor() if is_local else slurm_executor(job, tunnel)
    with nemo_run.Experiment("megatron_rl") as experiment:
        for name, script in tasks(job, options.place).items():
            experiment.add(script, executor=executor.clone(), name=name, tail_logs=is_local)
        if options.dryrun:
            experiment.dryrun()
        else:
            experiment.run(detach=not is_local)
    return 0


if __name__ == "__main__":
    sys.exit(main())
