"""An engine that stands still with answers under way, or keeps its memory, while files beside this one say so."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron_rl.rollout.engine_thread import EngineThread
from megatron_rl.rollout.engine_weights import EngineWeights
from megatron_rl.rollout.request_queue import RequestQueue
from megatron_rl.rollout.vllm_sampler import VllmSampler
from megatron_rl.types import Phase

HERE = Path(__file__).parent


class Holds:
    """What a test tells engines whose program lies in a folder, and what they tell it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._held, self._keeps = folder, folder / "held", folder / "keeps"

    def stand(self, version: int) -> None:
        """From this version on, answers stand after each step."""
        for path in self._folder.glob("told_*"):
            path.unlink()
        self._held.write_text(str(version))

    def keep_memory(self) -> None:
        self._keeps.touch()

    def let_go(self) -> None:
        for path in (self._held, self._keeps):
            path.unlink(missing_ok=True)

    def num_told(self, what: str) -> int:
        """The number of engines that tell `stands` or `keeps`."""
        return len(list(self._folder.glob(f"told_{what}_*")))

    def stands(self, version: int | None) -> bool:
        with suppress(OSError, ValueError):  # the file is gone, or not written yet
            if version is not None and version >= int(self._held.read_text()):
                return self._told("stands")
        return False

    def keeps(self) -> bool:
        return self._keeps.exists() and self._told("keeps")

    def _told(self, what: str) -> bool:
        (self._folder / f"told_{what}_{os.getpid()}").touch()
        return True


class HeldThread(EngineThread):
    def __init__(self, requests: RequestQueue, version: Callable[[], int | None]) -> None:
        super().__init__(requests)
        self._holds, self._version = Holds(HERE), version

    def _step(self) -> None:
        super()._step()
        while len(self.requests) and self._calls.empty() and self._holds.stands(self._version()):
            time.sleep(0.02)


class HeldWeights(EngineWeights):
    async def enter(self, phase: Phase) -> None:
        while Holds(HERE).keeps():
            await asyncio.sleep(0.02)
        await super().enter(phase)


class HeldSampler(VllmSampler):
    def __init__(self, spec) -> None:
        super().__init__(spec)
        self._thread = HeldThread(RequestQueue(self._give, self._completion), lambda: self.weights.version)
        self.weights = HeldWeights(self._thread, spec, self._progress)
