"""vLLM engines and the verifier as Ray actors; implement `ports.Engine`, `ports.Bridge` and `ports.Verifier`.

An engine puts the tokens of each group into Ray's object store and returns the reference with a few numbers a
sample; the verifier and the trainer ranks fetch them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from megatron_rl.actor.actor import ActorSpec
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.bridge.transport import host_store
from megatron_rl.cluster.policy import PolicyGroup
from megatron_rl.cluster.session import gather, redirect_output
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.rollout.engine import VllmEngine
from megatron_rl.types import Group, Metrics, Prompt, Sample, Tokens, Verdict


class EngineRank:
    """One engine, a TP group of vLLM workers, behind an asyncio Ray actor."""

    def __init__(self, config: GrpoRunConfig, index: int, logs: str) -> None:
        redirect_output(Path(logs) / f"engine_{index}.log")
        self.config = config

    async def start(self) -> None:
        config = self.config
        self.engine = VllmEngine(model=config.model, rollout=config.rollout, seed=config.run.seed)
        await self.engine.start()

    async def connect(self, info: dict[str, Any]) -> None:
        await self.engine.init_transfer(info)

    async def receive(self, version: int) -> Metrics:
        return await self.engine.receive(version)

    async def generate(
        self, prompts: list[Prompt], num_samples: int, version: int, seed: int
    ) -> list[tuple[list[Sample], ray.ObjectRef]]:
        answers = await self.engine.generate(prompts, num_samples, version, seed)
        return [([sample for sample, _ in group], ray.put([tokens for _, tokens in group])) for group in answers]


class EngineGroup:
    """All engines; prompts are dealt to them in contiguous parts of equal size."""

    def __init__(self, config: GrpoRunConfig, logs: Path) -> None:
        remote = ray.remote(EngineRank)
        rollout, cluster = config.rollout, config.cluster
        self.names = [f"engine {index}" for index in range(rollout.num_engines)]
        self.engines = [
            remote.options(num_cpus=0, num_gpus=cluster.gpus_per_engine_rank * rollout.tensor).remote(config, index, str(logs))
            for index in range(rollout.num_engines)
        ]

        self._starting = [engine.start.remote() for engine in self.engines]

    def wait(self) -> None:
        """Until every engine has started; they do so while the policy starts.

        Raises:
            ValueError: the model or the budgets do not fit the engine.
        """
        gather(self._starting, self.names)

    def generate(self, prompts: Sequence[Prompt], num_samples: int, version: int, seed: int) -> list[Group]:
        bounds = [len(prompts) * i // len(self.engines) for i in range(len(self.engines) + 1)]
        parts = [list(prompts[a:b]) for a, b in zip(bounds, bounds[1:])]
        calls = [
            engine.generate.remote(part, num_samples, version, seed * len(self.engines) + i)
            for i, (engine, part) in enumerate(zip(self.engines, parts, strict=True))
        ]
        answers = [answer for part in gather(calls, self.names) for answer in part]
        return [Group(p, samples, payload, version) for p, (samples, payload) in zip(prompts, answers, strict=True)]

    def tokens(self, group: Group) -> list[Tokens]:
        """A group's payload, fetched to the driver: for the few answers that people read."""
        return ray.get(group.payload)


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
        calls += [engine.connect.remote({"setup": setup.as_dict(), "engine": i}) for i, engine in enumerate(engines.engines)]
        gather(calls, [*policy.names, *engines.names])

    def push(self, version: int) -> Metrics:
        calls = [engine.receive.remote(version) for engine in self.engines.engines]
        calls += [rank.push.remote(version) for rank in self.policy.ranks]
        results = gather(calls, [*self.engines.names, *self.policy.names])
        sent = results[len(self.engines.engines) :]
        return {"sync/bytes": sum(result["bytes"] for result in sent)}


class VerifierRank:
    """The reward functions in a process of their own: a slow or crashing one does not stop the driver."""

    def __init__(self, config: GrpoRunConfig, logs: str) -> None:
        redirect_output(Path(logs) / "verifier.log")
        from transformers import AutoTokenizer

        from megatron_rl.verifiers.compose import RewardSet

        self.rewards = RewardSet(config.rewards, AutoTokenizer.from_pretrained(config.model.path), config.rollout.delimiter)

    def score(self, prompts: list[Prompt], payloads: list[Any], finishes: list[list[str]]) -> list[list[Verdict]]:
        return self.rewards.score(prompts, ray.get(payloads), finishes)


class RayVerifier:
    def __init__(self, config: GrpoRunConfig, logs: Path) -> None:
        self.rank = ray.remote(VerifierRank).options(num_cpus=0).remote(config, str(logs))

    def score(self, groups: Sequence[Group]) -> list[list[Verdict]]:
        finishes = [[sample.finish for sample in group.samples] for group in groups]
        call = self.rank.score.remote([g.prompt for g in groups], [g.payload for g in groups], finishes)
        return gather([call], ["verifier"])[0]
