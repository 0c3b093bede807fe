"""Real vLLM engines, each in a process of its own, and what their workers hold."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import asking
import leaks
import warm
from patience import deadline
from torch import Tensor
from vllm_workers import called_in_workers

from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.config.policy import ModelConfig
from megatron_rl.config.rollout import RolloutConfig, SamplingConfig
from megatron_rl.layout import Engines, Recording
from megatron_rl.rollout.backend import EngineSpec
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.vllm_sampler import VllmSampler
from megatron_rl.types import Adapters, ModelShape, Prompt, Tokens


def held(worker) -> dict[str, Tensor]:
    """Called in each of vLLM's workers: its live parameters, without those that vLLM makes of others."""
    named = worker.model_runner.get_model().named_parameters()
    return {name: p.detach().clone() for name, p in named if not name.endswith((".W_UK_T", ".W_UV"))}


def of(engine: Engine, method: str) -> Any:
    if method == "generate":
        return partial(asking.generate, engine)
    return getattr(engine.weights, method, None) or getattr(engine, method)


def serve(pipe: Connection, options: dict[str, Any]) -> None:
    """Do what the pipe asks of one engine, until it closes. An error is an answer too."""
    engine = Engine(EngineSpec(**options), VllmSampler)
    with asyncio.Runner() as runner:
        while True:
            try:
                method, *arguments = pipe.recv()
            except EOFError:
                break
            if method in ("held", "compute_weight_checksums"):
                call = called_in_workers(engine, held if method == "held" else method)
            else:
                call = of(engine, method)(*arguments)
            try:
                pipe.send(runner.run(call))
            except (RuntimeError, ValueError) as error:
                pipe.send(error)
    engine.close()


class Fleet:
    """Equal engines of one model, started once and joined again by every trainer."""

    def __init__(
        self,
        folder: Path,
        engines: Engines,
        temperature: float,
        dtype: str = "float32",
        max_response_tokens: int = 16,
        returns_routes: bool = False,
        adapters: Adapters | None = None,
        quantization: str | None = None,
    ) -> None:
        config = RolloutConfig(
            num_engines=engines.num,
            parallel={
                "tensor": engines.tensor,
                "pipeline": engines.pipeline,
                "expert": engines.tensor if engines.expert_parallel else 1,
            },
            prompts_per_step=4,
            samples_per_prompt=2,
            max_prompt_tokens=16,
            max_response_tokens=max_response_tokens,
            delimiter="",
            quantization=quantization,
            sampling=SamplingConfig(temperature=temperature),
        )
        self.folder, self.kind = folder, engines
        options = dict(model=ModelConfig(path=folder, dtype=dtype), rollout=config, returns_routes=returns_routes)
        options |= dict(adapters=adapters)
        context = warm.context()
        self._pipes, self._processes = [], []
        with leaks.lasting("module"):
            for seed in range(engines.num):
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(theirs, options | {"seed": seed}))
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            self._all([("start",)] * engines.num)

    def record(self, shape: ModelShape) -> tuple[Recording, ...]:
        """What the ranks of the first engine hold."""
        return self._all([("record_loading", shape)])[0]

    def join(self, setup: BridgeSetup) -> None:
        infos = [{"setup": setup.as_dict(), "engine": i} for i in range(setup.engines.num)]
        self._all([("init_transfer", info) for info in infos])

    def receive(self, num: int, version: int) -> None:
        self._all([("receive", version)] * num)

    def weights(self, num: int) -> list[dict[str, Tensor]]:
        """Of every rank, engine by engine."""
        return [rank for engine in self._all([("held",)] * num) for rank in engine]

    def checksums(self) -> list[dict[str, str]]:
        """Of every rank of the first engine, the digest of every tensor that it computes with."""
        return self._all([("compute_weight_checksums",)])[0]

    def generate(self, num: int, prompts: Sequence[Prompt], version: int) -> list[Tokens]:
        answers = self._all([("generate", prompts, 2, version, version)] * num)
        return [tokens for groups in answers for group in groups for _, tokens in group]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()

    def _all(self, calls: Sequence[tuple]) -> list:
        """Ask the first engines, all at once."""
        pipes = self._pipes[: len(calls)]
        for pipe, call in zip(pipes, calls, strict=True):
            pipe.send(call)
        answers = []
        for pipe in pipes:
            assert pipe.poll(deadline(240)), "an engine does not answer"
            answers.append(pipe.recv())
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers
