"""The bridge over Ray connects trainer ranks and engine workers, and starts both sides of every push; implements
`ports.Bridge`.

A push that fails is retried once: dead engines are replaced, all processes join again, and every engine gets all
weights, including an engine that missed an earlier version. Invariants (tests/e2e): an engine that dies between two
pushes does not end the run; a trainer rank that dies is reported as PolicyLost, with the name of the rank.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from megatron_rl.actor.spec import ActorSpec
from megatron_rl.bridge.join import ABSENT, give_up, host_store
from megatron_rl.bridge.line import PEER_LOST
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.bridge.verification import disagreement
from megatron_rl.cluster.engines import EngineGroup
from megatron_rl.cluster.network import find_interface, network_environment
from megatron_rl.cluster.policy import PolicyGroup
from megatron_rl.cluster.process import Process
from megatron_rl.cluster.waiting import explain, gather, settle
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.layout import Engines, Links, Recording
from megatron_rl.ports import PolicyLost, TooManyRestarts
from megatron_rl.rollout.drafts import draft_metrics
from megatron_rl.types import Metrics

log = logging.getLogger(__name__)

ATTEMPTS = 2
ANSWER_S = 5.0
"""The time limit, in seconds, for a process to answer after the others failed to join."""
READY_S = 0.25
"""The engines that do not stop their decode steps within this time get the weights after the others."""
GRACE_S = 30.0
"""The time, in seconds, that a process may still report after a push's deadline; then it counts as lost."""


class RayBridge:
    """Pushes weights: it starts the senders in the trainer ranks and the receivers in vLLM at once, and waits for all
    of them."""

    def __init__(
        self,
        config: GrpoRunConfig,
        spec: ActorSpec,
        policy: PolicyGroup,
        engines: EngineGroup,
        logs: Path,
        links: Links = Links(),
    ) -> None:
        """Join all trainer ranks and engine workers.

        Args:
            logs: the folder of `bridge.log`, which gets the cause of every push that had to be repeated.
            links: where the ranks are, as far as the transfer plan may use it.

        Raises:
            ValueError: the plan does not cover a parameter, or the two sides have different plans.
        """
        self._config, self._spec, self._policy, self._engines = config, spec, policy, engines
        self._links = links
        self._host = find_interface(network_environment(config.cluster, os.environ)).address
        self._secret, self._log, self._epoch = secrets.token_hex(16), logs / "bridge.log", 0
        self._recorded: tuple[Recording, ...] = ()
        self._store = host_store(self._host)
        self._join()
        self._num_reported = 0
        """The number of replaced engines that earlier pushes have already reported."""
        engines.bring_weights = self.recover

    def _join(self) -> None:
        self._policy.before("weight sync")
        rollout, bridge, shape = self._config.rollout, self._config.bridge, self._config.pushed(self._spec.shape)
        if not self._recorded:  # engines are equal, so the first one tells for all
            process, timeout_s = self._engines.processes[0], self._config.cluster.start_timeout_s
            call = process.actor.record_loading.remote(shape)
            (self._recorded,) = gather([call], [process], "to show how it loads weights", timeout_s)
        setup = BridgeSetup(
            shape=shape,
            mesh=self._policy.mesh,
            fused_norms=self._policy.fused_norms,
            engines=Engines(
                rollout.num_engines,
                rollout.parallel.tensor,
                rollout.parallel.pipeline,
                expert_parallel=rollout.parallel.expert_parallel,
                num_chains=bridge.chains,
            ),
            dtype=self._config.model.dtype,
            host=self._host,
            port=self._store.port,
            secret=self._secret,
            epoch=self._epoch,
            bucket_bytes=int(bridge.bucket_mib * 2**20),
            timeout_s=bridge.timeout_s,
            links=self._links,
            recorded=self._recorded,
        )
        self._epoch += 1
        as_value, as_json = ray.put(setup), ray.put(setup.as_dict())  # one copy for each node
        calls = [rank.connect.remote(as_value) for rank in self._policy.ranks]
        calls += [engine.connect.remote(as_json, i) for i, engine in enumerate(self._engines.engines)]
        processes = [*self._policy.processes, *self._engines.processes]
        try:
            gather(calls, processes, "to join the bridge", self._config.cluster.start_timeout_s)
        except (ValueError, RuntimeError) as error:
            give_up(self._store, setup, "the driver gave up")
            lost = self._end_silent(calls, processes)
            # vLLM's processes report every error as a ValueError, also the loss of a neighbour.
            if isinstance(error, ValueError) and not lost and ABSENT not in str(error):
                raise
            raise RuntimeError(str(error)) from error

    def _end_silent(self, calls: Sequence[ray.ObjectRef], processes: Sequence[Process]) -> bool:
        """After a failure to join, end the engines that still do not answer, so that they are replaced: a vLLM that is
        stopped looks alive, and the others only know that it did not come. Returns whether an engine is lost.

        Raises:
            PolicyLost: a trainer rank has died or does not answer.
        """
        outcomes = settle(calls, ANSWER_S)
        if any(isinstance(outcome, GetTimeoutError) for outcome in outcomes):
            # Some wait for the lines of a rank that is lost. The end of the store ends this too.
            self._store = host_store(self._host)
            outcomes = settle(calls, ANSWER_S)
        lost = False
        for process, outcome in zip(processes, outcomes, strict=True):
            if not isinstance(outcome, RayActorError | GetTimeoutError):
                continue
            if process in self._policy.processes:
                raise PolicyLost(str(explain(outcome, process))) from outcome
            ray.kill(process.actor)
            lost = True
        return lost

    def _join_again(self) -> None:
        """Replace the engines that died, and let all processes join again; repeat if another engine is lost."""
        for attempt in range(ATTEMPTS):
            self._engines.replace_dead()
            try:
                return self._join()
            except (PolicyLost, TooManyRestarts):
                raise
            except RuntimeError as error:
                if attempt + 1 == ATTEMPTS:
                    raise
                log.warning("%s", error)

    def push(self, version: int) -> Metrics:
        """Push the weights into every engine.

        Returns:
            `sync/bytes`: the bytes that were sent; `sync/paused_s`: the longest pause of an engine's requests, in
            seconds; `sync/transfer_s`: the seconds of the slowest trainer rank's transfer; `rollout/preempted`: the
            answers that vLLM preempted since the last push, because its KV cache was full; `sync/repeated`: 1 if a
            second attempt was needed; `sync/replaced_engines`: the number of engines replaced since the last push; with
            `rollout.speculative` also `draft_metrics`.

        Raises:
            PolicyLost: a trainer rank died or does not answer.
            RuntimeError: the second attempt failed too; the message has the cause.
        """
        metrics = self._push(version)
        num_replaced = self._engines.num_replaced
        metrics["sync/replaced_engines"], self._num_reported = num_replaced - self._num_reported, num_replaced
        return metrics

    def recover(self, version: int) -> None:
        """Replace the engines that died while they answered, and push the weights into all engines again."""
        self._join_again()
        self._push(version)

    def rejoin(self) -> None:
        """See `ports.Bridge`."""
        try:
            self._join_again()
        except (PolicyLost, TooManyRestarts):
            raise
        except RuntimeError as error:
            raise PolicyLost(str(error)) from error

    def _push(self, version: int) -> Metrics:
        trainers, engines = (
            {process.name for process in processes} for processes in (self._policy.processes, self._engines.processes)
        )
        repeated = 0
        while True:
            outcomes = self._attempt(version)
            failures = {name: error for name, error in outcomes.items() if isinstance(error, RayError)}
            if not failures:
                # Here and not where answers are asked for: a rank that is lost now is lost in a push, and the loop
                # knows what it has asked for.
                self._engines.before()
                return {
                    "sync/bytes": sum(outcomes[name]["bytes"] for name in trainers),
                    "sync/paused_s": max(outcomes[name]["paused_s"] for name in engines),
                    "sync/transfer_s": max(outcomes[name]["seconds"] for name in trainers),
                    "rollout/preempted": sum(outcomes[name]["preempted"] for name in engines),
                    "sync/repeated": repeated,
                    **draft_metrics(outcomes[name] for name in engines),
                }
            error, name = _cause(failures)
            process = next(p for p in (*self._policy.processes, *self._engines.processes) if p.name == name)
            cause = explain(error, process)
            with self._log.open("a") as log:
                log.write(f"version {version}: {cause}\n")
            if any(isinstance(failures.get(name), RayActorError | GetTimeoutError) for name in trainers):
                raise PolicyLost(str(cause)) from error
            if repeated + 1 == ATTEMPTS:
                raise cause from error
            repeated += 1
            self._join_again()

    def _attempt(self, version: int) -> dict[str, Any]:
        """The result or the error of each process, by its name. Engines go on with the version if all that live hold
        it and agree; otherwise they stay paused until the next attempt."""
        self._policy.before("weight sync")
        engines = self._engines.engines
        ready = [engine.ready.remote() for engine in engines]
        verify = self._config.bridge.verify
        calls = [engine.take.remote(version, verify) for engine in engines]
        in_time, _ = ray.wait(ready, num_returns=len(ready), timeout=READY_S)
        late = [index for index, engine in enumerate(ready) if engine not in in_time]
        calls += [rank.push.remote(version, verify, late) for rank in self._policy.ranks]
        timeout_s = self._config.bridge.timeout_s + GRACE_S
        outcomes = settle(calls, timeout_s)
        took, dispute = who_goes_on(outcomes[: len(engines)], outcomes[len(engines) :])
        commits = [engines[index].commit.remote(version, dispute) for index in took]
        for index, outcome in zip(took, settle(commits, timeout_s), strict=True):
            outcomes[index] = outcome
        processes = [*self._engines.processes, *self._policy.processes]
        return {process.name: outcome for process, outcome in zip(processes, outcomes, strict=True)}


def who_goes_on(engines: Sequence[Any], trainers: Sequence[Any]) -> tuple[list[int], str | None]:
    """Who goes on with a version after a push.

    Args:
        engines, trainers: what `take` and `push` returned, or their errors.

    Returns:
        The engines, by index, that hold the version, and why they may not use it, or None. There are none if a process
        failed otherwise than by its death: then nobody knows who is right.
    """
    took = {index: outcome for index, outcome in enumerate(engines) if not isinstance(outcome, RayError)}
    live = [outcome for outcome in (*engines, *trainers) if not isinstance(outcome, RayActorError)]
    if not took or any(isinstance(outcome, RayError) for outcome in live):
        return [], None
    return list(took), disagreement(took)


def _cause(failures: dict[str, RayError]) -> tuple[RayError, str]:
    """The failure that most likely caused the others: first a death, then an error that does not blame another
    process."""

    def rank(name: str) -> int:
        error = failures[name]
        return 0 if isinstance(error, RayActorError) else 2 if PEER_LOST in str(error) else 1

    name = min(failures, key=rank)
    return failures[name], name
