"""One engine, as the process that holds it uses it. `VllmEngine` implements it, and so may a class of your own
(`rollout.backend`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.config.policy import ModelConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.layout import Recording
from megatron_rl.rollout.program import Samples
from megatron_rl.types import Adapters, GroupRequest, Metrics, ModelShape, Phase

if TYPE_CHECKING:
    from megatron_rl.rollout.programs.episodes import MakeAnswers


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
    """The file that gets the tokens of the unfinished answers of `answer`, so that another engine can go on with
    them."""
    shares_gpus: bool = False
    """Whether trainers have the same GPUs, so that `weights.enter` gives them the memory."""
    loads_weights: bool = False
    """Whether `start` loads the weights of the model's folder, as version 0; otherwise the bridge brings them."""
    adapters: Adapters | None = None
    """The adapters that the bridge brings. The engine then loads the base model from the model's folder."""
    keeps_statistics: bool = False
    """Whether vLLM keeps statistics of its steps and requests, which its own metrics are made of."""
    make_answers: MakeAnswers | None = None
    """Makes what carries out the answers, if there is `rollout.environment`."""


class BackendWeights(Protocol):
    """How weights reach an engine. An engine that loads the weights of the model's folder needs `enter` alone."""

    async def enter(self, phase: Phase) -> None:
        """Hold what an engine has in this phase (`types.HOLDS`)."""

    async def record_loading(self, shape: ModelShape) -> tuple[Recording, ...]:
        """The elements of Hugging Face tensors that each rank of the engine holds, and their places."""
        ...

    async def init_transfer(self, info: dict[str, Any]) -> None:
        """Join the bridge.

        Args:
            info: `setup`, the bridge's `BridgeSetup` in JSON's types, and `engine`, the engine's index.
        """

    async def ready(self) -> None:
        """Prepare for a push: after this, every rank of the engine waits for it."""

    async def take(self, version: int, verify: bool) -> list[dict[str, str]]:
        """Take the weights of a push, and wait with answering. Returns the digests of each rank's weights."""
        ...

    async def commit(self, version: int, dispute: str | None) -> Metrics:
        """Answer with the new weights, unless `dispute` says why they are not right."""
        ...


class EngineBackend(Protocol):
    """One engine, which may be several ranks. All methods run in one event loop."""

    @property
    def weights(self) -> BackendWeights: ...

    def __init__(self, spec: EngineSpec) -> None:
        """
        Raises:
            ValueError: the engine cannot serve the model, or the budgets do not fit.
        """

    async def start(self) -> None:
        """
        Raises:
            ValueError: the engine refuses the configuration.
        """

    async def answer(
        self,
        ticket: int,
        asked: GroupRequest,
        samples: range,
        version: int | None = None,
        batch: tuple[int, int] | None = None,
        earlier: Sequence[Path] = (),
    ) -> tuple[Samples, Samples]:
        """Give some of the answers of a group, and their continuations if there are any (`Group.continuations`). With
        `rollout.beams` the answers are thoughts; each thought gives a rollout for each of its beams, the best one
        first.

        Many calls run at once, and pushes may arrive during a call: the answers continue with the new weights, and
        `Tokens.version` gives the version of each token. Each answer goes on as soon as its own request has ended.

        Args:
            ticket: names this asking of the group in `cancel` and in the records. All engines have the same.
            samples: the numbers of the answers within the group.
            version: the version of the weights that the answers begin with. If a push is running, the call waits until
                it ends. None: any.
            batch: the name of calls that begin together, in the order of their arrival, and their number. The first
                ones wait for the last one. None: this call begins alone.
            earlier: the records of the engines that have begun these answers and lost them, in order. The answers go
                on from the tokens in these records, and search their beams from the start. With an environment, whose
                state is lost, they begin again.

        Raises:
            ValueError: the prompt is empty, too long or has tokens outside the vocabulary, or no usable thinking budget
                (see `Budgets.of`), or the engine did not keep it, or it does not hold `version`.
            RuntimeError: the engine holds no weights, the group was cancelled, or a push failed meanwhile, and the
                answers are lost.
        """
        ...

    async def cancel(self, ticket: int) -> None:
        """End the answers of a group. Its call of `answer`, if it is running, ends with an error."""

    @property
    def alive(self) -> bool:
        """Whether the engine works, its ranks included."""

    def close(self) -> None:
        """End the processes of the engine."""
