"""The objective of training on preferences, in the form of the other objectives (objective.py).

An answer and the one that it is compared with may be in different micro-batches, on different ranks. So the numbers of
all answers are computed first, in a pass without gradients, and each answer finds the other's number in a column. The
loss of a pair is then computed at both answers, and each takes its own part of the gradient. The sum of both parts is
the pair's gradient, because the chain rule adds the parts of the variables of a function.

Invariant (tests/unit/algorithms, tests/ranks): loss and gradient do not depend on how answers are packed and
distributed.

Shape letters: T packed tokens of one micro-batch, N answers of the whole step, S samples of a batch, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.columns import ComparedColumns, FirstPass, PackedColumns
from megatron_rl.algorithms.objective import Metric, require_finite
from megatron_rl.algorithms.passes import Needs
from megatron_rl.algorithms.plain_objective import PlainObjective
from megatron_rl.algorithms.preferences import answer_loss, likelihood_loss, pair_loss
from megatron_rl.algorithms.whitening import SumOverRanks
from megatron_rl.config.preferences import KtoLoss, PreferenceLossConfig
from megatron_rl.types import Denominators, TrainingRow


class PreferenceObjective(PlainObjective):
    """The mean loss of the pairs of a step, or for KTO of its rows.

    The answers 2 i and 2 i + 1 of the step belong to row i. `advantage_T` has their labels.

    Metrics:
        loss: the mean loss.
        preference/accuracy: the share of pairs whose chosen answer has the larger number; for KTO the share of answers
            whose number is above z if they are liked, and below otherwise.
        preference/margin: the mean of h_c - h_r, in nats; of a reward model in the scores' own unit.
        preference/chosen, preference/rejected: the mean numbers of these answers.
        preference/kl: z of KTO.
    """

    needs = Needs(statistics=frozenset({"logp"}))

    def __init__(self, cfg: PreferenceLossConfig) -> None:
        self.cfg = cfg

    def prepare(
        self,
        columns: Sequence[PackedColumns],
        first_pass: Sequence[FirstPass] | None,
        denominators: Denominators,
        sum_over_ranks: SumOverRanks,
    ) -> list[PackedColumns]:
        assert first_pass is not None  # `needs.statistics` asks for it
        index = [_index(c) for c in columns]
        number_N = torch.zeros(denominators.num_samples, dtype=torch.float64, device=columns[0].weight_T.device)
        label_N = number_N.clone()
        for c, one, index_T in zip(columns, first_pass, index, strict=True):
            first_T = _first(c)
            number_T = self._numbers(one.logp_T, c)
            number_N.index_add_(0, index_T[first_T], number_T[c.sample_T][first_T])
            label_N.index_add_(0, index_T[first_T], c.advantage_T[first_T].double())
        number_N, label_N = sum_over_ranks(torch.stack([number_N, label_N])).unbind()
        if isinstance(self.cfg, KtoLoss):
            only_for_z_N = label_N == 0
            partner_N = (number_N[only_for_z_N].mean().clamp(min=0)).expand(denominators.num_samples)
        else:
            partner_N = number_N.view(-1, 2).flip(1).reshape(-1)
        compared = [c for c in columns if isinstance(c, ComparedColumns)]  # all: the rows have log-probs of a reference
        return [replace(c, partner_T=partner_N[index_T]) for c, index_T in zip(compared, index, strict=True)]

    def __call__(
        self,
        logp_T: Tensor,
        entropy_T: Tensor | None,
        columns: PackedColumns,
        denominators: Denominators,
        coefficients: Mapping[str, float],
    ) -> tuple[Tensor, dict[str, Metric]]:
        assert isinstance(columns, ComparedColumns) and columns.partner_T is not None, "`prepare` comes first"
        if self.cfg.has_head:
            require_finite(replace(columns, action_mask_T=_ends(columns)), {"score": logp_T})
        else:
            require_finite(columns, {"logp": logp_T})
        first_T = _first(columns)
        number_S = self._numbers(logp_T, columns)[columns.sample_T[first_T]]
        partner_S, label_S = columns.partner_T[first_T], columns.advantage_T[first_T].double()
        rows = denominators.num_samples / 2
        cfg, is_chosen_S, is_judged_S = self.cfg, label_S > 0, label_S != 0
        own_S = torch.where(is_chosen_S, likelihood_loss(cfg, number_S, _sizes(columns)[first_T]), 0.0)
        if isinstance(cfg, KtoLoss):
            loss_S, share = answer_loss(cfg, number_S, partner_S, label_S), 1.0
        else:
            chosen_S = torch.where(is_chosen_S, number_S, partner_S)
            rejected_S = torch.where(is_chosen_S, partner_S, number_S)
            assert columns.logp_reference_T is not None, "packing has made them"
            least_S = columns.logp_reference_T[first_T] if cfg.has_head else 0.0
            loss_S, share = pair_loss(cfg, chosen_S, rejected_S, least_S), 0.5
        loss = (loss_S + own_S).sum() / rows
        known_S = number_S.detach()
        is_right_S = label_S * (known_S - partner_S) > 0
        described = {
            "loss": (loss_S * share + own_S).detach().sum() / rows,
            "preference/accuracy": (is_right_S & is_judged_S).sum() * share / rows,
        }
        if isinstance(cfg, KtoLoss):
            described["preference/kl"] = (partner_S * is_judged_S).sum() / rows
        else:
            described["preference/margin"] = (label_S * known_S).sum() / rows
            described["preference/chosen"] = (is_chosen_S * known_S).sum() / rows
            described["preference/rejected"] = (~is_chosen_S * known_S).sum() / rows
        return loss, {name: Metric(value, "sum") for name, value in described.items()}

    def _numbers(self, logp_T: Tensor, columns: PackedColumns) -> Tensor:
        """float64 [T]: the number of each sample, by its index in the micro-batch."""
        mask_T = columns.action_mask_T
        zeros_T = logp_T.new_zeros(len(mask_T), dtype=torch.float64)
        if self.cfg.has_head:
            end_T = _ends(columns)
            return zeros_T.index_add(0, columns.sample_T[end_T], logp_T[end_T].double())
        number_T = zeros_T.index_add(0, columns.sample_T, torch.where(mask_T, logp_T, 0.0).double())
        assert isinstance(columns, ComparedColumns) and columns.logp_reference_T is not None, "packing has made them"
        first_T = _first(columns)
        number_T = number_T.index_add(0, columns.sample_T[first_T], -columns.logp_reference_T[first_T])
        if self.cfg.is_mean:
            number_T = number_T / zeros_T.index_add(0, columns.sample_T, mask_T.double()).clamp(min=1)
        return number_T


def _sizes(columns: PackedColumns) -> Tensor:
    """float64 [T]: the number of actions of each token's sample."""
    mask_T = columns.action_mask_T.double()
    return torch.zeros_like(mask_T).index_add(0, columns.sample_T, mask_T)[columns.sample_T]


def _index(columns: PackedColumns) -> Tensor:
    """int64 [T]: the index of each token's sample in the step."""
    return columns.token_T >> 32


def _first(columns: PackedColumns) -> Tensor:
    """bool [T]: the first position of each sample that has actions; the sample of an empty micro-batch has none."""
    sample_T = columns.sample_T
    begins_T = torch.ones_like(columns.action_mask_T)
    begins_T[1:] = sample_T[1:] != sample_T[:-1]
    has_actions_T = torch.zeros_like(sample_T).index_add(0, sample_T, columns.action_mask_T.long())[sample_T] > 0
    return begins_T & has_actions_T


def _ends(columns: PackedColumns) -> Tensor:
    """bool [T]: the position of the last token of each sample that has actions: the one after its last action's."""
    mask_T, sample_T = columns.action_mask_T, columns.sample_T
    is_end_T = torch.zeros_like(mask_T)
    is_end_T[1:] = mask_T[:-1] & ~mask_T[1:] & (sample_T[1:] == sample_T[:-1])
    return is_end_T


def judge_rows(
    cfg: PreferenceLossConfig, rows: Sequence[TrainingRow], logp: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each row, and whether the row is right in the sense of `preference/accuracy`.

    Args:
        logp: float64 [S], the log-prob of all actions of each sample, or its score.
    """
    reference_S = torch.tensor([one for row in rows for one in row.logp_reference], dtype=torch.float64)
    if cfg.has_head:
        chosen_R, rejected_R = torch.from_numpy(logp).view(-1, 2).unbind(1)
        return pair_loss(cfg, chosen_R, rejected_R, reference_S[::2]).numpy(), (chosen_R > rejected_R).numpy()
    number_S = torch.from_numpy(logp) - reference_S
    size_S = torch.tensor([tokens.action_mask.sum() for row in rows for tokens in row.samples])
    first_R, second_R = (number_S / size_S if cfg.is_mean else number_S).view(-1, 2).unbind(1)
    if not isinstance(cfg, KtoLoss):
        loss_R = pair_loss(cfg, first_R, second_R) + likelihood_loss(cfg, first_R, size_S[::2])
        return loss_R.numpy(), (first_R > second_R).numpy()
    kl, label_R = second_R.mean().clamp(min=0), torch.tensor([row.labels[0] for row in rows])
    return answer_loss(cfg, first_R, kl, label_R).numpy(), (label_R * (first_R - kl) > 0).numpy()
