"""What every recipe does around its own wiring: arguments, judgement, dry run, the run folder, Ctrl-C, errors.

python recipes/grpo.py FILE.yaml ... section.key=value ... [--dry-run] [--resume auto]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import BaseConfig

Config = TypeVar("Config", bound=BaseConfig)

console = Console(highlight=False)


class Interrupt:
    """The first Ctrl-C asks for a stop after the step, the second one stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    def ask(self, signum: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        console.print(
            "\n[yellow]Stopping after this step, with a checkpoint. Ctrl-C again stops at once, without one.[/]"
        )

    @contextmanager
    def listening(self) -> Iterator[Interrupt]:
        before = {number: signal.signal(number, self.ask) for number in (signal.SIGINT, signal.SIGTERM)}
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
    run: Callable[[Config, bool, Interrupt], int],
) -> int:
    """Parse, judge, then plan or run; returns the exit status.

    `program` is the recipe's path, for the command that continues a stopped run. `run` gets the configuration, whether
    to resume, and the interrupt; it returns the steps that are done.
    """
    parser = argparse.ArgumentParser(
        program, description=f"See README.md. Example: python {program} FILE.yaml run.steps=10"
    )
    parser.add_argument("configuration", nargs="+", metavar="FILE.yaml | section.key=value")
    parser.add_argument(
        "--dry-run", action="store_true", help="judge the configuration, print sizes and plans, start nothing"
    )
    parser.add_argument(
        "--resume", choices=["auto", "never"], default="never", help="auto: go on from the newest checkpoint"
    )
    options = parser.parse_args(arguments)
    sys.path.insert(0, os.getcwd())  # a reward function's module lies where the command is typed
    config: Config | None = None
    try:
        config = load_config(kind, options.configuration)
        if options.dry_run:
            dry_run(config, console)
            return 0
        with Interrupt().listening() as interrupt:
            done = run(config, options.resume == "auto", interrupt)
        if done < config.run.steps:
            again = " ".join(["python", program, *options.configuration, "--resume auto"])
            console.print(f"Stopped after step {done} of {config.run.steps}. Continue with:\n  {again}", soft_wrap=True)
            return 130
        return 0
    except KeyboardInterrupt:
        console.print(
            "[red]Stopped at once.[/] Checkpoints that were whole stay; --resume auto continues from the newest."
        )
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        return _tell(error, config)


def _tell(error: Exception, config: BaseConfig | None) -> int:
    """The cause first and short; the traceback goes to a file for whoever needs it."""
    console.print("[bold red]error:[/]", end=" ")
    console.print(str(error), markup=False, soft_wrap=True)
    if config is not None and config.run_folder.is_dir():
        path = config.run_folder / "logs" / "traceback.txt"
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_text(traceback.format_exc())
            console.print(f"[dim]traceback: {path}; output of all processes: {path.parent}[/]", soft_wrap=True)
        except OSError:  # the disk is full, and that was the error
            traceback.print_exc()
    return 1


def show(run_folder: Path, finished: bool) -> None:
    """The end of a run: report, summary, and where things are."""
    from megatron_rl.observe import print_summary, write_report

    report = write_report(run_folder)
    print_summary(run_folder, console)
    console.print(f"report: {report}", f"model: {run_folder / 'hf'}" if finished else "", soft_wrap=True)


def quiet_environment() -> None:
    """Before torch and Ray are imported: one thread a process, and no chatter of theirs on the terminal."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
