"""Two engines with faults that no digest shows, because they come after a push is verified: in step DAMAGED one engine
has one damaged weight, and in step STALE the other one answers with the weights of the step before and calls them
new."""

from __future__ import annotations

from functools import partial

from megatron_rl.rollout.engine_weights import EngineWeights
from megatron_rl.rollout.vllm_sampler import VllmSampler

DAMAGED, DAMAGED_ENGINE = 2, 1
STALE, STALE_ENGINE = 4, 0


def tensors_of(worker) -> dict:
    model = worker.model_runner.get_model()
    return {name: one.data for name, one in model.named_parameters(remove_duplicate=False)}


def damage(worker) -> None:
    """One element of one matrix of the second layer."""
    [name] = [name for name in tensors_of(worker) if "layers.1." in name and "down_proj" in name]
    tensors_of(worker)[name][0, 0] = 50.0


def remember(worker) -> None:
    worker.before = {name: one.clone() for name, one in tensors_of(worker).items()}


def restore(worker) -> None:
    for name, one in tensors_of(worker).items():
        one.copy_(worker.before[name])


class FaultyWeights(EngineWeights):
    async def init_transfer(self, info):
        self._number = info["engine"]
        await super().init_transfer(info)

    async def take(self, version, verify=False):
        if (self._number, version) == (STALE_ENGINE, STALE):
            await self._in_workers(remember)
        return await super().take(version, verify)

    async def commit(self, version, dispute=None):
        done = await super().commit(version, dispute)
        for fault in {(DAMAGED_ENGINE, DAMAGED): [damage], (STALE_ENGINE, STALE): [restore]}.get(
            (self._number, version), []
        ):
            await self._in_workers(fault)
        return done

    async def _in_workers(self, function) -> None:
        await self._call(partial(self._thread.engine.collective_rpc, function))


class FaultySampler(VllmSampler):
    def __init__(self, spec) -> None:
        super().__init__(spec)
        self.weights = FaultyWeights(self._thread, spec, self._progress)
