"""vLLM engines as Ray actors; implements `ports.Engine`.

An engine returns a few numbers a sample, and the tokens of each group as an object that stays in Ray's store; the
verifier and the trainer ranks fetch it there. The driver owns it: it outlives an engine that dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from megatron_rl.cluster.session import gather, redirect_output, settle
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.rollout.engine import VllmEngine
from megatron_rl.types import Group, Metrics, Prompt, Tokens

ALIVE_S = 30.0
"""An engine that does not say in this time that it lives is replaced."""


class EngineRank:
    """One engine, a TP group of vLLM workers, behind an asyncio Ray actor: it receives weights while it generates."""

    def __init__(self, config: GrpoRunConfig, index: int, logs: str) -> None:
        redirect_output(Path(logs) / f"engine_{index}.log")
        self.config = config

    async def start(self) -> None:
        config = self.config
        self.engine = VllmEngine(model=config.model, rollout=config.rollout, seed=config.run.seed)
        await self.engine.start()

    async def alive(self) -> bool:
        return self.engine.alive

    async def connect(self, info: dict[str, Any]) -> None:
        await self.engine.init_transfer(info)

    async def receive(self, version: int) -> Metrics:
        return await self.engine.receive(version)

    async def generate(
        self, prompts: list[Prompt], num_samples: int, version: int, seed: int, greedy: bool
    ) -> tuple[Any, ...]:
        """The samples of all groups, and then the tokens of each group, which Ray keeps as objects of their own."""
        answers = await self.engine.generate(prompts, num_samples, version, seed, greedy)
        samples = [[sample for sample, _ in group] for group in answers]
        return samples, *([tokens for _, tokens in group] for group in answers)


class EngineGroup:
    """All engines; prompts are dealt to them in contiguous parts of equal size."""

    def __init__(self, config: GrpoRunConfig, logs: Path) -> None:
        self._config, self._logs = config, logs
        self.names = [f"engine {index}" for index in range(config.rollout.num_engines)]
        self.engines = [self._new(index) for index in range(config.rollout.num_engines)]
        self._starting = [engine.start.remote() for engine in self.engines]

    def _new(self, index: int) -> Any:
        gpus = self._config.cluster.gpus_per_engine_rank * self._config.rollout.tensor
        return ray.remote(EngineRank).options(num_cpus=0, num_gpus=gpus).remote(self._config, index, str(self._logs))

    def wait(self) -> None:
        """Until every engine has started; they do so while the policy starts.

        Raises:
            ValueError: the model or the budgets do not fit the engine.
        """
        gather(self._starting, self.names)

    def replace_dead(self) -> int:
        """Start another engine in the place of each that has died or says nothing; returns how many.

        It is the same engine to the caller: index, seed and name. It holds no weights.
        """
        answers = settle([engine.alive.remote() for engine in self.engines], ALIVE_S)
        dead = [index for index, answer in enumerate(answers) if answer is not True]
        for index in dead:
            ray.kill(self.engines[index])
            self.engines[index] = self._new(index)
        gather([self.engines[i].start.remote() for i in dead], [self.names[i] for i in dead])
        return len(dead)

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, version: int, seed: int, greedy: bool = False
    ) -> list[Group]:
        bounds = [len(prompts) * i // len(self.engines) for i in range(len(self.engines) + 1)]
        parts = [list(prompts[a:b]) for a, b in zip(bounds, bounds[1:])]
        busy = [i for i, part in enumerate(parts) if part]
        calls = [
            self.engines[i]
            .generate.options(num_returns=1 + len(parts[i]))
            .remote(parts[i], num_samples, version, seed * len(self.engines) + i, greedy)
            for i in busy
        ]
        samples = gather([first for first, *_ in calls], [self.names[i] for i in busy])
        groups = [group for part in samples for group in part]
        payloads = [payload for _, *rest in calls for payload in rest]
        return [Group(*each, version) for each in zip(prompts, groups, payloads, strict=True)]

    def tokens(self, group: Group) -> list[Tokens]:
        """A group's payload, fetched to the driver: for the few answers that people read."""
        return ray.get(group.payload)
