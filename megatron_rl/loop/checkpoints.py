"""A run's checkpoints: `step_000010/` folders, whole or absent, the newest few kept.

The policy writes and reads its own part. What else a step depends on (the prompt stream, the coefficients) and the
configuration travel as `extra.json`, which is read before anything starts.

Invariants (tests/unit/loop, tests/e2e): whatever ends a run, the newest whole state is saved, unless the policy is
lost; a run that goes on does so under the configuration that it was saved with, but for what may change.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

from megatron_rl.loop.changes import Change, compare
from megatron_rl.ports import Policy, PolicyLost, StopRequested

PATTERN = re.compile(r"step_(\d{6,})")
EXTRA = "extra.json"

Resume = int | Literal["auto"] | None
"""The step to go on from, the newest checkpoint, or a new run."""


class Stateful(Protocol):
    def state(self) -> dict[str, Any]:
        """In JSON's types."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def read_extra(folder: Path) -> dict[str, Any]:
    """What the loop left in a checkpoint.

    Raises:
        ValueError: the file is missing or damaged.
    """
    path = folder / EXTRA
    try:
        extra: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return extra
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; resume from another checkpoint: --resume STEP") from error


def find_checkpoints(folder: Path) -> dict[int, Path]:
    """Whole checkpoints by step, oldest first; folders that a crash left half-written are not among them."""
    if not folder.is_dir():
        return {}
    found = [(match, path) for path in folder.iterdir() if (match := PATTERN.fullmatch(path.name))]
    return dict(sorted((int(match[1]), path) for match, path in found))


class Checkpoints:
    def __init__(self, folder: Path, *, keep: int, resume: Resume, config: Mapping[str, Any]) -> None:
        """
        Args:
            config: the run's configuration, in JSON's types.

        Raises:
            ValueError: the folder holds a run's checkpoints and nobody asked to resume: they would be mixed; there is
                no checkpoint of the step; or its configuration differs in what must stay.
        """
        self.folder, self.keep, self.resume, self._config = folder, keep, resume, dict(config)
        steps = self.steps()
        if resume is None and steps:
            raise ValueError(
                f"{folder} holds checkpoints of an earlier run (newest: step {steps[-1]}); continue it with "
                "--resume auto, or choose another run.name"
            )
        if isinstance(resume, int) and resume not in steps:
            raise ValueError(f"{folder} holds no checkpoint of step {resume}; it has {steps or 'none at all'}")
        self.first_step = resume if isinstance(resume, int) else steps[-1] if steps else 0
        """Where the run begins: 0, or the checkpoint's step."""
        self.changes: list[Change] = []
        """What differs from the configuration of the checkpoint that the run goes on from."""
        if self.first_step:
            self.changes = compare(read_extra(self.path(self.first_step))["config"], self._config)

    @property
    def resume_at(self) -> int | None:
        """The next step of a run that goes on, from a checkpoint or from the very beginning; None: a new run."""
        return None if self.resume is None else self.first_step

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, oldest first."""
        return list(find_checkpoints(self.folder))

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def restore(self, policy: Policy, state: Mapping[str, Stateful]) -> int:
        """Load the checkpoint to go on from, if there is one; returns the step to begin with.

        Later checkpoints, which belong to a future that will be another, are renamed to `superseded_step_...`.
        """
        step = self.first_step
        if step:
            extra = policy.load(self.path(step))
            for name, part in state.items():
                part.restore(extra[name])
        for later in self.steps():
            if later > step:
                target = self.folder / f"superseded_{self.path(later).name}"
                shutil.rmtree(target, ignore_errors=True)
                self.path(later).rename(target)
        return step

    def save(self, policy: Policy, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, then delete what exceeds `keep`: the last good one never goes first.

        Args:
            state: of each part, by name, as `Stateful.state` gave it.
        """
        if step in self.steps():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        policy.save(self.path(step), {"step": step, "config": self._config, **state})
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.path(old))


class WholeState:
    """The newest state of a run that a checkpoint can hold: the policy's, and of everything else a copy of it.

    A context manager around the loop. When the loop ends by an error, this state is saved before the error goes on;
    when it ends by a request to stop, the state is saved and the loop's caller goes on after the block. It is not
    saved when the policy is lost, nor between two updates of one step, nor before the first step is done.
    """

    def __init__(self, checkpoints: Checkpoints, policy: Policy, parts: Mapping[str, Stateful]) -> None:
        self._checkpoints, self._policy, self._parts = checkpoints, policy, parts
        self._step: int | None = None
        self._held: dict[str, Any] = {}

    def mark(self, step: int) -> None:
        """What a step needs is complete now: `step` steps are done and the next one has changed nothing yet."""
        self._step = step
        self._held = {name: part.state() for name, part in self._parts.items()}

    def spoil(self) -> None:
        """An update has changed the policy, and the step has more of them."""
        self._step = None

    def save(self) -> None:
        if self._step:
            self._checkpoints.save(self._policy, self._step, self._held)

    def __enter__(self) -> WholeState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, StopRequested):
            self.save()
            return True
        if isinstance(error, Exception) and not isinstance(error, PolicyLost):
            try:
                self.save()
            except (ValueError, OSError, RuntimeError) as failure:
                error.add_note(f"No checkpoint could be written either: {failure}")
        return False
