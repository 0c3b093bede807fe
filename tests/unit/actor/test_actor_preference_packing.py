"""The objective of preferences against a dense float64 reference, however the answers are packed and distributed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shares import TrainSample, share_of

from megatron_rl.actor.packing import pack
from megatron_rl.algorithms.columns import FirstPass
from megatron_rl.algorithms.preference_objective import PreferenceObjective, judge_rows
from megatron_rl.algorithms.preferences import answer_loss, likelihood_loss, pair_loss
from megatron_rl.config.preferences import CpoLoss, DpoLoss, IpoLoss, KtoLoss, OrpoLoss, SimpoLoss
from megatron_rl.types import Denominators, StepBatch, Tokens, TrainingRow

LOSSES = [
    DpoLoss(beta=0.4),
    DpoLoss(beta=0.4, label_smoothing=0.2),
    IpoLoss(beta=0.3),
    CpoLoss(beta=0.4, alpha=0.7),
    SimpoLoss(beta=1.5, gamma=0.7, alpha=0.3),
    OrpoLoss(beta=0.6),
    KtoLoss(beta=0.5, desirable_weight=1.3, undesirable_weight=0.8),
]


def tokens_of(num_given: int, num_trained: int) -> Tokens:
    size = num_given + num_trained
    mask = np.arange(size) >= num_given
    return Tokens(np.arange(1, size + 1, dtype=np.int32), mask, np.zeros(size, np.float32), np.full(size, -1, np.int32))


def dense(loss, rows: list[TrainingRow], logp: list[torch.Tensor]) -> torch.Tensor:
    """The mean loss of the rows.

    Args:
        logp: the log-probs of each sample's actions.
    """
    number, i = [], 0
    for row in rows:
        for reference in row.logp_reference:
            own = logp[i].sum() - reference
            number.append(own / len(logp[i]) if loss.is_mean else own)
            i += 1
    first, second = number[0::2], number[1::2]
    if isinstance(loss, KtoLoss):
        kl = torch.stack(second).mean().clamp(min=0).detach()
        labels = [torch.tensor(row.labels[0]) for row in rows]
        return torch.stack([answer_loss(loss, x, kl, y) for x, y in zip(first, labels, strict=True)]).mean()
    sizes = torch.tensor([len(one) for one in logp[::2]])
    pairs = zip(first, second, sizes, strict=True)
    return torch.stack([pair_loss(loss, c, r) + likelihood_loss(loss, c, n) for c, r, n in pairs]).mean()


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@given(seed=st.integers(0, 2**20), num_rows=st.integers(1, 5), num_ranks=st.integers(1, 3), shares=st.booleans())
@settings(deadline=None, max_examples=25)
def test_loss_and_gradient_are_those_of_the_dense_reference_in_every_packing(loss, seed, num_rows, num_ranks, shares):
    rng = np.random.default_rng(seed)
    label = (lambda: rng.choice([1.0, -1.0])) if isinstance(loss, KtoLoss) else (lambda: 1.0)
    rows = []
    for i in range(num_rows):
        num_given = int(rng.integers(1, 30))
        samples = tuple(tokens_of(num_given, int(rng.integers(1, 6))) for _ in range(2))
        first = float(label())
        labels = (first, 0.0 if isinstance(loss, KtoLoss) else -1.0)
        given = tuple(rng.normal(-4, 2, 2)) if loss.has_reference else (0.0, 0.0)
        rows.append(TrainingRow(f"row {i}", samples, labels, given))
    batch = StepBatch.of_rows(rows, version=0)
    num = len(batch.names)
    references = np.array([one for row in rows for one in row.logp_reference])
    logp = [
        torch.tensor(-rng.gamma(1.0, 1.0, n) - 1e-3, dtype=torch.float64, requires_grad=True) for n in batch.num_actions
    ]
    expected = dense(loss, rows, logp)
    expected.backward()

    objective, order = PreferenceObjective(loss), rng.permutation(num)
    payloads = [sample for row in rows for sample in row.samples]
    ranks = []
    for part in np.array_split(order, num_ranks):
        cuts = np.array_split(part, int(rng.integers(1, len(part) + 2)))
        micro = [[TrainSample(batch.names[i], payloads[i], batch.rewards[i], 1.0, int(i)) for i in cut] for cut in cuts]
        share = replace(share_of([micro]), logp_reference=references[[int(i) for cut in cuts for i in cut]])
        [batches] = pack(share, shares)
        ranks.append(batches)
    denominators = Denominators(int(batch.num_actions.sum()), num)

    def live(b):
        """The log-probs of a row's actions, 0 elsewhere."""
        column = torch.zeros(len(b.ids_T), dtype=torch.float64)
        for i in (b.columns.token_T[b.columns.action_mask_T] >> 32).unique().tolist():
            own = b.columns.action_mask_T & (b.columns.token_T >> 32 == i)
            column = column.masked_scatter(own, logp[i])
        return column

    # What each rank adds to the sum over all ranks is computed first.
    parts: list[torch.Tensor] = []
    for batches in ranks:
        first = [FirstPass(live(b).detach(), None) for b in batches]
        objective.prepare([b.columns for b in batches], first, denominators, lambda x: (parts.append(x.clone()), x)[1])
    total, values = 0.0, dict.fromkeys(("loss", "preference/accuracy"), 0.0)
    for leaf in logp:
        leaf.grad, leaf.expected = None, leaf.grad
    for batches in ranks:
        first = [FirstPass(live(b).detach(), None) for b in batches]
        columns = objective.prepare([b.columns for b in batches], first, denominators, lambda x: sum(parts))
        for b, c in zip(batches, columns, strict=True):
            if b.names:
                value, metrics = objective(live(b), None, c, denominators, {})
                total = total + value
                for name in values:
                    values[name] += metrics[name].value.item()
    total.backward()
    for leaf in logp:
        zero = torch.zeros_like(leaf)
        torch.testing.assert_close(
            leaf.grad if leaf.grad is not None else zero,
            leaf.expected if leaf.expected is not None else zero,
            rtol=1e-9,
            atol=1e-12,
        )
    assert values["loss"] == pytest.approx(expected.item(), rel=1e-9)
    losses, is_right = judge_rows(loss, rows, np.array([x.sum().item() for x in logp]))
    assert losses.mean() == pytest.approx(expected.item(), rel=1e-9)
    assert values["preference/accuracy"] == pytest.approx(is_right.mean())
