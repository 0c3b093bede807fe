"""The rewards, and their shaping, in a process of their own; implements `ports.Verifier`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from megatron_rl.algorithms.shaping import shape_rewards
from megatron_rl.cluster.session import gather, redirect_output
from megatron_rl.config.advantages import ShapingConfig
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.types import Group, Prompt, Tokens, Verdict


class VerifierRank:
    """The reward functions in a process of their own: a slow or crashing one does not stop the driver."""

    def __init__(self, config: GrpoRunConfig, logs: str) -> None:
        redirect_output(Path(logs) / "verifier.log")
        from transformers import AutoTokenizer

        from megatron_rl.verifiers.compose import RewardSet

        self.shaping = config.algorithm.shaping
        self.rewards = RewardSet(
            config.rewards, AutoTokenizer.from_pretrained(config.model.path), config.rollout.delimiter
        )

    def score(self, prompts: list[Prompt], payloads: list[Any], finishes: list[list[str]]) -> list[list[Verdict]]:
        groups: list[list[Tokens]] = ray.get(payloads)
        verdicts = self.rewards.score(prompts, groups, finishes)
        return shape(verdicts, prompts, groups, self.shaping) if self.shaping else verdicts


def shape(
    verdicts: Sequence[Sequence[Verdict]],
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Tokens]],
    shaping: Sequence[ShapingConfig],
) -> list[list[Verdict]]:
    """The same verdicts with their shaped scores: done here, where the tokens are."""
    flat = [verdict for group in verdicts for verdict in group]
    responses = [t.ids[len(p.token_ids) :] for p, group in zip(prompts, groups, strict=True) for t in group]
    scores = np.array([np.nan if verdict.score is None else verdict.score for verdict in flat])
    group_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    shaped = shape_rewards(scores, np.array([len(ids) for ids in responses]), group_of, responses, shaping)
    numbers = iter(None if np.isnan(x) else x for x in shaped.tolist())
    return [[replace(verdict, shaped=next(numbers)) for verdict in group] for group in verdicts]


class RayVerifier:
    def __init__(self, config: GrpoRunConfig, logs: Path) -> None:
        self.rank = ray.remote(VerifierRank).options(num_cpus=0).remote(config, str(logs))

    def score(self, groups: Sequence[Group]) -> list[list[Verdict]]:
        finishes = [[sample.finish for sample in group.samples] for group in groups]
        call = self.rank.score.remote([g.prompt for g in groups], [g.payload for g in groups], finishes)
        return gather([call], ["verifier"])[0]
