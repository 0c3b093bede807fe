"""A toy policy, random samples of it, and a whole optimizer step over micro-batches and data-parallel ranks.

The policy is a table: log p(next | token) = log softmax(theta[token]). Ranks are threads that meet in sums.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.aggregation import sample_weights
from megatron_rl.algorithms.columns import FirstPass, PackedColumns
from megatron_rl.algorithms.objective import PolicyObjective
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.types import Denominators

V = 7
"""Vocabulary."""
COEFFICIENTS = {"kl": 0.3, "entropy": 0.2}


@dataclass
class ToySample:
    """Per-token lists are indexed by the token that they describe, so entry 0 means nothing."""

    index: int
    group: int
    ids: list[int]
    mask: list[bool]
    old: list[float]
    rollout: list[float]
    ref: list[float]
    lag: list[int]
    advantage: float
    weight: float = 0.0


def toy_samples(seed: int, num_samples: int = 12, silent: Sequence[int] = (3,), forced: bool = True) -> list[ToySample]:
    """Samples in groups of three; those in `silent` have no action at all. `forced`: tokens that are no actions
    stand between the actions."""
    rng = random.Random(seed)
    samples = []
    for index in range(num_samples):
        length = rng.randrange(3, 12)
        prompt = rng.randrange(1, length)
        acts = [t >= prompt and index not in silent and (not forced or rng.random() < 0.8) for t in range(length)]
        samples.append(
            ToySample(
                index=index,
                group=index // 3,
                ids=[rng.randrange(V) for _ in range(length)],
                mask=acts,
                old=[rng.gauss(-2, 0.4) for _ in range(length)],
                rollout=[rng.gauss(-2, 0.4) for _ in range(length)],
                ref=[rng.gauss(-2, 0.4) for _ in range(length)],
                lag=[rng.randrange(4) for _ in range(length)],
                advantage=rng.gauss(0, 1),
            )
        )
    return samples


def toy_theta() -> Tensor:
    theta = torch.randn(V, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return theta.requires_grad_()


def weigh(samples: list[ToySample], cfg: AlgorithmConfig) -> Denominators:
    """Fill in the aggregation's weights; returns the denominators of the whole mini-batch."""
    counts = [sum(s.mask) for s in samples]
    weights = sample_weights(cfg.aggregation, counts, [s.group for s in samples], cfg.loss_agg_tokens)
    for sample, weight in zip(samples, weights, strict=True):
        sample.weight = weight
    return Denominators(sum(counts), len(samples))


def pack(samples: Sequence[ToySample], theta: Tensor, padding: int = 0) -> tuple[Tensor, Tensor, PackedColumns]:
    """logp_T, entropy_T and columns of one micro-batch. Each sample's last position and the padding hold NaN, inf and
    no action."""
    nan = float("nan")
    empty = theta.flatten()[:0]  # keeps the graph when the micro-batch holds nothing
    logps, entropies = [empty], [empty]
    rows: dict[str, list] = {n: [] for n in ("mask", "owner", "token", "weight", "adv", "rollout", "lag", "old", "ref")}
    for owner, s in enumerate(samples):
        inner, tail = len(s.ids) - 1, 1 + padding
        log_probs = torch.log_softmax(theta[s.ids[:-1]], -1)
        logps += [log_probs[torch.arange(inner), s.ids[1:]], torch.full((tail,), nan, dtype=torch.float64)]
        entropies += [-(log_probs.exp() * log_probs).sum(-1), torch.full((tail,), nan, dtype=torch.float64)]
        rows["mask"] += s.mask[1:] + [False] * tail
        rows["owner"] += [owner] * (inner + tail)
        rows["token"] += [s.index * 1000 + t for t in range(1, len(s.ids))] + [s.index * 1000] * tail
        rows["weight"] += [s.weight] * inner + [nan] * tail
        rows["adv"] += [s.advantage] * inner + [nan] * tail
        rows["rollout"] += s.rollout[1:] + [-float("inf")] * tail
        rows["lag"] += s.lag[1:] + [0] * tail
        rows["old"] += s.old[1:] + [float("inf")] * tail
        rows["ref"] += s.ref[1:] + [nan] * tail
    real = {n: torch.tensor(rows[n], dtype=torch.float64) for n in ("weight", "adv", "rollout", "old", "ref")}
    columns = PackedColumns(
        action_mask_T=torch.tensor(rows["mask"], dtype=torch.bool),
        sample_T=torch.tensor(rows["owner"], dtype=torch.int64),
        token_T=torch.tensor(rows["token"], dtype=torch.int64),
        weight_T=real["weight"],
        advantage_T=real["adv"],
        logp_rollout_T=real["rollout"],
        lag_T=torch.tensor(rows["lag"], dtype=torch.int64),
        logp_old_T=real["old"],
        logp_ref_T=real["ref"],
    )
    return torch.cat(logps), torch.cat(entropies), columns


class Meeting:
    """The sum over ranks that are threads."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier, self.given = threading.Barrier(num_ranks), [None] * num_ranks

    def sum_of(self, rank: int) -> Callable[[Tensor], Tensor]:
        def sum_over_ranks(x: Tensor) -> Tensor:
            self.given[rank] = x
            self.barrier.wait(20)
            total = sum(self.given)
            self.barrier.wait(20)
            return total

        return sum_over_ranks


def step(
    ranks: Sequence[Sequence[Sequence[ToySample]]], cfg: AlgorithmConfig, denominators: Denominators, padding: int = 0
) -> tuple[Tensor, dict[str, float]]:
    """Gradient of theta, and the metrics, of one optimizer step; `ranks[r][m]` are the samples of a micro-batch."""
    objective, meeting = PolicyObjective(cfg), Meeting(len(ranks))
    gradients: list[Tensor] = [torch.zeros(V, V)] * len(ranks)
    reports: list[list[dict]] = [[] for _ in ranks]

    def run(rank: int) -> None:
        theta = toy_theta()
        packed = [pack(samples, theta, padding) for samples in ranks[rank]]
        first_pass = [FirstPass(logp_T.detach(), entropy_T.detach()) for logp_T, entropy_T, _ in packed]
        columns = objective.prepare([c for _, _, c in packed], first_pass, denominators, meeting.sum_of(rank))
        for (logp_T, entropy_T, _), c in zip(packed, columns, strict=True):
            loss, metrics = objective(logp_T, entropy_T, c, denominators, COEFFICIENTS)
            loss.backward()
            reports[rank].append({name: (m.value.item(), m.reduction) for name, m in metrics.items()})
        gradients[rank] = theta.grad

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = {"sum": sum, "max": max, "min": min}
    metrics: dict[str, float] = {}
    for name in {name for report in reports for row in report for name in row}:
        given = [row[name] for report in reports for row in report if name in row]
        metrics[name] = together[given[0][1]]([value for value, _ in given])
    return sum(gradients), objective.conclude(metrics, math.inf)
