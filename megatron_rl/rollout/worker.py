"""What the rollout adds to vLLM's worker (`worker_extension_cls`); vLLM imports it where the worker lives."""

from __future__ import annotations


class SeededWorker:
    def seed_sampling(self, seed: int) -> None:
        """Start the sampler's random stream anew, on every rank alike."""
        from vllm.utils.torch_utils import set_random_seed

        set_random_seed(seed)
