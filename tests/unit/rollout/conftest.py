from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import asking
import leaks
import pytest
import warm
from tiny_trainers import TinyTrainers, write_model

from megatron_rl.bridge import join
from megatron_rl.config.policy import ModelConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.layout import Engines
from megatron_rl.models import read_shape
from megatron_rl.rollout.programs.episodes import Samples
from megatron_rl.types import Adapters, LatentAttention, Mesh

CACHE_TOKENS = 2**17
"""The size of the KV cache. vLLM's smallest one on a CPU has a GiB, which costs more to fill with zeros than a test."""


class Stage:
    """An engine and the trainers that push weights into it. All calls are awaited on one event loop."""

    living: list[Stage] = []
    """One at most. vLLM's parallel groups and its forward context are globals, and the end of an engine, even of one
    whose ranks are other processes, destroys the groups of the process in which it was started."""

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        dtype: str = "float32",
        record: Path | None = None,
        shares_gpus: bool = False,
        returns_routes: bool = False,
        answers: Callable[[RolloutConfig], Any] = lambda rollout: None,
        vllm: dict[str, Any] | None = None,
        adapters: Adapters | None = None,
        **rollout,
    ) -> None:
        """
        Args:
            adapters: what the trainers push; the engine then has the folder's weights.
            vllm: `rollout.vllm`, besides the size of the cache.
        """
        from megatron_rl.rollout.backend import EngineSpec
        from megatron_rl.rollout.engine import Engine
        from megatron_rl.rollout.vllm_sampler import VllmSampler

        assert not self.living, "another engine lives"
        block = 128 if isinstance(read_shape(folder).attention, LatentAttention) else 32
        options = {"num_gpu_blocks_override": CACHE_TOKENS // block} | (vllm or {})
        self.config = RolloutConfig(prompts_per_step=8, samples_per_prompt=4, vllm=options, **rollout)
        parallel = self.config.parallel
        engines = Engines(1, parallel.tensor, parallel.pipeline, parallel.expert_parallel)
        self._trained = folder, mesh, engines, dtype
        drafts = self.config.speculative is not None and self.config.speculative.kind == "multi_token"
        pushed = replace(read_shape(folder), adapters=adapters, multi_token=drafts)
        is_told = pushed != read_shape(folder)  # the engine tells what it holds
        if not is_told:
            self.trainers = TinyTrainers(*self._trained)
        spec = EngineSpec(
            model=ModelConfig(path=folder, dtype=dtype),
            rollout=self.config,
            seed=0,
            record=record,
            returns_routes=returns_routes,
            shares_gpus=shares_gpus,
            adapters=adapters,
            make_answers=answers(self.config),
        )
        self.engine = Engine(spec, VllmSampler)
        self._loop = asyncio.new_event_loop()
        self.living.append(self)
        # vLLM collects garbage several times while it starts, and need not look each time at all that tests have
        # imported. It thaws everything when the engine ends.
        gc.collect()
        gc.freeze()
        self.run(self.engine.start())
        if is_told:
            self._trained = *self._trained, pushed, self.run(self.engine.weights.record_loading(pushed))
            self.trainers = TinyTrainers(*self._trained)
        self._join()

    def run(self, awaitable: Awaitable):
        assert self in self.living, "another stage has taken the place of this one"
        return self._loop.run_until_complete(awaitable)

    def _join(self) -> None:
        self.run(self.engine.weights.init_transfer(self.trainers.info))

    def rejoin(self, **changes) -> None:
        """Join the bridge again, with these changes of its setup."""
        self.trainers.rejoin(**changes)
        self._join()

    def restart_trainers(self) -> None:
        """Other trainers take the place of these, as after the loss of one."""
        self.trainers.close()
        with leaks.lasting("module"):
            self.trainers = TinyTrainers(*self._trained)
        self._join()

    def push(self, folder: Path, version: int):
        self.trainers.begin_push(folder, version)
        metrics = self.run(self.engine.weights.receive(version))
        return metrics, self.trainers.end_push()

    def load(self, folder: Path) -> int:
        """Push the weights of a folder as the next version, and return its number."""
        version = (self.engine.weights.version or 0) + 1
        self.push(folder, version)
        return version

    def generate(self, *args, **keys) -> Awaitable[list[Samples]]:
        """See `asking.generate`."""
        return asking.generate(self.engine, *args, **keys)

    def answer(self, *args, **keys) -> Awaitable[Samples]:
        """See `asking.answer`."""
        return asking.answer(self.engine, *args, **keys)

    def left_behind(self) -> list[str]:
        """What tests have left in the engine; afterwards it is gone. The prefix cache is emptied, which shows whether
        anything holds a block of the KV cache."""
        thread, weights = self.engine.sampler._thread, self.engine.weights
        if not thread.alive:
            return ["a failure of vLLM"]

        def look_and_end() -> list[str]:
            requests, scheduler = thread.requests, thread.engine.engine_core.engine_core.scheduler
            numbers = {
                "requests in the queue": len(requests),
                "answers without an end": len(requests._unresolved),
                "requests in vLLM's scheduler": len(scheduler.requests),
                "a pause": thread.paused,
                "calls put off by a pause": len(thread._deferred),
                f"the phase {weights._phase}": weights._phase != "generating",
            }
            thread.paused = False
            requests.abort(thread.engine, "its test has ended")
            thread.engine.reset_prefix_cache()
            pool = scheduler.kv_cache_manager.block_pool
            # One block is vLLM's own.
            numbers["held blocks of the KV cache"] = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
            return [f"{what} ({int(number)})" for what, number in numbers.items() if number]

        return self.run(thread.call(look_and_end, while_paused=True, drained=True))

    def close(self) -> None:
        if self in self.living:
            self.living.remove(self)
            self.engine.close()
            self.trainers.close()
            self._loop.close()


@contextmanager
def _making_stages() -> Iterator[Callable[..., Stage]]:
    """Makes stages, of which each takes the place of the one before it. At the end the last one is closed, and the
    environment variables are restored."""
    environment = dict(os.environ)
    warm.warm_engines()
    with leaks.lasting():
        join._gloo_device()  # a process keeps the one that its engine of one rank makes

    def make(folder: Path, mesh: Mesh, **options) -> Stage:
        for before in [*Stage.living]:
            before.close()
        return Stage(folder, mesh, **options)

    try:
        yield make
    finally:
        for stage in [*Stage.living]:
            stage.close()
        os.environ.clear()
        os.environ.update(environment)


@pytest.fixture(scope="module")
def make_stage() -> Iterator[Callable[..., Stage]]:
    """For a stage that several tests of a module use, one after the other. A test that ends its engine closes the
    stage, too."""
    with _making_stages() as make:
        yield make


@pytest.fixture
def make_own_stage() -> Iterator[Callable[..., Stage]]:
    """For the stage of a single test. Such tests are behind those that share the stage of a module."""
    with _making_stages() as make:
        yield make


@pytest.fixture(autouse=True)
def engines_are_left_clean(request) -> Iterator[None]:
    """A test that leaves something in an engine that others use fails by name."""
    yield
    for stage in Stage.living:
        left = stage.left_behind()
        assert not left, f"{request.node.nodeid} leaves in its engine: {', '.join(left)}"


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Two models that differ only in their weights."""
    base = tmp_path_factory.mktemp("models")
    return write_model(base / "a", seed=1), write_model(base / "b", seed=2)
