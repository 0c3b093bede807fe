"""The weights of an engine: which version it holds, how it takes another one, and who has their memory meanwhile.

A push has two halves. `take` receives the weights and pauses the engine; `commit` lets it go on with them. In between
the driver learns whether all ranks of all engines hold the same, so that no engine samples with weights that another
one disputes. Invariants (tests/unit/rollout): between the halves no token is sampled; a push that fails leaves an
engine that refuses to answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from megatron_rl.layout import Recording
from megatron_rl.rollout.backend import BackendWeights, EngineSpec
from megatron_rl.rollout.drafts import Drafts
from megatron_rl.rollout.engine_thread import EngineThread, Result
from megatron_rl.rollout.progress import Progress
from megatron_rl.types import HOLDS, Metrics, ModelShape, Phase


class EngineWeights(BackendWeights):
    """The asynchronous methods are called from outside, the others in the engine's thread."""

    def __init__(
        self,
        thread: EngineThread,
        spec: EngineSpec,
        progress: Progress | None,
        drafts: Drafts | None = None,
    ) -> None:
        self._thread, self._spec, self._progress, self._drafts = thread, spec, progress, drafts
        self.works: Phase = "scoring" if spec.loads_weights else "generating"
        """The phase in which it answers, and begins."""
        self._phase: Phase = self.works
        self._holds = HOLDS["teacher" if spec.loads_weights else "engine"]
        self.version: int | None = None
        """None: the engine holds no whole set of weights."""
        self._failure = ""
        """Why the engine holds no version; empty before the first push."""
        self._pinned: set[tuple[int, int]] = set()
        """The answers of the pinned version, by ticket and number."""
        self._pinned_version: int | None = None
        self._taken: tuple[int, float] | None = None
        """The version that was taken and waits for `commit`, and when the requests were paused for it; 0 if none
        ran."""

    async def _call(self, function: Callable[[], Result]) -> Result:
        return await self._thread.call(function, while_paused=True, drained=True)

    async def enter(self, phase: Phase) -> None:
        """Give up the GPUs' memory that the phase does not need, and take back what it needs. The calls whose answers
        are under way end with an error; a run that stops or fails does so, to save its state. After `training` the
        policy's engines need a push. A teacher keeps its weights in the node's memory, and so do the policy's engines
        while a teacher scores.
        """
        await self._call(partial(self._enter, phase))

    def _enter(self, phase: Phase) -> None:
        assert self._spec.shares_gpus, "the engine has its GPUs for itself"
        engine, awake = self._thread.engine, set(self._holds[self._phase])
        if awake - set(self._holds[phase]):
            self._thread.requests.abort(engine, f"the answer ended, because the engine entered the phase {phase}")
            # vLLM gives up everything at once, or nothing for good.
            keeps = self._spec.loads_weights or phase == "scoring"
            engine.sleep(level=1 if keeps or self._spec.keeps_weights else 2)
            awake = set()
            if not keeps:
                self.version, self._failure = None, "its memory was lent to the trainers"
        for tag in self._holds[phase]:
            if tag not in awake:
                engine.wake_up([tag])
        self._phase = phase

    def require(self, phase: Phase) -> None:
        """
        Raises:
            RuntimeError: others have memory that the engine needs in this phase.
        """
        missing = set(self._holds[phase]) - set(self._holds[self._phase])
        if missing:
            raise RuntimeError(
                f"the engine is in the phase {self._phase}, in which others have the memory of its "
                f"{' and '.join(sorted(missing))}; it must enter the phase {phase} first"
            )

    def require_version(self, version: int | None) -> None:
        """
        Args:
            version: the version that the engine must hold; None: any.

        Raises:
            ValueError: it holds another version, or none.
            RuntimeError: it holds none.
        """
        if version is None:
            if self.version is None:
                raise RuntimeError(self.lost)
        elif version != self.version:
            held = f"version {self.version}" if self.version is not None else "no whole set of weights"
            reason = f" ({self._failure})" if self.version is None and self._failure else ""
            raise ValueError(f"version {version} was asked for, but the engine holds {held}{reason}; push first")

    @property
    def lost(self) -> str:
        """The error of answers that need weights which a push has broken."""
        return f"{self._failure}; the answers that were under way are lost"

    async def record_loading(self, shape: ModelShape) -> tuple[Recording, ...]:
        """What each rank of the engine holds of a checkpoint, as vLLM's loaders show it.

        Raises:
            ValueError: a loader of vLLM computes with weights, or rearranges them.
        """
        call = partial(self._thread.engine.collective_rpc, "record_loading", args=(shape,))
        answers = await self._call(call)
        for error in filter(lambda answer: isinstance(answer, str), answers):
            raise ValueError(error)
        return tuple(answers)

    async def init_transfer(self, info: dict[str, Any]) -> None:
        """Join the bridge. All trainer ranks and all engines must do so at the same time.

        Raises:
            ValueError: the engine has a parameter that the plan does not know, or lacks one that the plan has; or the
                two sides have different plans.
        """

        def join_bridge() -> None:
            self.require("weight sync")
            try:
                self._thread.engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": info})
            except Exception as error:  # an error of a worker in another process has another type here
                raise ValueError(str(error)) from error

        await self._call(join_bridge)

    def pin(self, answers: Iterable[tuple[int, int]]) -> None:
        """Let answers have the adapter of one version, also if others are pushed while they are generated: the version
        that the engine holds, or an older one that other answers still need.

        Args:
            answers: the ticket of the group and the number of each; see `Request.answer`.
        """
        if not self._pinned:
            self._thread.engine.collective_rpc("pin_adapter")
            self._pinned_version = self.version
        self._pinned.update(answers)

    def unpin(self, answers: Iterable[tuple[int, int]]) -> None:
        """End what `pin` began; it may be called from any thread."""
        self._pinned.difference_update(answers)

    def pinned(self, answer: tuple[int, int] | None) -> int | None:
        """The version that an answer is pinned to; None: it has the newest one."""
        return self._pinned_version if answer in self._pinned else None

    async def loaded(self) -> None:
        """Call the weights that vLLM has loaded version 0."""

        def name() -> None:
            self._thread.engine.set_weight_version("0")
            self.version = 0

        await self._call(name)

    async def ready(self) -> None:
        """Wait until the engine is between two decode steps. If a call of `take` follows this one, it begins then."""
        await self._call(lambda: None)

    async def receive(self, version: int) -> Metrics:
        """`take` and `commit` at once, for an engine that is alone."""
        start = time.perf_counter()
        await self.take(version)
        return await self.commit(version) | {"seconds": time.perf_counter() - start}

    async def take(self, version: int, verify: bool = False) -> list[dict[str, str]]:
        """Receive the weights that the trainer pushes as `version`. Call this while the trainer pushes; requests may
        run, and pause until `commit`.

        Args:
            verify: the whole push is verified, not only a sample of it.

        Returns:
            For each rank, digests of what it holds, by the modules that were verified.

        Raises:
            RuntimeError: the push stalled, broke off or had another version, or a module does not hold what it should.
                Running requests end with an error, and the engine refuses calls until a complete push.
        """
        return await self._call(partial(self._take, version, verify))

    def _take(self, version: int, verify: bool) -> list[dict[str, str]]:
        self.require("weight sync")
        start, engine = time.perf_counter(), self._thread.engine
        running = engine.has_unfinished_requests()
        held = "no whole set of weights" if self.version is None else f"version {self.version}"
        self._failure = f"the push of version {version} over {held} failed"
        self.version, self._taken = None, None
        try:
            answers: list[dict[str, str] | str] = engine.collective_rpc("take_weights", args=(version, verify))
            errors = [answer for answer in answers if isinstance(answer, str)]
            if errors:
                raise RuntimeError("; ".join(dict.fromkeys(errors)))
        except Exception as error:
            self._fail(f": {error}")
            raise
        self._taken, self._thread.paused = (version, start if running else 0.0), True
        return [answer for answer in answers if not isinstance(answer, str)]

    async def commit(self, version: int, dispute: str | None = None) -> Metrics:
        """Go on with the weights that `take` received.

        Args:
            dispute: why nobody may use them; None: all engines agree.

        Returns:
            `paused_s`: the time that requests were paused, in seconds, 0 if none ran; `preempted`: the number of
            requests that vLLM preempted since the last push. With drafts also what `draft_metrics` needs.

        Raises:
            RuntimeError: there is a dispute, or the engine did not take this version.
        """
        return await self._call(partial(self._commit, version, dispute))

    def _commit(self, version: int, dispute: str | None) -> Metrics:
        taken, self._taken, self._thread.paused = self._taken, None, False
        if taken is None or taken[0] != version:
            raise RuntimeError(f"version {version} was not taken")
        engine, requests = self._thread.engine, self._thread.requests
        try:
            if dispute:
                raise RuntimeError(dispute)
            engine.set_weight_version(str(version))
            if self._spec.rollout.prefix_cache == "cleared" and not engine.reset_prefix_cache(
                reset_running_requests=True
            ):
                raise RuntimeError("vLLM did not empty its prefix cache")
            if self._spec.trains_tower:  # running requests have been preempted, and see their images again
                engine.reset_encoder_cache()
        except Exception as error:
            self._fail(f": {error}")
            raise
        self.version = version
        num_preempted, requests.num_preempted = requests.num_preempted, 0
        paused_s = time.perf_counter() - taken[1] if taken[1] else 0.0
        num_sampled, requests.num_sampled = requests.num_sampled, 0
        drafts = self._drafts.take_counts() | {"sampled": float(num_sampled)} if self._drafts is not None else {}
        return {"paused_s": paused_s, "preempted": float(num_preempted), **drafts}

    def _fail(self, cause: str) -> None:
        self._thread.paused = False
        self._failure += cause
        self._thread.requests.abort(self._thread.engine, self.lost)
        if self._progress is not None:
            self._progress.forget()
