"""A run's checkpoints: `step_000010/` folders, which exist only when they are complete; the newest few are kept.

The policy writes and reads its own part. Everything else that a step depends on (the prompt stream, the coefficients)
and the configuration are in `extra.json`, which is read before anything starts.

Invariants (tests/unit/loop, tests/e2e): however a run ends, its newest complete state is saved, unless the policy is
lost; a run is resumed with the configuration of its checkpoint, except for the keys that may change.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

from megatron_rl.config.schema import BaseConfig
from megatron_rl.loop.changes import Change, compare, with_new_keys
from megatron_rl.ports import Policy, PolicyLost, Sink, StopRequested

PATTERN = re.compile(r"step_(\d{6,})")
SCORES = "scores.json"
"""The file with the scores by `checkpoint.keep_best`, in the folder of the checkpoints; the largest one is the best."""
KEPT = "kept.json"
"""The file with the steps whose checkpoints are kept for `megatron-rl explain`, in the same form."""
EXTRA = "extra.json"
"""The file of a checkpoint that holds the loop's own state."""

Resume = int | Literal["auto"] | None
"""This says where a run starts: a step resumes from the checkpoint of that step, `auto` resumes from the newest one,
and None is a new run."""


class Stateful(Protocol):
    """A part of the run whose state belongs to the checkpoint."""

    def state(self) -> dict[str, Any]:
        """The state in JSON's types."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


def part_path(folder: Path, model: str) -> Path:
    """The folder of another model's part of the policy's checkpoint in `folder`."""
    return folder.parent / model / folder.name


def folder_name(step: int) -> str:
    """The name of the folder of a checkpoint, or of an exported model."""
    return f"step_{step:06d}"


def due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps happens after this step; 0 means never."""
    return every > 0 and step % every == 0


def read_extra(folder: Path) -> dict[str, Any]:
    """The part of a checkpoint that the loop wrote.

    Raises:
        ValueError: its file is missing or damaged.
    """
    path = folder / EXTRA
    try:
        extra: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return extra
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; resume from another checkpoint: --resume STEP") from error


def _read_scores(path: Path) -> dict[int, float]:
    try:
        return {int(step): float(score) for step, score in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError):  # nobody was evaluated yet, or a crash cut the file
        return {}


def find_checkpoints(folder: Path) -> dict[int, Path]:
    """The complete checkpoints by step, the oldest first. Folders that a crash left incomplete are not among them."""
    if not folder.is_dir():
        return {}
    found = [(match, path) for path in folder.iterdir() if (match := PATTERN.fullmatch(path.name))]
    return dict(sorted((int(match[1]), path) for match, path in found))


class Checkpoints:
    def __init__(self, folder: Path, config: BaseConfig, *, resume: Resume) -> None:
        """
        Args:
            config: the run's configuration. `checkpoint` says which checkpoints are kept, and whether training goes on
                while one is written.

        Raises:
            ValueError: the folder holds checkpoints, but the run is a new one; or there is no checkpoint of the step
                to resume from; or a key differs from the configuration of the checkpoint that may not change.
        """
        self.folder, self.kept, self.resume, self._config = folder, config.checkpoint, resume, config
        self._is_writing = False
        """Whether the policy is writing a checkpoint."""
        self._scores: dict[int, float] = _read_scores(folder / SCORES)
        """The value of `keep_best` by step, negative if small values are good."""
        self._kept: set[int] = set(_read_scores(folder / KEPT))
        """The steps whose checkpoints are never deleted."""
        steps = self.steps()
        if resume is None and steps:
            raise ValueError(
                f"{folder} holds checkpoints of an earlier run (newest: step {steps[-1]}); continue it with "
                "--resume auto, or choose another run.name"
            )
        if isinstance(resume, int) and resume not in steps:
            raise ValueError(f"{folder} holds no checkpoint of step {resume}; it has {steps or 'none at all'}")
        self.first_step = resume if isinstance(resume, int) else steps[-1] if steps else 0
        """The step that the run begins with: 0, or the step of its checkpoint."""
        self.changes: list[Change] = []
        """The differences from the configuration of the checkpoint that the run is resumed from."""
        if self.first_step:
            saved = read_extra(self.path(self.first_step))["config"]
            self.changes = compare(with_new_keys(saved, type(config)), config.model_dump(mode="json"))

    @property
    def resume_at(self) -> int | None:
        """The next step of a resumed run, which is 0 if it has no checkpoint yet; None for a new run."""
        return None if self.resume is None else self.first_step

    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, the oldest first. With a critic its part is complete, too."""
        return [step for step in find_checkpoints(self.folder) if all(path.is_dir() for path in self._paths(step))]

    def path(self, step: int) -> Path:
        return self.folder / folder_name(step)

    def _paths(self, step: int) -> list[Path]:
        """The folders of a checkpoint."""
        path = self.path(step)
        return [path, part_path(path, "critic")] if getattr(self._config, "critic", None) is not None else [path]

    def restore(self, policy: Policy, state: Mapping[str, Stateful]) -> int:
        """Load the checkpoint to resume from, if there is one, and return the step to begin with.

        Checkpoints of later steps are renamed to `superseded_step_...`, because the resumed run will write its own.
        """
        left = [*self.folder.glob("step_*.tmp-*"), *self.folder.glob("critic/step_*.tmp-*")]
        for unfinished in left:  # a killed run left it
            shutil.rmtree(unfinished)
        step = self.first_step
        if step:
            extra = policy.load(self.path(step))
            for name, part in state.items():
                part.restore(extra[name])
        for later in self.steps():
            if later > step:
                for path in self._paths(later):
                    target = path.with_name(f"superseded_{path.name}")
                    shutil.rmtree(target, ignore_errors=True)
                    path.rename(target)
        return step

    def save(self, policy: Policy, step: int, state: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint, after the one before it is complete.

        Args:
            state: the state of each part by its name, as returned by `Stateful.state`.
        """
        self.finish(policy)
        if step in self.steps():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        policy.save(self.path(step), {"step": step, "config": self._config.model_dump(mode="json"), **state})
        self._is_writing = True
        if not self.kept.asynchronous:
            self.finish(policy)

    def finish(self, policy: Policy, *, wait: bool = True) -> None:
        """Wait until the checkpoint that is being written is complete, and then delete the oldest ones that are not
        kept, so that there is always a complete one.

        Args:
            wait: False: do nothing if it is not complete yet.
        """
        if not self._is_writing:
            return
        self._is_writing = False  # if it fails, it is given up
        if not policy.finish_save(wait):
            self._is_writing = True
            return
        self._delete_old()

    def forget(self) -> None:
        """The policy that was writing a checkpoint is lost."""
        self._is_writing = False

    def judge(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note the value by which the best checkpoint is kept, if the weights of this step were evaluated."""
        name = self.kept.keep_best
        if name is not None and name in metrics and self.folder.is_dir():
            self._scores[step] = -metrics[name] if name == "eval/loss" else metrics[name]
            (self.folder / SCORES).write_text(json.dumps(self._scores))

    def keep(self, step: int) -> None:
        """Never delete the newest checkpoint that a replay of this step can begin with."""
        before = [saved for saved in self.steps() if saved <= step]
        if before:
            self._kept.add(before[-1])
            (self.folder / KEPT).write_text(json.dumps(dict.fromkeys(sorted(self._kept), 1.0)))

    def _delete_old(self) -> None:
        steps = self.steps()
        kept = set(steps[-self.kept.keep :]) | self._kept
        kept |= {step for step in steps if due(step, self.kept.keep_every)}
        kept |= set(sorted(self._scores.keys() & steps, key=lambda step: (self._scores[step], step))[-1:])
        for step in steps:
            if step not in kept:
                for path in self._paths(step):
                    shutil.rmtree(path)


class WholeState:
    """The newest complete state of a run: the policy's state, and a copy of the states of all other parts.

    It is a context manager around the loop. If the loop ends by an error, the state is saved before the error is passed
    on. If the loop ends by a request to stop, the state is saved, and execution continues after the `with` block. The
    state is not saved if the policy is lost, between two updates of one step, or before the first step is done.
    """

    def __init__(self, checkpoints: Checkpoints, policy: Policy, parts: Mapping[str, Stateful]) -> None:
        self._checkpoints, self._policy, self._parts = checkpoints, policy, parts
        self.step = 0
        """The number of steps that were done when the state was last complete."""
        self._num_changes: int | None = None
        """`Policy.num_changes` when the state was last complete; None if the policy is lost since."""
        self._held: dict[int, dict[str, Any]] = {}
        """The states of the other parts by step, for the steps that a policy can return to without a checkpoint."""

    def mark(self, step: int) -> None:
        """Note that the state is complete: `step` steps are done, and the next one has changed nothing yet."""
        self.step, self._num_changes = step, self._policy.num_changes
        # The policy's mirrors hold two steps, and a restarted policy has the weights of step 0.
        self._held = {s: state for s, state in self._held.items() if s in (0, step - 1)}
        self._held[step] = {name: part.state() for name, part in self._parts.items()}
        self._checkpoints.finish(self._policy, wait=False)

    def lose(self) -> None:
        """Note that the policy is lost, so that there is nothing to save."""
        self._num_changes = None

    def save(self) -> None:
        """Save the state, unless an update has changed the policy and its step is not done."""
        if self.step and self._policy.num_changes == self._num_changes:
            self._checkpoints.save(self._policy, self.step, self._held[self.step])

    def save_if_due(self, sink: Sink, *, is_last: bool, stops: bool) -> None:
        """After a step: save the state and export the model, if `checkpoint` says so. A run that ends or stops is saved
        in any case, and exports its last model itself."""
        kept, folder = self._checkpoints.kept, self._checkpoints.folder
        if is_last or stops or due(self.step, kept.every):
            with sink.phase("checkpoint"):
                self.save()
        if not is_last and due(self.step, kept.export_every):
            with sink.phase("checkpoint"):
                self._policy.export_hf(folder.parent / "exports" / folder_name(self.step))

    def recover(self, mirrored: Collection[int]) -> int:
        """Restore the newest state that is left into a restarted policy and all other parts, and return its step. This
        is the state of a mirror, of a checkpoint, or of step 0.

        Args:
            mirrored: the steps whose state of the policy the mirrors hold.

        Raises:
            ValueError: the newest checkpoint cannot be read.
        """
        self._checkpoints.forget()
        in_mirrors = max((step for step in self._held if step in mirrored), default=0)
        saved = max(self._checkpoints.steps(), default=0)
        step = max(in_mirrors, saved)
        if step == saved > 0:
            state = self._policy.load(self._checkpoints.path(step))
        else:
            state = self._held[step]
            if step:
                self._policy.load_mirror(step)
        for name, part in self._parts.items():
            part.restore(state[name])
        self.mark(step)
        return step

    def __enter__(self) -> WholeState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self._checkpoints.finish(self._policy)
        if isinstance(error, StopRequested):
            self.save()
            self._checkpoints.finish(self._policy)
            return True
        if isinstance(error, Exception) and not isinstance(error, PolicyLost):
            try:
                self.save()
                self._checkpoints.finish(self._policy)
            except (ValueError, OSError, RuntimeError) as failure:
                error.add_note(f"No checkpoint could be written after this error: {failure}")
        return False
