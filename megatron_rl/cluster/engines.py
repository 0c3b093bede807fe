"""vLLM engines as Ray actors. `stream.py` asks them.

An engine returns a few numbers per sample. The tokens are objects in Ray's store, from where verifiers and trainer
ranks fetch them. The driver owns the objects, so they outlive an engine that dies.

Invariant (tests/e2e): an engine that dies is replaced by one with its index, seed and name.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from megatron_rl import spans
from megatron_rl.cluster.environments import RemoteSessions
from megatron_rl.cluster.nodes import RayPlacement
from megatron_rl.cluster.payloads import fetch, objects_of
from megatron_rl.cluster.process import Location, Process, begin_process, locate
from megatron_rl.cluster.process_trace import TracedProcess
from megatron_rl.cluster.restarts import Restarts
from megatron_rl.cluster.waiting import explain, gather, locate_all, settle
from megatron_rl.config.environment import AgentEnvironment
from megatron_rl.config.function import load_function
from megatron_rl.config.observe import PrometheusEndpoint
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.config.teachers import rollout_of_engines
from megatron_rl.data.encode import chat_text, plain_ids
from megatron_rl.data.tokenizer import open_tokenizer
from megatron_rl.environments import Sessions
from megatron_rl.layout import Recording
from megatron_rl.processes import starting
from megatron_rl.rollout.backend import EngineSpec, Sampler
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.programs.agents import Agents
from megatron_rl.rollout.programs.chat_template import call_format_of, chat_template
from megatron_rl.rollout.programs.episodes import Episodes, MakeAnswers
from megatron_rl.rollout.programs.turns import Turns
from megatron_rl.rollout.progress import remove_records
from megatron_rl.types import Group, GroupRequest, Metrics, ModelShape, Phase, Tokens

ALIVE_S = 30.0
"""An engine that does not answer within this time whether it is alive is replaced."""
CLOSE_S = 30.0
"""The time that engines get to shut down before Ray kills them."""
MAX_CALLS = 2**20
"""The calls of an engine that Ray runs at once: weights must get through, even if very many answers are running."""
ATTEMPTS = 3
"""How often a prompt is asked at most if its engine dies."""

log = logging.getLogger(__name__)


class ScoringJob(NamedTuple):
    """A group that a teacher scores."""

    payload: Sequence[Any]
    num_prompt_tokens: int
    prompt: str | Sequence[Mapping[str, Any]] | None
    """The teacher's own prompt, in place of the samples'; None: the samples'."""


class EngineRank(TracedProcess):
    """One engine, which is a group of vLLM workers, in an asyncio Ray actor: it can receive weights while it
    generates."""

    def __init__(
        self, config: GrpoRunConfig, name: tuple[str, int], logs: str, spans_nodes: bool, record: str, loads: bool
    ) -> None:
        """
        Args:
            name: its role and its index.
            loads: whether it loads the weights of the model's folder.
        """
        (role, self.index), self.logs, loads_weights = name, Path(logs), loads
        self.name = f"{role} {self.index}"
        begin_process(log_of(self.logs, role, self.index), self.name)
        self._scoring = asyncio.Lock()
        self.config, self.spans_nodes, self.record, self.loads_weights = config, spans_nodes, record, loads_weights

    async def locate(self) -> Location:
        return locate()

    async def start(self) -> None:
        config = self.config
        log.info("starting the engine with %s", config.model.path)
        if self.spans_nodes:  # otherwise vLLM sorts the bundles by the ids of their nodes
            os.environ["VLLM_RAY_BUNDLE_INDICES"] = ",".join(map(str, range(config.rollout.engine_ranks)))
        with starting():
            spec = EngineSpec(
                model=config.model,
                rollout=rollout_of_engines(config),
                seed=config.run.seed,
                spans_nodes=self.spans_nodes,
                returns_routes=config.policy.routing_replay,
                record=Path(self.record),
                shares_gpus=config.cluster.colocate,
                loads_weights=self.loads_weights,
                make_answers=self._make_answers(),
                trains_tower=config.policy.vision_tower == "trained",
                pictures=config.pictures_folder,
                adapters=config.served_adapters,
                keeps_statistics=self._endpoint is not None,
            )
            self.engine = Engine(spec, sampler_of(config.rollout))
            await self.engine.start()
        if self._endpoint is not None:
            from megatron_rl.observe.prometheus import serve_engine

            try:
                serve_engine(self._endpoint, self.index)
            except OSError as error:  # no reason to end a run; Prometheus shows that its target is away
                log.warning("observe: vLLM's metrics are not served: %s", error)
        log.info("the engine is ready")

    @property
    def _endpoint(self) -> PrometheusEndpoint | None:
        """What serves vLLM's own metrics, if the run wants it."""
        found = (section for section in self.config.observe if isinstance(section, PrometheusEndpoint))
        return next((section for section in found if section.engines), None)

    def _make_answers(self) -> MakeAnswers | None:
        config, rollout = self.config, self.config.rollout
        if rollout.environment is None:
            return None
        render = chat_template(config.model.path, config.data.chat_template)
        form = call_format_of(config.model.path, rollout.environment, render)
        if isinstance(rollout.environment, AgentEnvironment):
            return partial(Agents, config.model.path, rollout, render, form)
        sessions: Sessions | RemoteSessions = Sessions(rollout.environment, rollout.delimiter, form)
        if rollout.environment.processes:
            sessions = RemoteSessions(rollout.environment, rollout.delimiter, form, self.logs, self.name)
        return partial(Episodes, Turns(config.model.path, rollout, render, sessions.new, form, config.pictures_folder))

    async def alive(self) -> bool | str:
        """Whether the engine works; if not, its failure, as far as it is known."""
        return self.engine.alive or self.engine.failure()

    async def enter(self, phase: Phase) -> None:
        start = time.perf_counter()
        await self.engine.weights.enter(phase)
        log.info("entered the phase %s in %.3f s", phase, time.perf_counter() - start)

    async def record_loading(self, shape: ModelShape) -> tuple[Recording, ...]:
        start = time.perf_counter()
        recorded = await self.engine.weights.record_loading(shape)
        log.info("showed the bridge how it loads weights, in %.3f s", time.perf_counter() - start)
        return recorded

    async def connect(self, setup: dict[str, Any], index: int) -> None:
        await self.engine.weights.init_transfer({"setup": setup, "engine": index})

    async def ready(self) -> None:
        await self.engine.weights.ready()

    async def take(self, version: int, verify: bool) -> list[dict[str, str]]:
        start = time.perf_counter()
        with spans.span("take weights", version):
            digests = await self.engine.weights.take(version, verify)
        log.info("took version %d in %.3f s", version, time.perf_counter() - start)
        return digests

    async def commit(self, version: int, dispute: str | None) -> Metrics:
        with spans.span("commit weights", version):
            metrics = await self.engine.weights.commit(version, dispute)
        log.info("answers with version %d", version)
        return metrics

    async def answer(
        self,
        ticket: int,
        asked: GroupRequest,
        samples: range,
        version: int | None,
        batch: tuple[int, int],
        earlier: list[str],
    ) -> tuple[Any, ...]:
        """Some of the answers of a group and their continuations (`asked.Answered`), and the objects with their tokens
        (`payloads.objects_of`), which become separate objects in Ray's store."""
        given = await self.engine.answer(ticket, asked, samples, version, batch, [*map(Path, earlier)])
        tokens = [one for part in given for _, one in part]
        counts, objects = objects_of(tokens, len(samples), self.config.policy.routing_replay)
        return (*([rollout for rollout, _ in part] for part in given), counts), *objects

    async def score(self, jobs: Sequence[ScoringJob]) -> tuple[int, list[np.ndarray]]:
        """The log-probs of all actions of groups, as their teacher: the number of tokens, and `Tokens.logp_teacher` of
        each sample. The calls of an engine follow each other, so that the tokens that are computed together, and with
        them the rounding, do not depend on the time when a group is complete."""
        tokens = await asyncio.to_thread(fetch, [one for job in jobs for one in job.payload])
        remaining, texts = iter(tokens), list[tuple[Sequence[int], int]]()
        for job in jobs:
            before = None if job.prompt is None else self._ids_of(job.prompt)
            for one in islice(remaining, len(job.payload)):
                own = one.ids.tolist()
                text = own if before is None else [*before, *own[job.num_prompt_tokens :]]
                texts.append((text, len(own) - int(one.action_mask.argmax()) if one.action_mask.any() else 0))
        async with self._scoring:
            found = iter(await self.engine.score([text for text in texts if text[1]]))
        scores = [np.zeros(len(one.ids), np.float32) for one in tokens]
        for score, one, (_, size) in zip(scores, tokens, texts, strict=True):
            if size:
                score[-size:] = np.where(one.action_mask[-size:], next(found), 0)
        return sum(size for _, size in texts), scores

    def _ids_of(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a prompt, which is text or chat turns."""
        tokenizer = open_tokenizer(self.config.model.path)
        if not isinstance(prompt, str):
            prompt = chat_text(tokenizer, prompt, True, self.config.data.chat_template)
        return plain_ids(tokenizer, prompt)

    async def cancel(self, ticket: int) -> None:
        await self.engine.cancel(ticket)

    async def close(self) -> None:
        """End vLLM's processes, so that they free their resources."""
        self.engine.close()


def log_of(logs: Path, role: str, index: int) -> Path:
    """The log of an engine."""
    return logs / f"{role.replace(' ', '_')}_{index}.log"


def sampler_of(rollout: RolloutConfig) -> Callable[[EngineSpec], Sampler]:
    """The class of the engines' samplers.

    Raises:
        ValueError: there is no such class.
    """
    if rollout.backend is not None:
        return load_function(rollout.backend)
    from megatron_rl.rollout.vllm_sampler import VllmSampler

    return VllmSampler


class EngineGroup:
    """All engines.

    Args:
        loads_weights: whether the engines load the weights of the model's folder, as version 0. Otherwise a bridge must
            bring them.
    """

    role: str = "engine"
    rank: type[EngineRank] = EngineRank
    records = "unfinished"
    """The folder of the records of unfinished answers."""

    def __init__(
        self,
        config: GrpoRunConfig,
        logs: Path,
        placement: RayPlacement,
        restarts: Restarts,
        loads_weights: bool = False,
    ) -> None:
        self._config, self._logs, self._placement, self._restarts = config, logs, placement, restarts
        self.deadlines = placement.deadlines
        self.loads_weights = loads_weights
        num = config.rollout.num_engines
        self._records = logs.parent / self.records
        remove_records(self._records)
        self.record_of: dict[int, str] = {}
        """The file where each engine, by its index, records the tokens of its unfinished answers."""
        self.processes = [Process(f"{self.role} {i}", log_of(logs, self.role, i), self._new(i)) for i in range(num)]
        self.num_replaced = 0
        """The number of engines that were replaced since the run began."""
        self.bring_weights: Callable[[int], object] = self._start_again if loads_weights else _no_bridge
        """Replaces dead engines and pushes a version into all engines; the bridge sets it."""
        self.before: Callable[[], object] = lambda: None
        """Brings the run into the phase in which they answer, if they share GPUs; the colocation sets it."""
        self._starting = self._begin()

    @property
    def engines(self) -> list[Any]:
        return [process.actor for process in self.processes]

    def _new(self, index: int) -> Any:
        options = self._placement.group_options(self.role, index) | {"max_concurrency": MAX_CALLS}
        spans_nodes = self._placement.spans_nodes(self.role, index)
        self.record_of[index] = str(self._records / f"engine_{index}_{secrets.token_hex(4)}.tokens")
        name, record = (self.role, index), self.record_of[index]
        arguments = (self._config, name, str(self._logs), spans_nodes, record, self.loads_weights)
        return ray.remote(self.rank).options(**options).remote(*arguments)

    def _begin(self) -> list[ray.ObjectRef]:
        return [self._start(index) for index in range(len(self.processes))]

    def _start(self, index: int) -> ray.ObjectRef:
        return self.engines[index].start.remote()

    def wait(self) -> None:
        """Wait until every engine has started. They start while the policy starts.

        Raises:
            ValueError: the model or the budgets do not fit the engine.
            ProcessLost: an engine was not placed or did not start in time.
        """
        self.locate()
        gather(self._starting, self.processes, "to start vLLM", self._config.cluster.start_timeout_s)

    def locate(self) -> None:
        """Wait until every engine's process has begun; it does not wait for vLLM."""
        gpus = self._config.cluster.gpus_per_engine_rank * self._config.rollout.engine_ranks
        locate_all(self.processes, self._config.cluster.start_timeout_s, f"{gpus:g} GPU")

    def enter(self, phase: Phase) -> None:
        """Make all engines that live enter a phase. A dead one holds no memory, and is replaced later. One that does
        not answer, or whose vLLM has failed, is killed, because it may hold what trainers are about to take.

        Raises:
            RuntimeError: an engine that works could not enter the phase.
        """
        calls = [engine.enter.remote(phase) for engine in self.engines]
        part = f"to enter the phase {phase}"
        self.deadlines.begin(part)
        outcomes = settle(calls, self.deadlines.limit_s(part))
        self.deadlines.end(part)
        for index, (process, outcome) in enumerate(zip(self.processes, outcomes, strict=True)):
            if isinstance(outcome, RayActorError) or not isinstance(outcome, RayError):
                continue
            error = explain(outcome, process)
            if not isinstance(outcome, GetTimeoutError) and not self.is_dead(index):
                raise error from outcome
            log.warning("%s does not enter the phase %s, and is killed: %s", process, phase, error)
            ray.kill(process.actor)

    def _start_again(self, version: int) -> None:
        """What brings weights where no bridge does: the engines load them."""
        self.replace_dead()

    def replace_dead(self) -> int:
        """Start a new engine for each one that has died or does not answer, and return their number.

        A new engine has the index, seed and name of the old one. It holds no weights unless it loads them. If the old
        engine's node is gone, it goes to another one.

        Raises:
            ValueError: no node that lives has room for it.
        """
        answers = settle([engine.alive.remote() for engine in self.engines], ALIVE_S)
        dead = [index for index, answer in enumerate(answers) if answer is not True]
        if dead:
            said = next((answer for answer in answers if isinstance(answer, str) and answer), "")
            lost = f"{self.role} {', '.join(map(str, dead))} died or does not answer"
            self._restarts.spend(f"{lost}: {said}" if said else lost, lasts=bool(said))
        for index in dead:
            log.info("%s is replaced", self.processes[index])
            ray.kill(self.processes[index].actor)
        if dead:
            self.before()  # vLLM starts on GPUs where nobody else works
            replaced = {index: self.processes[index] for index in dead}
            timeout_s = self._config.cluster.start_timeout_s
            try:
                self._placement.start_again(self.role, replaced, self._new, timeout_s)
                calls = [self._start(index) for index in replaced]
                gather(calls, list(replaced.values()), "to start vLLM", timeout_s)
            except BaseException:  # also a stop, which saves: nobody may wait for memory until vLLM has started
                for process in replaced.values():
                    ray.kill(process.actor)
                raise
        self.num_replaced += len(dead)
        return len(dead)

    def answered(self) -> None:
        """Note that answers came: what is lost from now on is lost for a reason of its own."""
        self._restarts.progressed()

    def is_dead(self, index: int) -> bool:
        """Whether an engine has died or does not answer."""
        return settle([self.engines[index].alive.remote()], ALIVE_S) != [True]

    def tokens(self, group: Group, with_routes: bool = False) -> list[Tokens]:
        """See `ports.Stream`."""
        return fetch(group.payload, self.deadlines.limit_s("to send tokens"), with_routes)

    def close(self) -> None:
        """End all engines that have started. Ray kills the others, and engines that do not end in time."""
        started = ray.wait(self._starting, num_returns=len(self._starting), timeout=0)[0] if self._starting else []
        ready = [e for e, start in zip(self.engines, self._starting, strict=False) if start in started]
        settle([engine.close.remote() for engine in ready], CLOSE_S)
        remove_records(self._records)


def _no_bridge(version: int) -> None:
    raise RuntimeError("the bridge must be created before answers are asked for")
