"""The port of an engine: a `Sampler` gives one completion to one request, and says what it is able to do. `VllmSampler`
implements it, and so may a class of your own (`rollout.backend`). What an answer is made of, such as budgets, beams,
turns and values of passages, stands above the port (`engine.py`).

Invariants (tests/unit/rollout, tests/unit/preflight): a class that writes only `sample` answers with budgets and turns;
a configuration that asks for an ability which the class does not declare is refused before anything starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

from megatron_rl.config.policy import ModelConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.layout import Recording
from megatron_rl.models import read_shape
from megatron_rl.models.vision import vision_of
from megatron_rl.rollout.coroutine import resolve
from megatron_rl.rollout.program import Completion, Request
from megatron_rl.rollout.vocabulary import forbidden_ids, image_tokens, stop_ids
from megatron_rl.types import Adapters, GroupRequest, Metrics, ModelShape, Phase, Vision

if TYPE_CHECKING:
    from megatron_rl.rollout.programs.episodes import MakeAnswers

Result = TypeVar("Result")

Ability = Literal[
    "adapters",
    "candidates",
    "forbid",
    "greedy",
    "images",
    "lag",
    "memory",
    "native_budget",
    "prompt_logp",
    "quantization",
    "ranks",
    "routes",
    "salted",
    "speculation",
    "truncate",
    "weights",
]
"""What a sampler can do beyond `Call.max_tokens` and `Call.stops`:

- forbid: `EngineSpec.forbidden_ids` are never sampled, and log-probs are computed without them.
- images: `Request.pictures`. greedy: `Request.is_greedy`. truncate: `rollout.sampling.top_p` and `top_k`.
- candidates: `Call.num_candidates`. prompt_logp: `Call.num_scored`. native_budget: `Call.thinking_token_budget`.
- weights: `BackendWeights` takes weight syncs. lag: also while requests run, and `Completion.version` tells the tokens
  before a sync from those after it. salted: `rollout.prefix_cache: salted`.
- adapters: `EngineSpec.adapters`. quantization: `rollout.quantization`. routes: `Completion.routes`.
- speculation: `rollout.speculative`.
- ranks: an engine of several ranks, `rollout.parallel`. memory: `BackendWeights.enter` lends the GPUs' memory.
"""


ABILITIES = frozenset(get_args(Ability))


def needed_abilities(config: GrpoRunConfig, trains: bool) -> dict[Ability, str]:
    """The abilities that a configuration asks of its sampler, each with the key that does.

    Args:
        trains: whether trainers bring weights; otherwise the engines answer alone.
    """
    rollout = config.rollout
    sampling, values, thinking = rollout.sampling, rollout.prefix_values, rollout.thinking
    scores = values is not None and values.by == "engine" and values.rollouts is None
    truncated = "top_p" if sampling.top_p < 1 else "top_k" if sampling.top_k else ""
    asked: tuple[tuple[Ability, str, object], ...] = (
        ("weights", "training", trains),
        ("lag", "rollout.max_lag", trains and rollout.overlaps),
        ("greedy", "algorithm.adv_estimator", "greedy_reward" in config.algorithm.adv_estimator.needs),
        ("forbid", "rollout.sampling.forbid", sampling.forbid),
        ("images", "model.path", image_tokens(config.model.path)),
        ("truncate", f"rollout.sampling.{truncated}", truncated),
        ("candidates", "rollout.beams", rollout.beams),
        ("prompt_logp", "rollout.prefix_values", scores),
        ("native_budget", "rollout.thinking.mode", thinking is not None and thinking.mode == "native"),
        ("quantization", "rollout.quantization", rollout.quantization),
        ("salted", "rollout.prefix_cache", rollout.prefix_cache == "salted"),
        ("speculation", "rollout.speculative", rollout.speculative),
        ("ranks", "rollout.parallel", rollout.engine_ranks > 1),
        ("routes", "policy.routing_replay", config.policy.routing_replay),
        ("adapters", "policy.lora", config.served_adapters),
        ("memory", "cluster.colocate", config.cluster.colocate),
    )
    return {ability: key for ability, key, is_asked in asked if is_asked}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is made of."""

    model: ModelConfig
    rollout: RolloutConfig
    seed: int
    """The run's seed. An answer's seed is made of it and of `GroupRequest.seed`."""
    spans_nodes: bool = False
    """Whether the ranks are on several nodes. The process must then be a Ray actor whose placement group has a bundle
    for each rank, because vLLM starts its ranks there as actors."""
    returns_routes: bool = False
    """Whether `Tokens.routes` are given. The model must then have experts."""
    record: Path | None = None
    """The file that gets the tokens of unfinished answers (`progress.py`), so that another engine can go on with them.
    A sampler may leave it out: the answers of an engine that dies then begin again."""
    shares_gpus: bool = False
    """Whether trainers have the same GPUs, so that `weights.enter` gives them the memory."""
    loads_weights: bool = False
    """Whether `start` loads the weights of the model's folder, as version 0; otherwise the bridge brings them."""
    adapters: Adapters | None = None
    """The adapters that the bridge brings. The engine then loads the base model from the model's folder."""
    keeps_statistics: bool = False
    """Whether vLLM keeps statistics of its steps and requests, which its own metrics are made of."""
    trains_tower: bool = False
    """Whether the bridge also brings the vision tower; otherwise the engine loads it from the model's folder."""
    pictures: Path = Path()
    """The folder of the run's images (data/pictures.py)."""
    make_answers: MakeAnswers | None = None
    """Makes what carries out the answers, if there is `rollout.environment`."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return stop_ids(self.model.path)

    @property
    def vision(self) -> Vision | None:
        """How the model sees images; None if it reads text alone."""
        return vision_of(self.model.path)

    @property
    def keeps_weights(self) -> bool:
        """Whether the engine has weights of the model's folder that no push changes: the base model of adapters, or a
        frozen vision tower. A sleeping engine keeps them in the node's memory."""
        return self.adapters is not None or (self.vision is not None and not self.trains_tower)

    @property
    def forbidden_ids(self) -> tuple[int, ...]:
        """The tokens that are never sampled."""
        return forbidden_ids(self.model.path, read_shape(self.model.path).vocab_size, self.rollout)


class BackendWeights:
    """How weights reach a sampler. As it is, the sampler has loaded the folder's weights, and no others come; with the
    ability `weights` a sampler has all methods."""

    version: int | None = 0
    """The version of the weights; None: there is no whole set of them."""

    async def enter(self, phase: Phase) -> None:
        """Hold what an engine has in this phase (`types.HOLDS`)."""

    async def record_loading(self, shape: ModelShape) -> tuple[Recording, ...]:
        """The elements of Hugging Face tensors that each rank of the engine holds, and their places."""
        raise NotImplementedError

    async def init_transfer(self, info: dict[str, Any]) -> None:
        """Join the bridge.

        Args:
            info: `setup`, the bridge's `BridgeSetup` in JSON's types, and `engine`, the engine's index.
        """
        raise NotImplementedError

    async def ready(self) -> None:
        """Prepare for a push: after this, every rank of the engine waits for it."""
        raise NotImplementedError

    async def take(self, version: int, verify: bool) -> list[dict[str, str]]:
        """Take the weights of a push, and wait with answering. Returns the digests of each rank's weights."""
        raise NotImplementedError

    async def commit(self, version: int, dispute: str | None) -> Metrics:
        """Answer with the new weights, unless `dispute` says why they are not right."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """One call of `Engine.answer`, with its arguments."""

    ticket: int
    asked: GroupRequest
    samples: range
    version: int | None
    batch: tuple[int, int] | None


class Sampler:
    """A subclass writes `sample` and `abilities`. The other methods work as they are for a sampler in one event loop.
    One that samples in a thread of its own, as vLLM does, writes `call`, `begin` and `ask`, too: answers then go on in
    this thread, where the last of their completions came."""

    abilities: ClassVar[frozenset[Ability]] = frozenset()
    """What the sampler can do. It must be written as `frozenset({"forbid", ...})`, because a check reads it in the
    source without an import."""
    weights: BackendWeights = BackendWeights()

    def __init__(self, spec: EngineSpec) -> None:
        """
        Raises:
            ValueError: the sampler cannot serve the model.
        """
        self.spec = spec
        self._running: dict[asyncio.Task[Completion], Request] = {}

    async def start(self) -> None:
        """Load the weights of the model's folder, or prepare for those that come (`EngineSpec.loads_weights`).

        Raises:
            ValueError: the sampler refuses the configuration.
        """

    async def sample(self, request: Request) -> Completion:
        """One completion, at `rollout.sampling.temperature`, with log-probs of the full distribution at this
        temperature. It ends with one of `EngineSpec.stop_ids` or of `Call.stops`, or after `Call.max_tokens`. The same
        request and weights give the same tokens, whatever else is sampled. Many calls run at once."""
        raise NotImplementedError

    async def cancel(self, ticket: int) -> None:
        """End the requests of a group."""
        for task in [task for task, one in self._running.items() if one.answer and one.answer[0] == ticket]:
            task.cancel()

    @property
    def alive(self) -> bool:
        """Whether the sampler works, its ranks included."""
        return True

    def failure(self) -> str:
        """Why it does not; empty if nobody knows."""
        return ""

    def close(self) -> None:
        """End the processes of the sampler."""

    @contextmanager
    def answering(self, call: AnswerCall) -> Iterator[None]:
        """Open while the answers of a call are generated."""
        yield

    async def call(self, work: Callable[[], Result]) -> Result:
        """Work where `ask` may be called."""
        return work()

    async def begin(self, call: AnswerCall, work: Callable[[], Result], is_first: bool = True) -> Result:
        """Work where `ask` may be called, when the sampler can answer the call. A sampler whose completions depend on
        what it samples together waits for all calls of the batch, and begins in the order of their arrival.

        Args:
            is_first: whether no earlier answer of an environment goes on.

        Raises:
            ValueError: the sampler does not hold the version of the call.
        """
        held = self.weights.version
        if held is None or call.version not in (None, held):
            raise ValueError(f"version {call.version} was asked for, but the engine holds {held}")
        return work()

    def ask(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        """Begin to sample, and return the future completions."""
        futures: list[Future[Completion]] = [Future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            task = asyncio.ensure_future(self.sample(request))
            self._running[task] = request
            task.add_done_callback(partial(self._ended, future))
        return futures

    def _ended(self, future: Future[Completion], task: asyncio.Task[Completion]) -> None:
        del self._running[task]
        if task.cancelled():
            resolve(future, error=RuntimeError("the group was cancelled"))
        else:
            error = task.exception()
            resolve(future, None if error else task.result(), error)
