"""The bridge over Ray: joins trainer ranks and engine workers once, then starts both sides of every push;
implements `ports.Bridge`."""

from __future__ import annotations

import ray

from megatron_rl.actor.spec import ActorSpec
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.bridge.transport import host_store
from megatron_rl.cluster.engines import EngineGroup
from megatron_rl.cluster.policy import PolicyGroup
from megatron_rl.cluster.session import gather
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.types import Metrics


class RayBridge:
    """Pushes by starting both sides at once and waiting for all: senders in the trainers, receivers in vLLM."""

    def __init__(self, config: GrpoRunConfig, spec: ActorSpec, policy: PolicyGroup, engines: EngineGroup) -> None:
        """Join all trainer ranks and engine workers.

        Raises:
            ValueError: a parameter that the plan does not cover, or sides that disagree about the plan.
        """
        self.policy, self.engines = policy, engines
        host = ray.util.get_node_ip_address()
        self._store = host_store(host)
        setup = BridgeSetup(
            shape=spec.shape,
            mesh=policy.mesh,
            fused_norms=policy.fused_norms,
            num_engines=config.rollout.num_engines,
            engine_tensor=config.rollout.tensor,
            dtype=config.model.dtype,
            host=host,
            port=self._store.port,
        )
        calls = [rank.connect.remote(setup) for rank in policy.ranks]
        calls += [
            engine.connect.remote({"setup": setup.as_dict(), "engine": i}) for i, engine in enumerate(engines.engines)
        ]
        gather(calls, [*policy.names, *engines.names])

    def push(self, version: int) -> Metrics:
        calls = [engine.receive.remote(version) for engine in self.engines.engines]
        calls += [rank.push.remote(version) for rank in self.policy.ranks]
        results = gather(calls, [*self.engines.names, *self.policy.names])
        sent = results[len(self.engines.engines) :]
        return {"sync/bytes": sum(result["bytes"] for result in sent)}
