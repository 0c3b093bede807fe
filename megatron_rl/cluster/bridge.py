"""The bridge over Ray: joins trainer ranks and engine workers, then starts both sides of every push; implements
`ports.Bridge`.

A push that fails is tried once more: engines that died are replaced, all join anew, and every engine gets the whole
weights, so that one that missed a version is caught up too. Invariants (tests/e2e): an engine that died between two
pushes does not end the run; a trainer rank that died does, with its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from megatron_rl.actor.spec import ActorSpec
from megatron_rl.bridge.join import host_store
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.cluster.engines import EngineGroup
from megatron_rl.cluster.policy import PolicyGroup
from megatron_rl.cluster.waiting import gather, settle, told
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.layout import Engines
from megatron_rl.ports import PolicyLost
from megatron_rl.types import Metrics

ATTEMPTS = 2
GRACE_S = 30.0
"""After a push's deadline, before a process that says nothing is taken for lost."""


class RayBridge:
    """Pushes by starting both sides at once and waiting for all: senders in the trainers, receivers in vLLM."""

    def __init__(
        self, config: GrpoRunConfig, spec: ActorSpec, policy: PolicyGroup, engines: EngineGroup, logs: Path
    ) -> None:
        """Join all trainer ranks and engine workers.

        Args:
            logs: a push that had to be repeated leaves its cause in `bridge.log` there.

        Raises:
            ValueError: a parameter that the plan does not cover, or sides that disagree about the plan.
        """
        self._config, self._spec, self._policy, self._engines = config, spec, policy, engines
        self._host, self._log, self._epoch = ray.util.get_node_ip_address(), logs / "bridge.log", 0
        self._store = host_store(self._host)
        self._join()
        self._num_told = 0
        """Of the replaced engines, those that a push has told of."""
        engines.bring_weights = self.mend

    def _join(self) -> None:
        rollout, bridge = self._config.rollout, self._config.bridge
        setup = BridgeSetup(
            shape=self._spec.shape,
            mesh=self._policy.mesh,
            fused_norms=self._policy.fused_norms,
            engines=Engines(
                rollout.num_engines,
                rollout.tensor,
                expert_parallel=rollout.expert_parallel,
                num_chains=bridge.chains,
            ),
            dtype=self._config.model.dtype,
            host=self._host,
            port=self._store.port,
            epoch=self._epoch,
            bucket_bytes=int(bridge.bucket_mib * 2**20),
            timeout_s=bridge.timeout_s,
        )
        self._epoch += 1
        calls = [rank.connect.remote(setup) for rank in self._policy.ranks]
        calls += [
            engine.connect.remote({"setup": setup.as_dict(), "engine": i})
            for i, engine in enumerate(self._engines.engines)
        ]
        processes = [*self._policy.processes, *self._engines.processes]
        gather(calls, processes, "to join the bridge", self._config.cluster.start_timeout_s)

    def push(self, version: int) -> Metrics:
        """Bring the weights into every engine.

        Returns:
            `sync/bytes` sent; `sync/paused_s`, the longest that an engine's running requests stood still;
            `sync/repeated`, 1 if it took a second attempt; `sync/replaced_engines` since the last push.

        Raises:
            PolicyLost: a trainer rank died or does not answer.
            RuntimeError: the second attempt failed too; with the cause.
        """
        metrics = self._push(version)
        num_replaced = self._engines.num_replaced
        metrics["sync/replaced_engines"], self._num_told = num_replaced - self._num_told, num_replaced
        return metrics

    def mend(self, version: int) -> None:
        """Replace the engines that died while they answered, and bring the weights into all engines again."""
        self._engines.replace_dead()
        self._join()
        self._push(version)

    def _push(self, version: int) -> Metrics:
        trainers, engines = (
            {process.name for process in processes} for processes in (self._policy.processes, self._engines.processes)
        )
        repeated = 0
        while True:
            outcomes = self._attempt(version)
            failures = {name: error for name, error in outcomes.items() if isinstance(error, RayError)}
            if not failures:
                return {
                    "sync/bytes": sum(outcomes[name]["bytes"] for name in trainers),
                    "sync/paused_s": max(outcomes[name]["paused_s"] for name in engines),
                    "sync/repeated": repeated,
                }
            error, name = _cause(failures)
            process = next(p for p in (*self._policy.processes, *self._engines.processes) if p.name == name)
            cause = told(error, process)
            with self._log.open("a") as log:
                log.write(f"version {version}: {cause}\n")
            if any(isinstance(failures.get(name), RayActorError | GetTimeoutError) for name in trainers):
                raise PolicyLost(str(cause)) from error
            if repeated + 1 == ATTEMPTS:
                raise cause from error
            repeated += 1
            self._engines.replace_dead()
            self._join()

    def _attempt(self, version: int) -> dict[str, Any]:
        """Results or errors, by name."""
        calls = [engine.receive.remote(version) for engine in self._engines.engines]
        calls += [rank.push.remote(version, self._config.bridge.verify) for rank in self._policy.ranks]
        outcomes = settle(calls, self._config.bridge.timeout_s + GRACE_S)
        processes = [*self._engines.processes, *self._policy.processes]
        return {process.name: outcome for process, outcome in zip(processes, outcomes, strict=True)}


def _cause(failures: dict[str, RayError]) -> tuple[RayError, str]:
    """Of many failures the one that began it: a death, else what is no consequence of another's silence."""

    def rank(name: str) -> int:
        error = failures[name]
        return 0 if isinstance(error, RayActorError) else 2 if "has died, or is silent" in str(error) else 1

    name = min(failures, key=rank)
    return failures[name], name
