from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import warm
from tiny_trainers import TinyTrainers, write_model

from megatron_rl.config.policy import ModelConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.layout import Engines
from megatron_rl.types import Mesh


class Stage:
    """An engine and the trainers that push weights into it. All calls are awaited on one event loop."""

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        dtype: str = "float32",
        record: Path | None = None,
        shares_gpus: bool = False,
        returns_routes: bool = False,
        answers: Callable[[RolloutConfig], Any] = lambda rollout: None,
        **rollout,
    ) -> None:
        from megatron_rl.rollout.engine import VllmEngine

        self.config = RolloutConfig(prompts_per_step=8, samples_per_prompt=4, **rollout)
        engines = Engines(1, self.config.tensor, self.config.pipeline, self.config.expert_parallel)
        self.trainers = TinyTrainers(folder, mesh, engines, dtype)
        model = ModelConfig(path=folder, dtype=dtype)
        self.engine = VllmEngine(
            model=model,
            rollout=self.config,
            seed=0,
            record=record,
            returns_routes=returns_routes,
            shares_gpus=shares_gpus,
            make_answers=answers(self.config),
        )
        self._loop = asyncio.new_event_loop()
        self.run(self.engine.start())
        self.run(self.engine.weights.init_transfer(self.trainers.info))

    def run(self, awaitable: Awaitable):
        return self._loop.run_until_complete(awaitable)

    def rejoin(self, **changes) -> None:
        """Join the bridge again, with these changes of its setup."""
        self.trainers.rejoin(**changes)
        self.run(self.engine.weights.init_transfer(self.trainers.info))

    def push(self, folder: Path, version: int):
        self.trainers.begin_push(folder, version)
        metrics = self.run(self.engine.weights.receive(version))
        return metrics, self.trainers.end_push()

    def close(self) -> None:
        self.engine.close()
        self.trainers.close()
        self._loop.close()


@pytest.fixture(scope="module")
def make_stage() -> Callable[..., Stage]:
    """Makes stages. At the end of the module they are closed, and the environment variables are restored."""
    environment, stages = dict(os.environ), []
    warm.warm_engines()

    def make(folder: Path, mesh: Mesh, **options) -> Stage:
        stages.append(Stage(folder, mesh, **options))
        return stages[-1]

    yield make
    for stage in stages:
        stage.close()
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Two models that differ only in their weights."""
    base = tmp_path_factory.mktemp("models")
    return write_model(base / "a", seed=1), write_model(base / "b", seed=2)
