"""The rewards in a process of their own; implements `ports.Verifier`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from megatron_rl.cluster.session import gather, redirect_output
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.types import Group, Prompt, Verdict


class VerifierRank:
    """The reward functions in a process of their own: a slow or crashing one does not stop the driver."""

    def __init__(self, config: GrpoRunConfig, logs: str) -> None:
        redirect_output(Path(logs) / "verifier.log")
        from transformers import AutoTokenizer

        from megatron_rl.verifiers.compose import RewardSet

        self.rewards = RewardSet(
            config.rewards, AutoTokenizer.from_pretrained(config.model.path), config.rollout.delimiter
        )

    def score(self, prompts: list[Prompt], payloads: list[Any], finishes: list[list[str]]) -> list[list[Verdict]]:
        return self.rewards.score(prompts, ray.get(payloads), finishes)


class RayVerifier:
    def __init__(self, config: GrpoRunConfig, logs: Path) -> None:
        self.rank = ray.remote(VerifierRank).options(num_cpus=0).remote(config, str(logs))

    def score(self, groups: Sequence[Group]) -> list[list[Verdict]]:
        finishes = [[sample.finish for sample in group.samples] for group in groups]
        call = self.rank.score.remote([g.prompt for g in groups], [g.payload for g in groups], finishes)
        return gather([call], ["verifier"])[0]
