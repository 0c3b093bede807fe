"""The memory of the reward models of a run, each on a GPU of its own."""

from __future__ import annotations

from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.planning.gpu import GpuMemory, MemoryPart, always

REMEDY = "take a smaller reward model, or serve it with vLLM on several GPUs and give rewards its url"


def reward_model_memory(config: GrpoRunConfig) -> list[GpuMemory]:
    """The weights of each reward model on a GPU, by the sizes of their files; a folder that is not there has none."""
    if not config.cluster.reward_model_gpus:
        return []
    found = []
    for reward in (config.rewards[i] for i in config.scored_by_model):
        files = getattr(reward, "path").glob("*.safetensors")  # noqa: B009  # `scored_by_model` has looked at the kind
        weights = always(float(sum(file.stat().st_size for file in files)))
        found.append(GpuMemory.of(f"reward model, {reward.label}", {"weights": MemoryPart(weights, REMEDY)}))
    return found
