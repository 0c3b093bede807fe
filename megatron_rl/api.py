"""The same runs from Python: `from megatron_rl import grpo`.

A run is a process of its own, the one that the command `megatron-rl grpo` starts, so a script, a notebook and a command
do the same. What it is given is in the run's folder, below `inputs`: the configuration, rows that were a list, and
functions that no other process can import. Everything can be continued from there, also by the command.

Invariant (tests/unit/api): a call has the same configuration as the command with the same keys.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import yaml

from megatron_rl.config.function import VALUES
from megatron_rl.config.function_copies import Functions
from megatron_rl.config.given_rows import GivenRows, Rows
from megatron_rl.config.load import merge, read_yaml, validate
from megatron_rl.config.schema import (
    BaseConfig,
    DpoRunConfig,
    GrpoRunConfig,
    OfflineRunConfig,
    PpoRunConfig,
    RewardModelRunConfig,
    SftRunConfig,
)
from megatron_rl.observe.records import METRICS, read_metrics
from megatron_rl.processes import ending_together

Function = Callable[..., Any]
Model = str | os.PathLike[str] | Mapping[str, Any]
"""A Hugging Face folder, or the section `model`: `{"path": "models/Qwen3-0.6B", "dtype": "float32"}`."""
Reward = Function | str | Mapping[str, Any]
"""A function, the path of one (`my_rewards.py:score`), or an entry of the section `rewards`."""
Data = Rows | Mapping[str, Any]
"""Rows, or the section `data`, whose `train` may be rows: `{"train": rows, "columns": {"ground_truth": "answer"}}`."""
Watch = Callable[["Run"], bool]
INPUTS = "inputs"
OF_STEPS = {"loss", "rollout/num_samples"}
"""Each step has at least one of these metrics, also if it trained nothing."""
COLOURS = {"FORCE_COLOR", "CLICOLOR_FORCE"}
"""The variables by which a notebook's kernel makes programs believe that they have a terminal."""
KINDS: Mapping[str, type[BaseConfig]] = {
    "grpo": GrpoRunConfig,
    "ppo": PpoRunConfig,
    "sft": SftRunConfig,
    "dpo": DpoRunConfig,
    "reward_model": RewardModelRunConfig,
}


def grpo(
    model: Model,
    data: Data,
    rewards: Reward | Sequence[Reward],
    steps: int | None = None,
    *,
    eval_data: Rows | None = None,
    name: str | None = None,
    files: Sequence[str | os.PathLike[str]] = (),
    **sections: Any,
) -> Run:
    """Train by reinforcement, and wait until the run ends. Ctrl-C, or "interrupt kernel", stops it with a checkpoint.

    For example:

        def brevity(completions, **columns):
            return [1.0 - min(len(text), 100) / 100 for text in completions]

        rows = [{"prompt": "Name a colour.", "ground_truth": "red"}, ...]
        run = grpo("models/Qwen3-0.6B", rows, brevity, steps=20, rollout={"prompts_per_step": 4})
        run.metrics[-1]["reward/mean"], run.report, run.model

    Args:
        model: a Hugging Face folder, or the section `model` of a file.
        data: rows, or the section `data`.
        rewards: one or several. A function has TRL's signature; see docs/rewards.md.
        eval_data: held-out rows.
        name: of the run's folder in `runs`; by default the kind and the time.
        files: YAML files that come first, such as `configs/cluster/h100_8n8g.yaml`.
        sections: as in a file, such as `policy={"optimizer": {"lr": 1e-6}}`; `megatron-rl config` prints all keys.

    Raises:
        ValueError: the configuration is refused, or a function cannot be sent to the verifiers' processes.
        RuntimeError: the run has failed, or what is checked before its start has. Its error has been printed, and the
            message has the log's path.
    """
    return start("grpo", Inputs(model, data, eval_data, rewards), name, files, _with_steps(sections, steps))


def ppo(
    model: Model,
    data: Data,
    rewards: Reward | Sequence[Reward],
    steps: int | None = None,
    *,
    eval_data: Rows | None = None,
    name: str | None = None,
    files: Sequence[str | os.PathLike[str]] = (),
    **sections: Any,
) -> Run:
    """The same with a critic (section `critic`); see `grpo`."""
    return start("ppo", Inputs(model, data, eval_data, rewards), name, files, _with_steps(sections, steps))


def sft(
    model: Model,
    data: Rows,
    steps: int | None = None,
    *,
    name: str | None = None,
    files: Sequence[str | os.PathLike[str]] = (),
    **sections: Any,
) -> Run:
    """Train on rows with `prompt` and `completion`, or with `messages` that end with the assistant; see `grpo`."""
    return start("sft", Inputs(model, data), name, files, _with_steps(sections, steps))


def dpo(
    model: Model,
    data: Rows,
    steps: int | None = None,
    *,
    name: str | None = None,
    files: Sequence[str | os.PathLike[str]] = (),
    **sections: Any,
) -> Run:
    """Train on rows with `prompt`, `chosen` and `rejected`, by the loss `dpo={"loss": {"kind": ...}}`; see `grpo`."""
    return start("dpo", Inputs(model, data), name, files, _with_steps(sections, steps))


def reward_model(
    model: Model,
    data: Rows,
    steps: int | None = None,
    *,
    name: str | None = None,
    files: Sequence[str | os.PathLike[str]] = (),
    **sections: Any,
) -> Run:
    """Train a reward model on rows with `prompt`, `chosen` and `rejected`; see `grpo`."""
    return start("reward_model", Inputs(model, data), name, files, _with_steps(sections, steps))


@dataclass(frozen=True)
class Run:
    """The folder of a run.

    Example: `Run("runs/grpo_20261126_140501").resume()` continues a run from its newest checkpoint.
    """

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder).absolute())

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One record for each step, by the names of docs/metrics.md."""
        return [record for record in read_metrics(self.folder) if record.keys() & OF_STEPS]

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """The records with an evaluation. The last one belongs to no step: it has the weights after all of them."""
        return [one for one in read_metrics(self.folder) if one.keys() & {"eval/reward_mean", "eval/loss"}]

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def model(self) -> Path | None:
        """The trained model's Hugging Face folder; None if the run has not done all its steps."""
        return self.folder / "hf" if (self.folder / "hf" / "config.json").exists() else None

    def resume(self, watch: Watch | None = None, **sections: Any) -> Run:
        """Continue from the newest checkpoint, or begin if there is none.

        Args:
            watch: is called now and then while the run goes on; True stops it with a checkpoint.
            sections: keys that change, such as `run={"steps": 40}`.

        Raises:
            ValueError, RuntimeError: see `grpo`.
        """
        found = [
            self.folder / INPUTS / f"{kind}.yaml" for kind in KINDS if (self.folder / INPUTS / f"{kind}.yaml").exists()
        ]
        if not found:
            raise ValueError(f"{self.folder} has no {INPUTS}/grpo.yaml; continue it with the command that began it")
        given = read_yaml(found[0])
        merge(given, sections)
        validate(KINDS[found[0].stem], given)
        found[0].write_text(yaml.safe_dump(given, sort_keys=False, allow_unicode=True))
        return _run(found[0], self, watch)

    def _repr_png_(self) -> bytes | None:
        """The curves, which a notebook shows."""
        path = self.folder / "curves.png"
        return path.read_bytes() if path.exists() else None


class Inputs(NamedTuple):
    """The model of a run, and what it learns from."""

    model: Model
    data: Data
    eval_data: Rows | None = None
    rewards: Reward | Sequence[Reward] = ()


def start(
    kind: str,
    inputs: Inputs,
    name: str | None,
    files: Sequence[str | os.PathLike[str]],
    sections: Mapping[str, Any],
    watch: Watch | None = None,
    continued: bool = False,
) -> Run:
    """Write the inputs of a run, and wait for it.

    Args:
        watch: see `_run`.
        continued: the folder may have a run, which goes on from its newest checkpoint with these inputs. A change of
            its meaning is refused.
    """
    name = name or f"{kind}_{time.strftime('%Y%m%d_%H%M%S')}"
    if isinstance(files, str | os.PathLike):
        raise ValueError(f"files is one path, {os.fspath(files)!r}; give a list of paths")
    given = merged(files, {"run": {"name": name}, "model": model_section(inputs.model)}, sections)
    folder = Path(given["run"].get("folder", "runs"), given["run"]["name"]).absolute()
    written = folder / INPUTS
    if not continued and holds_run(folder):
        raise ValueError(
            f"{folder} is a run already; Run({str(folder)!r}).resume() continues it, or choose another name"
        )
    if isinstance(inputs.data, Mapping) and hasattr(inputs.data, "save_to_disk"):
        sets = ", ".join(map(repr, inputs.data))
        raise ValueError(f"the data is a {type(inputs.data).__name__} of {sets}; give one of them, such as data[...]")
    data = dict(inputs.data) if isinstance(inputs.data, Mapping) else {"train": inputs.data}
    if "train" not in data:
        raise ValueError("data is a mapping without `train`, which has the rows")
    rows, rewards = GivenRows(data.pop("train"), written / "train"), inputs.rewards
    heldout = None if inputs.eval_data is None else GivenRows(inputs.eval_data, written / "eval")
    if issubclass(KINDS[kind], OfflineRunConfig):
        merge(given, {kind: {"rows": rows.path} | ({} if heldout is None else {"eval": heldout.path})})
    else:
        merge(given, {"data": data | {"train": rows.path} | ({} if heldout is None else {"eval": heldout.path})})
    entries = rewards if isinstance(rewards, Sequence) and not isinstance(rewards, str) else [rewards]
    if entries:
        given["rewards"] = [_entry(reward) for reward in entries]
    functions = Functions(written / f"functions{VALUES}")
    given = functions.named(given)
    counts = _has_epochs(given) and given["run"].get("steps") is None  # the recipe counts the steps
    validate(KINDS[kind], merged((), given, {"run": {"steps": 1}}) if counts else given)
    # A run that goes on keeps its inputs until it goes on with the new ones, because a row or a change may be refused.
    new = folder / f"{INPUTS}.new"
    rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        for part in (rows, heldout, functions):
            if part is not None:
                part.save(new)
        (new / f"{kind}.yaml").write_text(yaml.safe_dump(given, sort_keys=False, allow_unicode=True))
    except BaseException:
        rmtree(new)
        raise
    earlier, run = folder / f"{INPUTS}.earlier", Run(folder)
    num_steps = len(run.metrics)
    rmtree(earlier, ignore_errors=True)
    if written.exists():
        written.rename(earlier)
    new.rename(written)
    try:
        return _run(written / f"{kind}.yaml", run, watch)
    except BaseException:
        if continued and earlier.exists() and len(run.metrics) == num_steps:
            rmtree(written)
            earlier.rename(written)
        raise
    finally:
        rmtree(earlier, ignore_errors=True)


def holds_run(folder: Path) -> bool:
    """Whether the folder has a run that Python began."""
    return (folder / INPUTS).exists() and (folder / METRICS).exists()


def _has_epochs(given: Mapping[str, Any]) -> bool:
    return isinstance(run := given.get("run"), Mapping) and run.get("epochs") is not None


def _with_steps(sections: Mapping[str, Any], steps: int | None) -> dict[str, Any]:
    if steps is None and not _has_epochs(sections):
        steps = 20
    return {**sections, "run": {"steps": steps, **sections.get("run", {})}}


def merged(files: Sequence[str | os.PathLike[str]], *sections: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of files, and sections after them, each with the last word over the ones before."""
    found: dict[str, Any] = {}
    for one in (*(read_yaml(Path(file)) for file in files), *sections):
        merge(found, one)
    return found


def model_section(model: Model) -> dict[str, Any]:
    return dict(model) if isinstance(model, Mapping) else {"path": os.fspath(model)}


def _entry(reward: Reward) -> dict[str, Any]:
    """The entry of a reward in the section `rewards`."""
    if isinstance(reward, Mapping):
        return dict(reward)
    return {"kind": reward} if isinstance(reward, str) and ":" not in reward else {"kind": "function", "path": reward}


def _run(path: Path, run: Run, watch: Watch | None = None) -> Run:
    """Start the command of a run, or continue it, and wait for its end. In a terminal it has the screen; elsewhere, as
    in a notebook, its lines are printed.

    Args:
        watch: is called about twice a second, in a notebook after each line; True stops the run with a checkpoint.
    """
    command = [sys.executable, "-m", "megatron_rl", path.stem.replace("_", "-"), str(path), "--resume", "auto"]
    root = str(Path(__file__).parents[1])
    folders = [folder for folder in sys.path if folder] + [os.getcwd(), root]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(folders)), "PYTHONUNBUFFERED": "1"}
    has_screen = sys.stdout is sys.__stdout__
    if not has_screen:  # a notebook's kernel asks for colours, but its cells cannot redraw a live table
        kept = {name: value for name, value in environment.items() if name not in COLOURS}
        environment = kept | {"TTY_INTERACTIVE": "0"}
    sys.stdout.flush()  # what was printed before comes before the run's lines
    # Its own group: Ctrl-C comes to this process alone, which passes it on once.
    with ending_together(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=None if has_screen else subprocess.PIPE,
        stderr=None if has_screen else subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    ) as child:
        asked = False
        while child.poll() is None:
            try:
                if child.stdout is None:
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(0.5)
                else:
                    print(child.stdout.readline(), end="", flush=True)
                if watch is not None and not asked and watch(run):
                    asked = True
                    child.send_signal(signal.SIGINT)
            except KeyboardInterrupt:
                child.send_signal(signal.SIGINT)
        if child.stdout is not None:
            print(child.stdout.read(), end="", flush=True)
    if watch is not None:
        watch(run)
    if child.returncode and child.returncode < 128:
        log = run.folder / "logs" / "driver.log"
        where = f", and {log} has more" if log.exists() else ""
        raise RuntimeError(f"the run ended with status {child.returncode}; its error is printed above{where}")
    return run
