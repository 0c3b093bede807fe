"""The losses of preferences (config/preferences.py), as functions of one number for each answer.

The number is the log-prob of all tokens of an answer, or its mean over them, minus the same of the reference model if
the loss has one; of a reward model it is the score. All losses are functions of the numbers of two answers; KTO's
second one is z.

Shape letter: S answers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from megatron_rl.config.preferences import (
    BradleyTerryLoss,
    CpoLoss,
    DpoLoss,
    IpoLoss,
    KtoLoss,
    OrpoLoss,
    PreferenceLossConfig,
    SimpoLoss,
)


def pair_loss(cfg: PreferenceLossConfig, chosen_S: Tensor, rejected_S: Tensor, least_S: Tensor | float = 0.0) -> Tensor:
    """[S]: the losses of pairs, without `likelihood_loss`.

    Args:
        chosen_S: the numbers of the chosen answers.
        rejected_S: the numbers of the rejected answers.
        least_S: the margins that the rows of a reward model ask for.

    Example: DPO with beta 0.1, and numbers 2 and -3: the margin is 0.5, and the loss log(1 + exp(-0.5)) = 0.474.
    """
    margin_S = chosen_S - rejected_S
    match cfg:
        case DpoLoss() | CpoLoss():
            margin_S, wrong = cfg.beta * margin_S, cfg.label_smoothing
            return -(1 - wrong) * logsigmoid(margin_S) - wrong * logsigmoid(-margin_S)
        case IpoLoss():
            return (margin_S - 1 / (2 * cfg.beta)) ** 2
        case SimpoLoss():
            return softplus(cfg.gamma - cfg.beta * margin_S)
        case OrpoLoss():
            log_odds_S = margin_S - _log_complement(chosen_S) + _log_complement(rejected_S)
            return -chosen_S - cfg.beta * logsigmoid(log_odds_S)
        case BradleyTerryLoss():
            return -logsigmoid(margin_S - least_S) + cfg.center * (chosen_S + rejected_S) ** 2
    raise AssertionError(f"{cfg.kind} has no pairs")


def likelihood_loss(cfg: PreferenceLossConfig, chosen_S: Tensor, num_tokens_S: Tensor) -> Tensor:
    """[S]: what CPO and CPO-SimPO add for a chosen answer: its tokens' mean negative log-likelihood times `alpha`."""
    if not isinstance(cfg, CpoLoss | SimpoLoss):
        return torch.zeros_like(chosen_S)
    return -cfg.alpha * (chosen_S if cfg.is_mean else chosen_S / num_tokens_S)


def answer_loss(cfg: KtoLoss, number_S: Tensor, kl_S: Tensor, label_S: Tensor) -> Tensor:
    """[S]: the losses of single answers.

    Args:
        kl_S: z, which is the same for all answers of a step.
        label_S: 1 if an answer is liked, -1 if it is not, and 0 if it only counts for z.
    """
    weight_S = torch.where(label_S > 0, cfg.desirable_weight, cfg.undesirable_weight)
    return label_S.abs() * weight_S * torch.sigmoid(-label_S * cfg.beta * (number_S - kl_S))


def _log_complement(logp_S: Tensor) -> Tensor:
    """log(1 - exp(logp)) for logp below 0. A probability that is 1 in float64 counts as the largest number below 1."""
    return torch.log(-torch.expm1(logp_S.clamp(max=-torch.finfo(torch.float64).eps)))
