"""Profiles of chosen steps of chosen trainer ranks. What runs under `nsys`, and memory snapshots, need GPUs and have
not been run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from megatron_rl.cluster.process import Process
from megatron_rl.cluster.waiting import settle
from megatron_rl.config.observe import StepProfile
from megatron_rl.config.schema import BaseConfig
from megatron_rl.types import Metrics

if TYPE_CHECKING:
    from megatron_rl.actor.profile import RankProfile

ANSWER_S = 600.0
"""The time limit for a rank to write its profile, which may have hundreds of megabytes."""

log = logging.getLogger(__name__)


class ProfiledRank:
    """What a trainer rank can do for a profile."""

    _rank_profile: RankProfile | None = None

    def begin_profile(self, folder: str, name: str, tool: str, memory: bool) -> None:
        """See `RankProfile`."""
        if self._rank_profile is None:
            from megatron_rl.actor.profile import RankProfile

            self._rank_profile = RankProfile(Path(folder), name, tool, memory)
        self._rank_profile.begin()

    def end_profile(self, step: int) -> list[str]:
        """See `RankProfile`. A rank that was restarted meanwhile has nothing to write."""
        return [] if self._rank_profile is None else self._rank_profile.end(step)


class StepProfiles:
    """A watcher of the sink that lets ranks write profiles of the chosen steps."""

    def __init__(
        self,
        section: StepProfile,
        folder: Path,
        trainers: Callable[[], Sequence[Process]],
        tell: Callable[[str], object],
    ) -> None:
        """
        Args:
            trainers: gives the present trainer ranks, in order.
            tell: shows a line.
        """
        self._section, self._folder, self._trainers, self._tell = section, folder, trainers, tell
        self._is_on = False

    def begin(self, step: int) -> None:
        if step in self._section.steps and not self._is_on:
            self._is_on = True
            tool, memory = self._section.tool, self._section.memory
            for rank in self._section.ranks:
                self._ask(rank, "begin_profile", str(self._folder.absolute()), f"trainer_{rank}", tool, memory)

    def end(self, step: int) -> Metrics:
        if self._is_on:
            self._is_on = False
            written = [path for rank in self._section.ranks for path in self._ask(rank, "end_profile", step) or []]
            if written:
                self._tell(f"profiles of step {step}: {', '.join(written)}")
        return {}

    def close(self) -> None: ...

    def _ask(self, rank: int, method: str, *arguments: Any) -> Any:
        """What the rank returned; None if it failed, because a profile is no reason to end a run."""
        process = self._trainers()[rank]
        [answer] = settle([getattr(process.actor, method).remote(*arguments)], ANSWER_S)
        if isinstance(answer, RayError):
            log.warning("%s wrote no profile: %s", process, answer)
            self._tell(f"{process.name} wrote no profile; logs/driver.log says why")
            return None
        return answer


def nsight_environment(config: BaseConfig, role: str, rank: int) -> dict[str, Any]:
    """Ray's options for an actor that is to be started under `nsys profile`; empty for any other. Ray puts the file
    into the folder of its logs unless its path is absolute; nsys replaces %p by the process's id."""
    for section in config.observe:
        if isinstance(section, StepProfile) and section.tool == "nsys" and role == "trainer" and rank in section.ranks:
            options = {
                "t": "cuda,nvtx,cublas,cudnn",
                "o": str((config.run_folder / "profiles" / f"trainer_{rank}_%p").absolute()),
                "capture-range": "cudaProfilerApi",
                "capture-range-end": f"repeat:{len(section.steps)}",
                "stop-on-exit": "true",
            }
            return {"runtime_env": {"nsight": options}}
    return {}
