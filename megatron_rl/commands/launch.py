"""The common part of all recipes: arguments, configuration, dry run, the run folder, signals and errors.

Ctrl-C, SIGTERM and SIGUSR1 stop a run with a checkpoint. However a run ends, it writes its report; if it is not
finished, it prints the command that continues it. The exit status is 0 after a finished run, 1 after an error, and
128 + the signal's number after a stop (130 for Ctrl-C, 143 for SIGTERM), or 75 if SIGUSR1, by which a job tells that
its time ends, came before the first step of this start. A run whose terminal hangs up, or whose
output nobody reads any more, goes on.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import logging
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from shutil import which
from tempfile import gettempdir
from typing import TypeVar

from rich.console import Console

from megatron_rl.commands.defaults import read_config
from megatron_rl.commands.interrupt import Interrupt, early
from megatron_rl.commands.screen import CLOSED, console, never_wait
from megatron_rl.commands.slurm import read_job, render, submit
from megatron_rl.config.schema import BaseConfig, OfflineRunConfig
from megatron_rl.loop.checkpoints import Checkpoints, Resume, find_checkpoints
from megatron_rl.loop.run_lock import run_lock
from megatron_rl.ports import StopRequested
from megatron_rl.preflight.checks import check_before_start
from megatron_rl.processes import STACKS, log_to, message_of, open_text

Config = TypeVar("Config", bound=BaseConfig)


def note(text: str) -> None:
    console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


def launch(
    kind: type[Config],
    arguments: Sequence[str] | None,
    *,
    program: str,
    describe: Callable[[Config, Console], None],
    run: Callable[[Config, Checkpoints, Interrupt], int],
) -> int:
    """Parse the arguments, validate the configuration, and then run, or only print the plan; returns the exit status.

    Args:
        program: the command's name, for the command that continues a stopped run.
        describe: prints the sizes and plans of a run.
        run: trains with the configuration, the run's checkpoints and the interrupt, and returns the number of steps
            that are done.
    """
    options = _parser(kind, program).parse_intermixed_args(arguments)
    sys.path.insert(0, os.getcwd())  # the module of a reward function may be in the working folder
    again = f"{entry()} {program} {shlex.join(options.configuration)} --resume auto"
    config: Config | None = None
    has_begun = can_continue = False
    interrupt = Interrupt()
    try:
        with interrupt.listening():
            config = read_config(kind, options.configuration, note, planning=options.dry_run, in_job=options.slurm)
            resume = read_resume(options.resume)
            job = read_job(config, program, options.configuration)
            if options.slurm and isinstance(resume, int):
                raise ValueError("a Slurm job continues from the newest checkpoint; give --resume auto with --slurm")
            goes_on = "auto" if options.slurm else resume  # a job continues from the newest checkpoint, if there is one
            if options.dry_run:
                describe(config, console)
                check_before_start(config, console, resume=goes_on, planning=True, in_job=options.slurm)
                if options.slurm:
                    console.print(render(job), markup=False, soft_wrap=True)
                return 0
            check_before_start(config, console, resume=goes_on, in_job=options.slurm)
            if options.slurm:
                submit(job, console)
                return 0
            config = config.absolute()  # Ray's processes have other working folders
            with run_lock(config.run_folder):
                has_begun = True
                log_to_file(config.run_folder / "logs")
                never_wait()
                interrupt.on_loss = partial(tell_loss, config, again)
                interrupt.check()  # from here on libraries are imported
                checkpoints, can_continue = open_checkpoints(config, resume), True
                done = run(config, checkpoints, interrupt)
        if done == config.run.steps:
            return 0
        console.print(f"Stopped after {done} of {config.run.steps} steps." if done else NOTHING_SAVED, soft_wrap=True)
        status = _status(interrupt, done > checkpoints.first_step)
    except StopRequested:
        console.print(f"Stopped while starting. {NOTHING_SAVED}")
        status = _status(interrupt, False)
    except KeyboardInterrupt:
        console.print("[red]Stopped at once[/], without a checkpoint of this step.")
        status = 128 + signal.SIGINT
    except Exception as error:  # the user gets a short message for every error, and the traceback is in a file
        _tell(error, config if has_begun else None)
        status = 1
    if config is not None and can_continue:
        tell_continuation(config.run_folder, again)
    return status


def _parser(kind: type[BaseConfig], program: str) -> argparse.ArgumentParser:
    shown = f"megatron-rl {program}"
    rows = f"{kind.section}.rows" if issubclass(kind, OfflineRunConfig) else "data.train"
    example = f"{shown} model.path=models/mine {rows}=rows.jsonl run.name=first run.steps=100"
    parser = argparse.ArgumentParser(shown, description=f"Example: {example}")
    parser.add_argument("configuration", nargs="+", metavar="FILE.yaml | section.key=value")
    parser.add_argument(
        "--dry-run", action="store_true", help="check the configuration, print sizes and plans, and start nothing"
    )
    parser.add_argument(
        "--resume",
        default="never",
        metavar="auto | STEP",
        help="continue from the newest checkpoint (auto) or from the checkpoint of a step; the default is a new run",
    )
    parser.add_argument(
        "--slurm",
        action="store_true",
        help="submit the run as a Slurm job, as the section `slurm` says; with --dry-run, print the job's script",
    )
    return parser


def _status(interrupt: Interrupt, has_advanced: bool) -> int:
    """The exit status of a stopped run. A job that is asked to stop before each first step must not start for ever."""
    number = interrupt.signal or signal.SIGINT
    return 75 if number == signal.SIGUSR1 and not has_advanced else 128 + number


NOTHING_SAVED = "No step was done, so there was nothing to save."


def entry() -> str:
    """`megatron-rl`, or what starts it from the user's working folder if it is not on PATH."""
    return "megatron-rl" if which("megatron-rl") else f"{_python()} -m megatron_rl"


def _python() -> str:
    # Not resolved: the link of a virtual environment is what makes it one.
    return "python" if which("python") == sys.executable else _from_here(Path(sys.executable))


def _from_here(path: Path) -> str:
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def read_resume(text: str) -> Resume:
    """
    Raises:
        ValueError: the text is neither `auto`, `never` nor a number.
    """
    if text in ("auto", "never"):
        return "auto" if text == "auto" else None
    if not text.isdecimal():
        raise ValueError(f"--resume {text} is not known; give `auto` or the number of a step")
    return int(text)


def open_checkpoints(config: BaseConfig, resume: Resume) -> Checkpoints:
    """The run's checkpoints. Prints how the configuration of a resumed run differs from the one before."""
    checkpoints = Checkpoints(config.run_folder / "checkpoints", config, resume=resume)
    if checkpoints.first_step:
        console.print(f"Continuing with step {checkpoints.first_step}.")
    for change in checkpoints.changes:
        console.print(f"changed since the checkpoint: {change}", markup=False, soft_wrap=True)
        log.info("changed since the checkpoint of step %d: %s", checkpoints.first_step, change)
    return checkpoints


def tell_loss(config: BaseConfig, again: str, cause: str) -> None:
    """Print what a run that cannot save its state any more leaves."""
    log.error("%s", cause)
    _tell(RuntimeError(cause), None)
    tell_continuation(config.run_folder, again)


def tell_continuation(run_folder: Path, again: str) -> None:
    """Write the report of a run that did not finish, if a step was logged, and print the command that continues the
    run, if there is a checkpoint."""
    from megatron_rl.observe import write_report
    from megatron_rl.observe.records import read_metrics

    try:
        if read_metrics(run_folder):
            console.print(f"report: {write_report(run_folder)}", soft_wrap=True)
    except OSError as error:
        console.print(f"There is no report: {error}", markup=False, soft_wrap=True)
    steps = list(find_checkpoints(run_folder / "checkpoints"))
    if steps:
        newest = find_checkpoints(run_folder / "checkpoints")[steps[-1]].name
        console.print(f"The newest checkpoint is {newest}. Continue with:\n  {again}", soft_wrap=True, markup=False)


log = logging.getLogger("megatron_rl.driver")


def log_to_file(folder: Path) -> None:
    """Write the log messages of the driver to `driver.log`, and its stacks on the signal STACKS or a crash. Every other
    process has a log file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / "driver.log", errors="backslashreplace")
    log_to(handler)
    assert handler.stream is not None, "a FileHandler opens its file at once"
    faulthandler.enable(file=handler.stream)
    faulthandler.register(STACKS, file=handler.stream, all_threads=True, chain=False)
    log.info("%s", shlex.join(sys.argv))
    for message in [f"{name} was closed when the run began: it goes on without it" for name in CLOSED] + early:
        log.warning("%s", message)
    early.clear()


def full(folders: Sequence[Path]) -> list[Path]:
    """The folders in a file system that has less than 1 MiB left, or no room for another file."""
    found = [(folder, os.statvfs(folder)) for folder in folders if folder.exists()]
    return [
        folder for folder, has in found if has.f_bavail * has.f_frsize < 1 << 20 or has.f_files and not has.f_favail
    ]


def _tell(error: Exception, config: BaseConfig | None) -> None:
    """Print the message of the error, and write the traceback to a file."""
    known = isinstance(error, ValueError | OSError | RuntimeError)
    text = message_of(error) if known and str(error) else f"{type(error).__name__}: {error}"
    if os.strerror(errno.ENOSPC) in text:  # of a write, or of another process: it has no path
        folders = [Path.cwd() if config is None else config.run_folder, Path(gettempdir()), Path("/dev/shm")]
        text += f" (full: {', '.join(map(str, full(folders))) or 'none of these any more'}; looked at: "
        text += f"{', '.join(map(str, folders))})"
    console.print("[bold red]error:[/]", end=" ")
    console.print("\n".join([text, *getattr(error, "__notes__", [])]), markup=False, soft_wrap=True)
    if config is None:
        return
    log.error("%s", text)
    path = config.run_folder / "logs" / "traceback.txt"
    try:
        with open_text(path) as file:
            file.write(traceback.format_exc())
        console.print(f"[dim]traceback: {path}; output of all processes: {path.parent}[/]", soft_wrap=True)
    except OSError:  # the disk is full, and that was the error
        pass


def show(run_folder: Path) -> None:
    """Write the report of a finished run, and print its summary and the paths of report and model."""
    from megatron_rl.observe import print_summary, write_report

    report = write_report(run_folder)
    print_summary(run_folder, console)
    console.print(f"report: {report}", f"model: {run_folder / 'hf'}", soft_wrap=True)


def quiet_environment() -> None:
    """Set environment variables so that libraries do not write to the terminal. It must be called before torch and Ray
    are imported."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    # Otherwise an engine that fails prints its traceback once for each of its objects; `cluster` tells every error.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
