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
from megatron_rl.loop.checkpoints import PATTERN, Checkpoints, Resume
from megatron_rl.loop.run_lock import run_lock
from megatron_rl.ports import StopRequested

Config = TypeVar("Config", bound=BaseConfig)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

console = Console(highlight=False)


class Interrupt:
    """Requests to stop; implements `loop.stopping.Stopping`.

    The signals' handler only takes a note. Whoever waits calls `check` several times a second, and it is `check` that
    raises: before training at the first request, in training only inside `promptly`; elsewhere the loop asks after the
    step. A second Ctrl-C stops at once; a second SIGTERM changes nothing, because a cluster may send several.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The first request."""
        self._phase: Literal["starting", "training", "ending"] = "starting"
        self._abandoned = self._prompt = self._raised = False

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
        elif number == signal.SIGINT:
            self._abandoned = True

    def check(self) -> None:
        """
        Raises:
            StopRequested, KeyboardInterrupt: once each.
        """
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
    dry_run: Callable[[Config, Console], None],
    run: Callable[[Config, Checkpoints, Interrupt], int],
) -> int:
    """Parse, judge, then plan or run; returns the exit status.

    `program` is the recipe's path, for the command that continues a stopped run. `run` gets the configuration, the
    run's checkpoints, and the interrupt; it returns the steps that are done.
    """
    shown = sys.argv[0] if sys.argv[0].startswith("megatron-rl ") else f"python {program}"
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
    options = parser.parse_args(arguments)
    sys.path.insert(0, os.getcwd())  # a reward function's module lies where the command is typed
    again = f"{shown} {shlex.join(options.configuration)} --resume auto"
    config: Config | None = None
    interrupt = Interrupt()
    try:
        with interrupt.listening():
            config = load_config(kind, options.configuration)
            if options.dry_run:
                dry_run(config, console)
                return 0
            with run_lock(config.run_folder):
                log_to_file(config.run_folder / "logs")
                done = run(config, open_checkpoints(config, read_resume(options.resume)), interrupt)
        if done == config.run.steps:
            return 0
        stopped = f"Stopped after step {done} of {config.run.steps}." if done else NOTHING_SAVED
        console.print(stopped, soft_wrap=True)
        tell_continuation(config, again)
    except StopRequested:
        console.print(f"Stopped while starting. {NOTHING_SAVED}")
        tell_continuation(config, again)
    except KeyboardInterrupt:
        console.print("[red]Stopped at once[/], without a checkpoint of this step.")
        tell_continuation(config, again)
        return 128 + signal.SIGINT
    except Exception as error:  # whatever it is, the user reads a sentence and finds the traceback in a file
        _tell(error, config)
        tell_continuation(config, again)
        return 1
    assert interrupt.signal is not None
    return 128 + interrupt.signal


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


def tell_continuation(config: BaseConfig | None, again: str) -> None:
    """After a run that did not finish: its report, and the command that continues it, where there is something."""
    if config is None:
        return
    report_run(config.run_folder)
    folder = config.run_folder / "checkpoints"
    steps = [int(match[1]) for path in folder.glob("step_*") if (match := PATTERN.fullmatch(path.name))]
    if steps:
        console.print(f"The newest checkpoint is of step {max(steps)}. Continue with:\n  {again}", soft_wrap=True)


def report_run(run_folder: Path) -> None:
    """The report of what was logged; a run that logged nothing has none."""
    from megatron_rl.observe import write_report
    from megatron_rl.observe.records import read_metrics

    if read_metrics(run_folder):
        console.print(f"report: {write_report(run_folder)}", soft_wrap=True)


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
    log.error("%s", text)
    if config is None:
        return
    path = config.run_folder / "logs" / "traceback.txt"
    try:
        if path.parent.is_dir():
            path.write_text(traceback.format_exc())
            console.print(f"[dim]traceback: {path}; output of all processes: {path.parent}[/]", soft_wrap=True)
    except OSError:  # the disk is full, or the folder has no possible name, and that was the error
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
