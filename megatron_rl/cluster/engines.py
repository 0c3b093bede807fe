"""vLLM engines as Ray actors; implements `ports.Engine`.

An engine puts the tokens of each group into Ray's object store and returns the reference with a few numbers a
sample; the verifier and the trainer ranks fetch them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from megatron_rl.cluster.session import gather, redirect_output
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.rollout.engine import VllmEngine
from megatron_rl.types import Group, Metrics, Prompt, Sample, Tokens


class EngineRank:
    """One engine, a TP group of vLLM workers, behind an asyncio Ray actor."""

    def __init__(self, config: GrpoRunConfig, index: int, logs: str) -> None:
        redirect_output(Path(logs) / f"engine_{index}.log")
        self.config = config

    async def start(self) -> None:
        config = self.config
        self.engine = VllmEngine(model=config.model, rollout=config.rollout, seed=config.run.seed)
        await self.engine.start()

    async def connect(self, info: dict[str, Any]) -> None:
        await self.engine.init_transfer(info)

    async def receive(self, version: int) -> Metrics:
        return await self.engine.receive(version)

    async def generate(
        self, prompts: list[Prompt], num_samples: int, version: int, seed: int, greedy: bool
    ) -> list[tuple[list[Sample], ray.ObjectRef]]:
        answers = await self.engine.generate(prompts, num_samples, version, seed, greedy)
        return [([sample for sample, _ in group], ray.put([tokens for _, tokens in group])) for group in answers]


class EngineGroup:
    """All engines; prompts are dealt to them in contiguous parts of equal size."""

    def __init__(self, config: GrpoRunConfig, logs: Path) -> None:
        remote = ray.remote(EngineRank)
        rollout, cluster = config.rollout, config.cluster
        self.names = [f"engine {index}" for index in range(rollout.num_engines)]
        self.engines = [
            remote.options(num_cpus=0, num_gpus=cluster.gpus_per_engine_rank * rollout.tensor).remote(
                config, index, str(logs)
            )
            for index in range(rollout.num_engines)
        ]

        self._starting = [engine.start.remote() for engine in self.engines]

    def wait(self) -> None:
        """Until every engine has started; they do so while the policy starts.

        Raises:
            ValueError: the model or the budgets do not fit the engine.
        """
        gather(self._starting, self.names)

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, version: int, seed: int, greedy: bool = False
    ) -> list[Group]:
        bounds = [len(prompts) * i // len(self.engines) for i in range(len(self.engines) + 1)]
        parts = [list(prompts[a:b]) for a, b in zip(bounds, bounds[1:])]
        calls = [
            engine.generate.remote(part, num_samples, version, seed * len(self.engines) + i, greedy)
            for i, (engine, part) in enumerate(zip(self.engines, parts, strict=True))
        ]
        answers = [answer for part in gather(calls, self.names) for answer in part]
        return [Group(p, samples, payload, version) for p, (samples, payload) in zip(prompts, answers, strict=True)]

    def tokens(self, group: Group) -> list[Tokens]:
        """A group's payload, fetched to the driver: for the few answers that people read."""
        return ray.get(group.payload)
