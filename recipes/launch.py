"""What every recipe does around its own wiring: arguments, judgement, dry run, the run folder, signals, errors.

Ctrl-C, SIGTERM and SIGUSR1 stop a run with a checkpoint. However a run ends, it leaves its report and tells the command
that continues it. Exit status: 0 done, 1 an error, 128 + the signal's number after a stop (130 Ctrl-C, 143 SIGTERM).
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

from rich.console import Console

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import BaseConfig
from megatron_rl.loop.checkpoints import Checkpoints, Resume, find_checkpoints
from megatron_rl.loop.run_lock import run_lock
from megatron_rl.ports import StopRequested
from megatron_rl.recipes.preflight import check_before_start

Config = TypeVar("Config", bound=BaseConfig)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

console = Console(highlight=False)


class Interrupt:
    """Requests to stop; implements `loop.stopping.Stopping`.

    Before Ray starts, the signals' handler raises. From then on it only takes a note, because it may interrupt Ray
    anywhere: whoever waits calls `check` several times a second, and it is `check` that raises, before training at the
    first request, in training only inside `promptly`; elsewhere the loop asks after the step. A second Ctrl-C stops at
    once; a second SIGTERM changes nothing, because a cluster may send several.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The first request."""
        self._phase: Literal["starting", "training", "ending"] = "starting"
        self._abandoned = self._prompt = self._raised = False
        self._is_checked = False
        """Somebody calls `check` from now on, and the handler must not raise itself."""

    def __call__(self) -> bool:
        return self.signal is not None

    def ask(self, number: int, frame: object) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
            name = "Ctrl-C" if number == signal.SIGINT else self.signal.name
            now = "stopping now" if self._prompt else "stopping after this step"
            said = {
                "starting": "stopping",
                "training": f"{now}, with a checkpoint; Ctrl-C again stops without one",
                "ending": "the run is done and writes its last files; Ctrl-C again stops without them",
            }
            console.print(f"\n[yellow]{name}: {said[self._phase]}.[/]")
            if not self._is_checked:
                raise StopRequested
        elif number == signal.SIGINT:
            self._abandoned = True

    def check(self) -> None:
        """
        Raises:
            StopRequested, KeyboardInterrupt: once each.
        """
        self._is_checked = True
        if self._abandoned:
            self._abandoned = False
            raise KeyboardInterrupt
        if self.signal is not None and not self._raised and (self._prompt or self._phase == "starting"):
            self._raised = True
            raise StopRequested

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around the loop, which saves its state when it is asked to stop."""
        self.check()
        self._phase = "training"
        try:
            yield
        finally:
            self._phase = "ending"

    @contextmanager
    def promptly(self) -> Iterator[None]:
        self._prompt = True
        try:
            self.check()
            yield
        finally:
            self._prompt = False

    @contextmanager
    def listening(self) -> Iterator[Interrupt]:
        before = {number: signal.signal(number, self.ask) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def launch(
    kind: type[Config],
    arguments: Sequence[str] | None,
    *,
    program: str,
    describe: Callable[[Config, Console], None],
    run: Callable[[Config, Checkpoints, Interrupt], int],
) -> int:
    """Parse, judge, then plan or run; returns the exit status.

    Args:
        program: the recipe's path, for the command that continues a stopped run.
        describe: prints what a run will be.
        run: gets the configuration, the run's checkpoints, and the interrupt; returns the steps that are done.
    """
    shown = f"megatron-rl {Path(program).stem}" if sys.argv[0].startswith("megatron-rl ") else f"python {program}"
    parser = argparse.ArgumentParser(
        shown, description=f"See README.md. Example: {shown} configs/run/tiny_grpo.yaml run.steps=10"
    )
    parser.add_argument("configuration", nargs="+", metavar="FILE.yaml | section.key=value")
    parser.add_argument(
        "--dry-run", action="store_true", help="judge the configuration, print sizes and plans, start nothing"
    )
    parser.add_argument(
        "--resume",
        default="never",
        metavar="auto | STEP",
        help="go on from the newest checkpoint, or from that of a step; default: a new run",
    )
    options = parser.parse_intermixed_args(arguments)
    sys.path.insert(0, os.getcwd())  # a reward function's module lies where the command is typed
    again = f"{shown} {shlex.join(options.configuration)} --resume auto"
    config: Config | None = None
    has_begun = False
    interrupt = Interrupt()
    try:
        with interrupt.listening():
            config = load_config(kind, options.configuration)
            resume = read_resume(options.resume)
            if options.dry_run:
                describe(config, console)
                check_before_start(config, console, resume=resume is not None, planning=True)
                return 0
            check_before_start(config, console, resume=resume is not None)
            with run_lock(config.run_folder):
                has_begun = True
                log_to_file(config.run_folder / "logs")
                done = run(config, open_checkpoints(config, resume), interrupt)
        if done == config.run.steps:
            return 0
        stopped = f"Stopped after step {done} of {config.run.steps}." if done else NOTHING_SAVED
        console.print(stopped, soft_wrap=True)
        status = 128 + (interrupt.signal or signal.SIGINT)
    except StopRequested:
        console.print(f"Stopped while starting. {NOTHING_SAVED}")
        status = 128 + (interrupt.signal or signal.SIGINT)
    except KeyboardInterrupt:
        console.print("[red]Stopped at once[/], without a checkpoint of this step.")
        status = 128 + signal.SIGINT
    except Exception as error:  # whatever it is, the user reads a sentence and finds the traceback in a file
        _tell(error, config if has_begun else None)
        status = 1
    if config is not None and has_begun:
        tell_continuation(config.run_folder, again)
    return status


NOTHING_SAVED = "No step was done, so there was nothing to save."


def read_resume(text: str) -> Resume:
    """
    Raises:
        ValueError: neither auto, never nor a step.
    """
    if text in ("auto", "never"):
        return "auto" if text == "auto" else None
    if not text.isdecimal():
        raise ValueError(f"--resume {text}: give `auto` or the number of a step")
    return int(text)


def open_checkpoints(config: BaseConfig, resume: Resume) -> Checkpoints:
    """The run's checkpoints; tells what a resumed run does otherwise than before."""
    checkpoints = Checkpoints(
        config.run_folder / "checkpoints",
        keep=config.checkpoint.keep,
        resume=resume,
        config=config.model_dump(mode="json"),
    )
    if checkpoints.first_step:
        console.print(f"Going on after step {checkpoints.first_step}.")
    for change in checkpoints.changes:
        console.print(f"changed since the checkpoint: {change}", markup=False, soft_wrap=True)
        log.info("changed since the checkpoint of step %d: %s", checkpoints.first_step, change)
    return checkpoints


def tell_continuation(run_folder: Path, again: str) -> None:
    """After a run that did not finish: its report, and the command that continues it, where there is something."""
    from megatron_rl.observe import write_report
    from megatron_rl.observe.records import read_metrics

    try:
        if read_metrics(run_folder):
            console.print(f"report: {write_report(run_folder)}", soft_wrap=True)
    except OSError as error:
        console.print(f"There is no report: {error}", markup=False, soft_wrap=True)
    steps = list(find_checkpoints(run_folder / "checkpoints"))
    if steps:
        console.print(f"The newest checkpoint is of step {steps[-1]}. Continue with:\n  {again}", soft_wrap=True)


log = logging.getLogger("megatron_rl.driver")


def log_to_file(folder: Path) -> None:
    """The driver's own messages go to `driver.log`, as those of the other processes go to theirs."""
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / "driver.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    ours = logging.getLogger("megatron_rl")
    ours.setLevel(logging.INFO)
    ours.handlers[:] = [handler]
    ours.propagate = False
    log.info("%s", shlex.join(sys.argv))


def _tell(error: Exception, config: BaseConfig | None) -> None:
    """The cause first and short; the traceback goes to a file for whoever needs it."""
    known = isinstance(error, ValueError | OSError | RuntimeError)
    text = str(error) if known and str(error) else f"{type(error).__name__}: {error}"
    console.print("[bold red]error:[/]", end=" ")
    console.print("\n".join([text, *getattr(error, "__notes__", [])]), markup=False, soft_wrap=True)
    if config is None:
        return
    log.error("%s", text)
    path = config.run_folder / "logs" / "traceback.txt"
    try:
        path.write_text(traceback.format_exc())
        console.print(f"[dim]traceback: {path}; output of all processes: {path.parent}[/]", soft_wrap=True)
    except OSError:  # the disk is full, and that was the error
        pass


def show(run_folder: Path) -> None:
    """The end of a finished run: report, summary, and where things are."""
    from megatron_rl.observe import print_summary, write_report

    report = write_report(run_folder)
    print_summary(run_folder, console)
    console.print(f"report: {report}", f"model: {run_folder / 'hf'}", soft_wrap=True)


def quiet_environment() -> None:
    """Before torch and Ray are imported: one thread a process, and no chatter of theirs on the terminal."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
