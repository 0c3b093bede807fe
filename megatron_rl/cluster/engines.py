"""vLLM engines as Ray actors; implements `ports.Engine`.

An engine returns a few numbers a sample, and the tokens of each group as an object that stays in Ray's store; the
verifier and the trainer ranks fetch it there. The driver owns it: it outlives an engine that dies.

Invariants (tests/e2e): an engine that dies while it answers is replaced, and its prompts are asked again; answers are a
function of weights, prompts and seed, so the run's numbers are those of an undisturbed one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from megatron_rl.cluster.process import Location, Process, begin_process, locate
from megatron_rl.cluster.waiting import gather, locate_all, settle, told
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.rollout.engine import VllmEngine
from megatron_rl.types import Group, Metrics, Prompt, Tokens

ALIVE_S = 30.0
"""An engine that does not say in this time that it lives is replaced."""
CLOSE_S = 30.0
"""The longest that engines may take to end before they are ended."""
DEATH_CHECK_S = 1.0
"""How often a call looks whether vLLM's processes still live."""
ATTEMPTS = 3
"""How often a prompt is asked when the engine that had it dies."""

log = logging.getLogger(__name__)


class EngineRank:
    """One engine, a TP group of vLLM workers, behind an asyncio Ray actor: it receives weights while it generates."""

    def __init__(self, config: GrpoRunConfig, index: int, logs: str) -> None:
        begin_process(Path(logs) / f"engine_{index}.log", f"engine {index}")
        self.config = config

    async def locate(self) -> Location:
        return locate()

    async def start(self) -> None:
        config = self.config
        log.info("starting vLLM with %s", config.model.path)
        self.engine = VllmEngine(model=config.model, rollout=config.rollout, seed=config.run.seed)
        await self.engine.start()
        log.info("vLLM is ready")

    async def alive(self) -> bool:
        return self.engine.alive

    async def connect(self, info: dict[str, Any]) -> None:
        await self._unless_dead(self.engine.init_transfer(info))

    async def receive(self, version: int) -> Metrics:
        metrics = await self._unless_dead(self.engine.receive(version))
        log.info("holds version %d, received in %.3f s", version, metrics["seconds"])
        return metrics

    async def generate(
        self, prompts: list[Prompt], num_samples: int, version: int, seed: int, greedy: bool
    ) -> tuple[Any, ...]:
        """The samples of all groups, and then the tokens of each group, which Ray keeps as objects of their own."""
        log.info("version %d: answering %d prompts, %d times each", version, len(prompts), num_samples)
        answers = await self._unless_dead(self.engine.generate(prompts, num_samples, version, seed, greedy))
        num_tokens = sum(sample.length - sample.num_prompt_tokens for group in answers for sample, _ in group)
        log.info("version %d: answered with %d tokens", version, num_tokens)
        samples = [[sample for sample, _ in group] for group in answers]
        return samples, *([tokens for _, tokens in group] for group in answers)

    async def close(self) -> None:
        """End vLLM's processes, which give back what they hold."""
        self.engine.close()

    async def _unless_dead(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The call's result. vLLM leaves some calls without an answer when its engine core dies; this does not."""
        task = asyncio.ensure_future(call)
        while True:
            done, _ = await asyncio.wait([task], timeout=DEATH_CHECK_S)
            if done:
                return task.result()
            if not self.engine.alive:
                task.cancel()
                raise RuntimeError("vLLM's engine core has died")


class EngineGroup:
    """All engines; prompts are dealt to them in contiguous parts of equal size."""

    def __init__(self, config: GrpoRunConfig, logs: Path) -> None:
        """
        Raises:
            ValueError: Ray's nodes have no room for all engines.
        """
        self._config, self._logs = config, logs
        num = config.rollout.num_engines
        self._check_room()
        self.processes = [Process(f"engine {i}", logs / f"engine_{i}.log", self._new(i)) for i in range(num)]
        self.num_replaced = 0
        """Engines that were replaced since the run began."""
        self.bring_weights: Callable[[int], object] | None = None
        """Pushes a version into all engines, replacing dead ones first; the bridge sets it."""
        self._starting: list[ray.ObjectRef] = [engine.start.remote() for engine in self.engines]

    @property
    def engines(self) -> list[Any]:
        return [process.actor for process in self.processes]

    def _check_room(self) -> None:
        """Ray itself would wait for ever."""
        cluster, num = self._config.cluster, self._config.rollout.num_engines
        each = cluster.gpus_per_engine_rank * self._config.rollout.tensor
        trainers = cluster.gpus_per_trainer * self._config.policy.parallel.mesh.world_size
        nodes = [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]]
        if each and (sum(nodes) - trainers < num * each or sum(gpus // each for gpus in nodes) < num):
            raise ValueError(
                f"rollout needs {num} engines x {each:g} GPU, each inside one node, beside {trainers:g} GPU of the "
                f"trainers; Ray's {len(nodes)} nodes have {', '.join(f'{gpus:g}' for gpus in nodes)} GPU. Lower "
                "rollout.num_engines or rollout.tensor, or add nodes"
            )

    def _new(self, index: int) -> Any:
        gpus = self._config.cluster.gpus_per_engine_rank * self._config.rollout.tensor
        return ray.remote(EngineRank).options(num_cpus=0, num_gpus=gpus).remote(self._config, index, str(self._logs))

    def wait(self) -> None:
        """Until every engine has started; they do so while the policy starts.

        Raises:
            ValueError: the model or the budgets do not fit the engine.
            ProcessLost: an engine has not been placed, or not started, in time.
        """
        self._place(self.processes)
        self._finish_start(self._starting, self.processes)

    def _place(self, processes: Sequence[Process]) -> None:
        gpus = self._config.cluster.gpus_per_engine_rank * self._config.rollout.tensor
        locate_all(processes, self._config.cluster.start_timeout_s, f"{gpus:g} GPU in one node")

    def _finish_start(self, calls: Sequence[ray.ObjectRef], processes: Sequence[Process]) -> None:
        gather(calls, processes, "to start vLLM", self._config.cluster.start_timeout_s)

    def replace_dead(self) -> int:
        """Start another engine in the place of each that has died or says nothing; returns how many.

        It is the same engine to the caller: index, seed and name. It holds no weights.
        """
        answers = settle([engine.alive.remote() for engine in self.engines], ALIVE_S)
        dead = [index for index, answer in enumerate(answers) if answer is not True]
        for index in dead:
            process = self.processes[index]
            log.info("%s is replaced", process)
            ray.kill(process.actor)
            process.actor, process.location = self._new(index), None
        replaced = [self.processes[index] for index in dead]
        if replaced:
            calls = [process.actor.start.remote() for process in replaced]
            self._place(replaced)
            self._finish_start(calls, replaced)
        self.num_replaced += len(dead)
        return len(dead)

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, version: int, seed: int, greedy: bool = False
    ) -> list[Group]:
        """See `ports.Engine`.

        Raises:
            ValueError: a prompt does not fit the engine.
            RuntimeError: engines died again and again.
        """
        num = len(self.processes)
        bounds = [len(prompts) * i // num for i in range(num + 1)]
        parts = {i: list(prompts[a:b]) for i, (a, b) in enumerate(zip(bounds, bounds[1:])) if b > a}
        answered: dict[int, list[Group]] = {}
        for attempt in range(ATTEMPTS):
            asked = {i: part for i, part in parts.items() if i not in answered}
            failures = self._ask(asked, answered, (num_samples, version, seed, greedy))
            if not failures:
                return [group for i in parts for group in answered[i]]
            self._reject_what_no_other_engine_mends(failures)
            for i, error in failures.items():
                log.warning("version %d: %s", version, told(error, self.processes[i]))
            assert self.bring_weights is not None, "the bridge is there before the first answer is asked"
            self.bring_weights(version)
        i, error = next(iter(failures.items()))
        raise told(error, self.processes[i]) from error

    def _ask(
        self, parts: dict[int, list[Prompt]], answered: dict[int, list[Group]], how: tuple[int, int, int, bool]
    ) -> dict[int, RayError]:
        """Ask these engines, and fill in what they answer; returns the errors of the others, by engine."""
        num_samples, version, seed, greedy = how
        calls = {
            i: self.processes[i]
            .actor.generate.options(num_returns=1 + len(part))
            .remote(part, num_samples, version, seed * len(self.processes) + i, greedy)
            for i, part in parts.items()
        }
        outcomes = settle([first for first, *_ in calls.values()], self._config.cluster.step_timeout_s)
        failures: dict[int, RayError] = {}
        for (i, (_, *payloads)), samples in zip(calls.items(), outcomes, strict=True):
            if isinstance(samples, RayError):
                failures[i] = samples
            else:
                answered[i] = [Group(*each, version) for each in zip(parts[i], samples, payloads, strict=True)]
        return failures

    def _reject_what_no_other_engine_mends(self, failures: dict[int, RayError]) -> None:
        """An engine that raised and still lives was asked something wrong."""
        alive = settle([self.processes[i].actor.alive.remote() for i in failures], ALIVE_S)
        for (i, error), lives in zip(failures.items(), alive, strict=True):
            if lives is True and not isinstance(error, TimeoutError):
                raise told(error, self.processes[i]) from error
            if lives is True:  # it has not answered in time: it is taken for dead
                ray.kill(self.processes[i].actor)

    def tokens(self, group: Group) -> list[Tokens]:
        """A group's payload, fetched to the driver: for the few answers that people read."""
        return ray.get(group.payload, timeout=self._config.cluster.step_timeout_s)

    def close(self) -> None:
        """End all engines that have started; the others, and what does not end in time, are left to Ray."""
        started, _ = ray.wait(self._starting, num_returns=len(self._starting), timeout=0)
        ready = [e for e, start in zip(self.engines, self._starting, strict=True) if start in started]
        settle([engine.close.remote() for engine in ready], CLOSE_S)
