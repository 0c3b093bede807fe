"""A run's checkpoints: `step_000010/` folders, whole or absent, the newest few kept.

The policy writes and reads its own part; what else a step depends on (the prompt stream, the coefficients) travels
as `extra`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.ports import Policy

PATTERN = re.compile(r"step_(\d{6,})")


class Stateful(Protocol):
    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class Checkpoints:
    def __init__(self, folder: Path, *, keep: int, resume: bool) -> None:
        """
        Raises:
            ValueError: the folder holds a run's checkpoints and `resume` is False: they would be mixed.
        """
        self.folder, self.keep, self.resume = folder, keep, resume
        if not resume and self.steps():
            raise ValueError(
                f"{folder} holds checkpoints of an earlier run (newest: step {self.steps()[-1]}); continue it with "
                "--resume auto, or choose another run.name"
            )

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, oldest first; folders that a crash left half-written are not among them."""
        if not self.folder.is_dir():
            return []
        found = [PATTERN.fullmatch(path.name) for path in self.folder.iterdir()]
        return sorted(int(match[1]) for match in found if match)

    @property
    def first_step(self) -> int:
        """Where the run begins: 0, or the newest checkpoint's step."""
        return (self.steps() or [0])[-1] if self.resume else 0

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def restore(self, policy: Policy, state: Mapping[str, Stateful]) -> int:
        """Load the newest checkpoint, if there is one; returns the step to begin with."""
        step = self.first_step
        if step:
            extra = policy.load(self.path(step))
            for name, part in state.items():
                part.restore(extra[name])
        return step

    def save(self, policy: Policy, step: int, state: Mapping[str, Stateful]) -> None:
        """Write a checkpoint, then delete what exceeds `keep`: the last good one never goes first."""
        if step in self.steps():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        policy.save(self.path(step), {"step": step} | {name: part.state() for name, part in state.items()})
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.path(old))
