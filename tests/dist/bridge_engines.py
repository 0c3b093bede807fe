"""Real vLLM engines, side by side on one event loop, and what their workers hold."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence
from pathlib import Path

from torch import Tensor

from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.config.schema import ModelConfig, RolloutConfig, SamplingConfig
from megatron_rl.layout import Engines
from megatron_rl.rollout.engine import VllmEngine
from megatron_rl.types import Prompt, Tokens


def held(worker) -> dict[str, Tensor]:
    """Called in each of vLLM's workers: its live parameters."""
    return {name: p.detach().clone() for name, p in worker.model_runner.get_model().named_parameters()}


class Fleet:
    """Equal engines of one model, started once and joined anew by every trainer."""

    def __init__(self, folder: Path, engines: Engines, temperature: float) -> None:
        config = RolloutConfig(
            num_engines=engines.num,
            tensor=engines.tensor,
            expert_parallel=engines.expert_parallel,
            prompts_per_step=4,
            samples_per_prompt=2,
            max_prompt_tokens=16,
            max_response_tokens=16,
            delimiter="",
            sampling=SamplingConfig(temperature=temperature),
        )
        self.folder, self.kind = folder, engines
        self._environment, self._loop = dict(os.environ), asyncio.new_event_loop()
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # `held` travels to the workers
        model = ModelConfig(path=folder, dtype="float32")
        self.engines = [VllmEngine(model=model, rollout=config, seed=i) for i in range(engines.num)]
        self._all([engine.start() for engine in self.engines])

    def join(self, setup: BridgeSetup) -> None:
        infos = [{"setup": setup.as_dict(), "engine": i} for i in range(setup.engines.num)]
        self._all([engine.init_transfer(info) for engine, info in zip(self.engines, infos)])

    def receive(self, num: int, version: int) -> None:
        self._all([engine.receive(version) for engine in self.engines[:num]])

    def weights(self, num: int) -> list[dict[str, Tensor]]:
        """Of every rank, engine by engine."""
        ranks = self._all([engine._llm.collective_rpc(held) for engine in self.engines[:num]])
        return [rank for engine in ranks for rank in engine]

    def generate(self, num: int, prompts: Sequence[Prompt], version: int) -> list[Tokens]:
        calls = [engine.generate(prompts, 2, version, seed=version) for engine in self.engines[:num]]
        return [tokens for groups in self._all(calls) for group in groups for _, tokens in group]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        ending = asyncio.all_tasks(self._loop)  # vLLM's output task, which the engine's end has cancelled
        self._loop.run_until_complete(asyncio.wait(ending) if ending else asyncio.sleep(0))
        self._loop.close()
        os.environ.clear()
        os.environ.update(self._environment)

    def _all(self, calls: Sequence[Awaitable]) -> list:
        async def together():
            return await asyncio.gather(*calls)

        return self._loop.run_until_complete(together())
