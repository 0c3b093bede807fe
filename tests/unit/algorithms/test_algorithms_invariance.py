"""The gradient does not know how its step was cut: all losses x all aggregations."""

from __future__ import annotations

import random
from itertools import cycle

import cover
import pytest
import torch
from toy_batch import step, toy_samples, weigh

from megatron_rl.algorithms.losses import LOSSES
from megatron_rl.config.algorithm import AlgorithmConfig, FixedCoefficient, KlConfig
from megatron_rl.config.losses import (
    AGGREGATIONS,
    A2poLoss,
    ClipCovLoss,
    FunctionLoss,
    KlCovLoss,
    VespoLoss,
)

# Shares that choose several of some sixty tokens, and bounds that random covariances reach.
CHANGED = {
    ClipCovLoss: ClipCovLoss(share=0.1, cov_low=0.0, cov_high=5.0),
    KlCovLoss: KlCovLoss(share=0.1),
    A2poLoss: A2poLoss(beta=0.1),
    FunctionLoss: FunctionLoss(path="megatron_rl.recipes.tiny.losses:penalised"),
}
VARIANTS = [CHANGED.get(kind) or kind() for kind in LOSSES] + [
    VespoLoss(cap=1.2),
]


def config(loss, mode: str, **more) -> AlgorithmConfig:
    own = loss.corrects
    more = {"correction": None if own else {"weight": {"cap": 1.3}}} | more
    return AlgorithmConfig(
        loss=loss, loss_agg_mode=mode, loss_agg_tokens=9 if mode == "seq-mean-token-sum-norm" else None, **more
    )


def cuts(samples, seed):
    """The same samples: all in one, many micro-batches, other orders, padding, two ranks, three ranks (two empty)."""
    rng = random.Random(seed)

    def shuffled():
        return rng.sample(samples, len(samples))

    yield [[samples]], 0
    yield [[shuffled()]], 2
    for count in (2, 5, 15):  # 15: three micro-batches are empty
        order = shuffled()
        yield [[order[m::count] for m in range(count)]], 0
    order = shuffled()
    yield [[order[:4], order[4:5]], [order[5:9], order[9:]]], 1
    order = shuffled()
    yield [[order[:6], order[6:]], [[], []], [[], []]], 0


def check(cfg: AlgorithmConfig, samples) -> None:
    denominators = weigh(samples, cfg)
    reference = None
    for ranks, padding in cuts(samples, seed=1):
        gradient, metrics = step(ranks, cfg, denominators, padding)
        if reference is None:
            assert gradient.isfinite().all() and gradient.abs().max() > 1e-5
            reference = gradient, metrics
        # float64: only the order of additions differs.
        torch.testing.assert_close(gradient, reference[0], rtol=1e-6, atol=1e-12)
        assert metrics == pytest.approx(reference[1], rel=1e-6, abs=1e-12)


EVERY = [(loss, mode) for loss in VARIANTS for mode in AGGREGATIONS]
SOME = [*EVERY[: len(AGGREGATIONS)], *zip(VARIANTS, cycle(AGGREGATIONS))]
"""The first loss with every aggregation, and every loss with one of them."""


@pytest.mark.parametrize(("loss", "mode"), cover.essential(EVERY, *SOME), ids=lambda x: getattr(x, "kind", x))
def test_every_loss_with_every_aggregation(loss, mode):
    check(config(loss, mode), toy_samples(seed=len(mode)))


@pytest.mark.parametrize(
    "correction",
    [
        {"weight": {"level": level, **weight}, "reject": [{"level": level, **rule}]}
        for level in ("segment", "sequence")
        for weight, rule in [
            ({"cap": 1.2, "normalise": True}, {"statistic": "k1", "over": "mean", "low": 0.8, "high": 1.3}),
            ({"kind": "mask", "high": 1.8}, {"statistic": "k2", "over": "sum", "high": 0.6}),
            ({"kind": "clip", "low": 0.9, "high": 1.2}, {"statistic": "k3", "over": "max", "high": 0.3}),
        ]
    ],
    ids=lambda c: f"{c['weight'].get('kind', 'truncate')}-{c['weight']['level']}",
)
def test_every_correction(correction):
    check(AlgorithmConfig(correction=correction), toy_samples(seed=4))


OF_TOKENS = [loss for loss in VARIANTS[:-1] if loss.level == "token"]


@pytest.mark.parametrize("loss", cover.essential(OF_TOKENS, *OF_TOKENS[::3]), ids=lambda c: c.kind)
def test_kl_entropy_and_tokens_of_high_entropy(loss):
    coefficient = FixedCoefficient(value=0.1)
    more = {
        "kl": KlConfig(estimator="k3", straight_through=True, coefficient=coefficient),
        "entropy": {"coefficient": coefficient},
        "top_entropy_share": 0.3,
    }
    check(config(loss, "prompt-mean", **more), toy_samples(seed=8))


def test_without_forced_tokens_and_without_silent_samples():
    check(config(CHANGED[ClipCovLoss], "seq-mean-token-mean"), toy_samples(seed=2, silent=(), forced=False))
